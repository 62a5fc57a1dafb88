"""Bearer tokens from a file that may change any time, and client certificates.

They decide which clients may use a listener. A token file holds one token a line; empty lines and lines that begin with ``#`` are
skipped. A server takes every token in it, so that a token is changed without a gap: add the new one, move the clients over,
remove the old one. A client sends the first.
Source: RFC 6750 (bearer tokens), RFC 9110 section 11 (challenges).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from handrail.security.file_reload import Contents, ReloadingFile

log = logging.getLogger(__name__)

AUTHORIZATION: Final = "authorization"
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750 section 2.1
_SHORT: Final = 16
_MAX_LOGGED_PEERS: Final = 64  # peers whose refusal was logged; later ones are only counted


def tokens(file: Path, *, use: str, setting: str) -> ReloadingFile[tuple[str, ...]]:
    """Tokens of a file, in their order, at least one.

    Raises ``OSError``, and ``ValueError`` for an invalid token.
    """

    def read(contents: Contents) -> tuple[str, ...]:
        return _tokens(contents[setting], f"{setting}: {file}")

    return ReloadingFile(use, {setting: file}, read, secrets=frozenset({setting}))


def _tokens(content: bytes, where: str) -> tuple[str, ...]:
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ValueError(
            f"{where} holds characters that are not ASCII; write one token a line, e.g. from: openssl rand -hex 32"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not _TOKEN.fullmatch(text):  # not shown: it may be a secret
            raise ValueError(
                f"{where}: line {number} is not a token: use letters, digits, - . _ ~ + / and = at the end, without blanks"
            )
        if len(text) < _SHORT:
            log.warning(
                "%s: line %d: a token of %d characters can be guessed; make one with: openssl rand -hex 32",
                where,
                number,
                len(text),
            )
        found.append(text)
    if not found:
        raise ValueError(f"{where} holds no token; write one a line, e.g. from: openssl rand -hex 32")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials for a peer's listener.

    ``context``: for https, None for the system's authorities alone.
    """

    context: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # they hold a secret


OPEN: Final = Access()


def bearer(token: str) -> str:
    """Value of the ``Authorization`` header."""
    return f"Bearer {token}"


@dataclass(frozen=True, slots=True)
class Denied:
    """Reason why a request is refused.

    ``challenge``: of the header ``WWW-Authenticate``; '' where no token would help.
    """

    reason: str
    challenge: str = ""

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return 401 if self.challenge else 403

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"WWW-Authenticate": self.challenge} if self.challenge else {}


class Authenticator:
    """Authentication of one listener.

    ``refused`` counts. ``tokens`` None: no token is required. ``certificates``: a client certificate is required that the
    handshake only asked for.
    """

    def __init__(
        self, listener: str, tokens: ReloadingFile[tuple[str, ...]] | None = None, *, certificates: bool = False
    ) -> None:
        self.listener = listener
        self.refused = 0
        self._tokens = tokens
        self._certificates = certificates
        self._logged_peers: set[str] = set()

    @property
    def open(self) -> bool:
        """Whether every request may pass."""
        return self._tokens is None and not self._certificates

    def denial(self, authorization: Sequence[str], *, certified: bool = False) -> Denied | None:
        """Refusal of a request; None where it may pass.

        ``authorization``: the values of that header. ``certified``: the handshake has verified a certificate of the client.
        """
        denied = self._denial(authorization, certified)
        self.refused += denied is not None
        return denied

    def log_denial(self, denied: Denied, host: str) -> None:
        """Log a refused client: once for each of the first hosts.

        The counter has the rest.
        """
        if host not in self._logged_peers and len(self._logged_peers) < _MAX_LOGGED_PEERS:
            self._logged_peers.add(host)
            log.warning("%s: refused a request from %s: %s (logged once a host)", self.listener, host, denied.reason)

    def _denial(self, authorization: Sequence[str], certified: bool) -> Denied | None:
        if self._certificates and not certified:
            return Denied("a client certificate is required, signed by an authority of tls.client_ca_file")
        if self._tokens is None:
            return None
        if not authorization:
            return Denied("a token is required: Authorization: Bearer TOKEN", 'Bearer realm="handrail"')
        scheme, _, token = authorization[0].partition(" ")
        if len(authorization) == 1 and scheme.lower() == "bearer" and known(token.strip(), self._tokens.value):
            return None
        return Denied("the token is not in auth.token_file", 'Bearer realm="handrail", error="invalid_token"')


def known(token: str, valid: Sequence[str]) -> bool:
    """Whether ``token`` is one of ``valid``, in constant time.

    The time does not show how much of the token is right, nor which one it is.
    """
    given = _digest(token)
    found = False
    for each in valid:
        found |= hmac.compare_digest(given, _digest(each))
    return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
