"""Query a Prometheus over its HTTP API.

Source: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final

from handrail.security.tokens import OPEN, Access
from handrail_cli.access import PROMETHEUS, NoRedirects
from handrail_cli.errors import CliError

TIMEOUT_S: Final = 10.0
_LONGEST: Final = 16 * 2**20
_ADDRESS: Final = "the address of its HTTP API with its prefix, such as http://127.0.0.1:9090"


class QueryRefusedError(Exception):
    """Prometheus answers, but refuses the query; the message is Prometheus' own."""


def base_of(url: str) -> str:
    """Return the address with its scheme, without a slash at its end."""
    return url.rstrip("/") if url.startswith(("http://", "https://")) else f"http://{url.rstrip('/')}"


def has_result(base: str, access: Access = OPEN) -> Callable[[str], bool]:
    """Return a function that checks whether a query has any result now.

    The function raises ``QueryRefusedError`` where Prometheus refuses the query.
    It raises ``CliError`` where Prometheus cannot be queried.
    """
    opener = urllib.request.build_opener(NoRedirects(), urllib.request.HTTPSHandler(context=access.context))

    def ask(query: str) -> bool:
        target = f"{base}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with opener.open(urllib.request.Request(target, headers=dict(access.headers)), timeout=TIMEOUT_S) as response:
                return bool(json.loads(response.read(_LONGEST))["data"]["result"])
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(base, error.code, error.headers.get("Location"), _error_text(error)) from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, ssl.SSLError):
                raise PROMETHEUS.no_tls(base, reason) from None
            raise CliError(what=f"cannot query Prometheus: {reason}", where=base, valid=_ADDRESS) from None
        except (ValueError, KeyError, TypeError):
            raise CliError(what="the server at this address is not Prometheus", where=base, valid=_ADDRESS) from None

    return ask


def _error_text(answer: urllib.error.HTTPError) -> Mapping[str, Any]:
    """Return what Prometheus writes in the body of a failure.

    Empty where the body is not Prometheus' own.
    """
    try:
        reported_answer = json.loads(answer.read(_LONGEST))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    return reported_answer if isinstance(reported_answer, dict) and reported_answer.get("status") == "error" else {}


def _refused(base: str, status: int, location: str | None, fields: Mapping[str, Any]) -> Exception:
    text = str(fields.get("error") or "")
    if status in (400, 422) and text:  # the query cannot be parsed (400) or evaluated (422)
        return QueryRefusedError(text)
    if status == 401:
        return CliError(what="Prometheus requires credentials (HTTP 401)", where=base, valid=PROMETHEUS.let_in(401))
    if status == 403:
        what = f"Prometheus denies access (HTTP 403{f': {text}' if text else ''})"
        return CliError(what=what, where=base, valid=f"{PROMETHEUS.let_in(403)}, or another token: --token-file FILE")
    if location:
        return CliError(what=f"Prometheus redirects to {location} (HTTP {status})", where=base, valid=_ADDRESS)
    if status == 400 and base.startswith("http://"):  # Go's server answers so, in plain text
        what = "the server does not accept plain HTTP (HTTP 400)"
        return CliError(what=what, where=base, valid=f"https://{base.partition('://')[2]} if the server uses TLS")
    if status == 404:
        return CliError(what="there is no Prometheus API at this address (HTTP 404)", where=base, valid=_ADDRESS)
    return CliError(
        what=f"Prometheus cannot answer: {text or f'HTTP {status}'}", where=base, valid="try again, or read the log of Prometheus"
    )
