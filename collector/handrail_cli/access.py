"""Define how a command authenticates to the server that it queries.

The server is a collector's API or a Prometheus. Flags or the environment give certificates and a token.
"""

from __future__ import annotations

import argparse
import os
import ssl
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from handrail.security.tls import client_identity
from handrail.security.tokens import AUTHORIZATION, Access, bearer, tokens
from handrail_cli.errors import EXIT_USAGE, CliError


@dataclass(frozen=True, slots=True)
class QueriedServer:
    """Kind of server that a command queries.

    ``variable``: prefix of the names of its environment variables. A token for one server is not for another.
    """

    name: str
    variable: str

    def let_in(self, status: int) -> str:
        """Return what to give to a server that answers with this status.

        The statuses are 401 and 403; '' for any other.
        """
        if status == 401:
            return f"--token-file FILE (or {self.variable}_TOKEN_FILE) with one of {self.name}'s tokens"
        if status == 403:
            files = f"{self.variable}_CERT_FILE, {self.variable}_KEY_FILE"
            return f"--cert-file FILE and --key-file FILE (or {files}) that {self.name} accepts"
        return ""

    def no_tls(self, url: str, reason: ssl.SSLError) -> CliError:
        """Return the error for TLS that failed with this server, with the reason."""
        if isinstance(reason, ssl.SSLCertVerificationError):
            what = f"the certificate of {self.name} is not trusted: {reason.verify_message}"
            valid = f"--ca-file FILE (or {self.variable}_CA_FILE) with its authority, and an address that the certificate names"
        elif "ALERT" in str(reason.reason):
            what, valid = f"{self.name} does not accept the client certificate: {reason.reason}", self.let_in(403)
        else:
            what = f"the TLS handshake failed: {reason.reason or reason}"
            valid = f"http://{url.partition('://')[2]} if the server uses plain HTTP"
        return CliError(what=what, where=url, valid=valid)


COLLECTOR: Final = QueriedServer("the collector", "HANDRAIL_API")
PROMETHEUS: Final = QueriedServer("Prometheus", "HANDRAIL_PROMETHEUS")

# flag's destination: its meaning
_FILES: Final = {
    "ca_file": "certificate authorities that sign {name}'s certificate (default: {variable}, else the system's)",
    "cert_file": "client certificate for {name} (default: {variable})",
    "key_file": "private key of --cert-file (default: {variable})",
    "token_file": "file with {name}'s bearer token (default: {variable})",
}


def add_access_flags(parser: argparse.ArgumentParser, peer: QueriedServer = COLLECTOR) -> None:
    """Add ``--ca-file``, ``--cert-file``, ``--key-file`` and ``--token-file``."""
    group = parser.add_argument_group(f"access to {peer.name} (docs/security.md)")
    for name, text in _FILES.items():
        help_text = text.format(name=peer.name, variable=f"${_variable(peer, name)}")
        group.add_argument(_flag(name), metavar="FILE", type=Path, help=help_text)


def access(arguments: argparse.Namespace, url: str, peer: QueriedServer = COLLECTOR) -> Access:
    """Read the access for ``url`` from flags and environment; the flag wins.

    Raises ``CliError`` for files that cannot be used.
    """
    files = {name: _given(arguments, name, peer) for name in _FILES}
    ca, cert, key, token = files.values()
    if (cert is None) != (key is None):
        raise CliError(what="--cert-file and --key-file need each other", valid="both, or neither", exit_code=EXIT_USAGE)
    try:
        context = None
        if url.startswith("https://"):
            context = client_identity(ca, cert, key, use="peer").value.context
        headers = {}
        if token is not None:
            headers[AUTHORIZATION] = bearer(tokens(token, use="peer_token", setting=_flag("token_file")).value[0])
    except (OSError, ValueError) as error:
        raise CliError(what=str(error), valid="readable files in PEM; see docs/security.md", exit_code=EXIT_USAGE) from None
    return Access(context, headers)


def access_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the access flags as the user gave them, for a shown command line."""
    given = {name: getattr(arguments, name, None) for name in _FILES}
    return tuple(word for name, path in given.items() if path is not None for word in (_flag(name), str(path)))


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects.

    These servers never redirect, and no other server may get the token.
    """

    def redirect_request(self, *_: Any) -> None:
        return None


def _given(arguments: argparse.Namespace, name: str, peer: QueriedServer) -> Path | None:
    path: Path | None = getattr(arguments, name, None)
    text = os.environ.get(_variable(peer, name))
    return path if path is not None else Path(text) if text else None


def _variable(peer: QueriedServer, name: str) -> str:
    return f"{peer.variable}_{name.upper()}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
