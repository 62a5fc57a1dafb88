"""Asks a Prometheus over its HTTP API."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Final

from handrail.cli.failure import CliError

TIMEOUT_S: Final = 10.0
_LONGEST: Final = 16 * 2**20


def has_result(url: str) -> Callable[[str], bool]:
    """A function that says whether a query has any result now. It raises ``CliError`` where Prometheus cannot be asked."""
    base = url.rstrip("/") if url.startswith(("http://", "https://")) else f"http://{url.rstrip('/')}"

    def ask(query: str) -> bool:
        target = f"{base}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(target, timeout=TIMEOUT_S) as response:
                return bool(json.loads(response.read(_LONGEST))["data"]["result"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "reason", None) or error
            valid = "the address of its HTTP API, such as http://127.0.0.1:9090"
            raise CliError(what=f"Prometheus cannot be asked: {reason}", where=base, valid=valid) from None

    return ask
