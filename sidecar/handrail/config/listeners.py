"""What a user sets for the listeners of a process: TLS, tokens, and which of them may do without; and what follows from it.

With ``tls.cert_file`` every listener speaks TLS but those that ``plaintext`` names. Off the loopback nothing listens without TLS
unless it is named there.
"""

# ruff: noqa: RUF009 - setting() returns dataclasses.field(), which is what a default should be
from __future__ import annotations

import logging
import ssl
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail.config.schema import Problem, setting
from handrail.config.types import Address
from handrail.security.file_reload import ReloadingFile
from handrail.security.tls import ServerTls
from handrail.security.tokens import Authenticator, tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS of the listeners of this process."""

    cert_file: Path | None = setting(
        None,
        help="PEM file with the certificate of this process's listeners and the chain to its authority; read again when it "
        "changes",
        example="/etc/handrail/tls/tls.crt",
        unset="no TLS",
    )
    key_file: Path | None = setting(
        None,
        help="PEM file with the private key of cert_file, not encrypted",
        example="/etc/handrail/tls/tls.key",
        unset="no TLS",
    )
    client_ca_file: Path | None = setting(
        None,
        help="PEM file with the authorities of clients: a client must show a certificate of one of them (/healthz and "
        "/readyz stay open)",
        example="/etc/handrail/tls/ca.crt",
        unset="no client certificates",
    )

    def incomplete(self) -> Iterator[Problem]:
        """One of what belongs together."""
        example = "tls: {cert_file: /etc/handrail/tls/tls.crt, key_file: /etc/handrail/tls/tls.key}"
        if (self.cert_file is None) != (self.key_file is None):
            missing = "cert_file" if self.cert_file is None else "key_file"
            yield Problem(path=f"tls.{missing}", rule="must be given with the other: a certificate and its key", example=example)
        elif self.client_ca_file is not None and self.cert_file is None:
            rule = "must be given with tls.client_ca_file, as tls.key_file: client certificates are a part of TLS"
            yield Problem(path="tls.cert_file", rule=rule, example=example)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Who may use the listeners of this process."""

    token_file: Path | None = setting(
        None,
        help="file with bearer tokens, one a line, all valid; read again when it changes (/healthz and /readyz stay open)",
        example="/etc/handrail/tokens",
        unset="no token required",
    )


@dataclass(frozen=True, slots=True)
class Listener:
    """One address that is listened on: the name that ``plaintext`` knows it by, the setting's path, whether tokens are for it."""

    name: str
    path: str
    address: Address | None
    guarded: bool = True


def exposed(listeners: Collection[Listener], tls: TlsConfig, plaintext: Collection[str]) -> Iterator[Problem]:
    """Those that would speak plaintext beyond this host without having been told to."""
    for each in listeners:
        if each.address is None or each.address.loopback or each.name in plaintext or tls.cert_file is not None:
            continue
        rule = (
            "would listen beyond this host without TLS: give tls.cert_file and tls.key_file (docs/security.md), or an address of "
            f"the loopback, or, where something else protects the network, name it: plaintext: [{each.name}]"
        )
        yield Problem(
            path=each.path, value=repr(str(each.address)), rule=rule, example=f"{each.path}: 127.0.0.1:{each.address.port}"
        )


class ListenerSecurity:
    """TLS and tokens of one process's listeners, as configured.

    Raises ``OSError`` for a file that cannot be read and ``ValueError`` for one that cannot be used, naming setting and file.
    """

    def __init__(self, tls: TlsConfig, auth: AuthConfig, plaintext: Collection[str]) -> None:
        self.guards: list[Authenticator] = []
        self._plaintext = frozenset(plaintext)
        self._tls = None
        if tls.cert_file is not None and tls.key_file is not None:
            self._tls = ServerTls(tls.cert_file, tls.key_file, tls.client_ca_file)
        self._tokens = None
        if auth.token_file is not None:
            self._tokens = tokens(auth.token_file, use="tokens", setting="auth.token_file")

    def tls(self, listener: str) -> ServerTls | None:
        """None where the listener speaks plaintext."""
        return None if listener in self._plaintext else self._tls

    def context(self, listener: str, *, ask_only: bool = False) -> ssl.SSLContext | None:
        """``ask_only``: see ``ServerTls.context``."""
        tls = self.tls(listener)
        return None if tls is None else tls.context(ask_only=ask_only)

    def guard(self, listener: str, *, certificates: bool = False) -> Authenticator:
        """Who may use it. ``certificates``: the handshake only asks for one (``ask_only``), so the guard has to want it."""
        tls = self.tls(listener)
        guard = Authenticator(listener, self._tokens, certificates=certificates and tls is not None and tls.wants_clients)
        self.guards.append(guard)
        return guard

    def described(self, listener: Listener) -> str:
        """How it is protected, for a line at start: ``TLS, client certificates, token``, or ``plaintext``."""
        tls = self.tls(listener.name)
        words = ["plaintext"] if tls is None else ["TLS"]
        words += ["client certificates"] if tls is not None and tls.wants_clients else []
        words += ["token"] if listener.guarded and self._tokens is not None else []
        return ", ".join(words)

    def describe(self, bound: Mapping[str, str], listeners: Collection[Listener]) -> str:
        """What is bound, by name, and how each is protected: ``api 127.0.0.1:4380 (TLS, token), plugin /run/handrail.sock``."""
        known = {name: each for each in listeners for name in (each.name, each.path)}
        statement = {name: f" ({self.described(known[name])})" if name in known else "" for name in bound}
        return ", ".join(f"{name} {at}{statement[name]}" for name, at in bound.items())

    @property
    def watched(self) -> list[ReloadingFile[Any]]:
        """What is to be looked at for change."""
        found: list[ReloadingFile[Any]] = [] if self._tls is None else [self._tls.identity]
        return found if self._tokens is None else [*found, self._tokens]

    def warn_of_open(self, listeners: Collection[Listener]) -> None:
        """Say once at start what beyond this host anyone can read or use."""
        for each in listeners:
            if each.address is None or each.address.loopback:
                continue
            tls = self.tls(each.name)
            if tls is None:
                log.warning(
                    "%s (%s) on %s speaks no TLS, as plaintext says: only a network that is trusted may reach it",
                    each.name,
                    each.path,
                    each.address,
                )
            elif each.guarded and self._tokens is None and not tls.wants_clients:
                log.warning(
                    "%s (%s) on %s lets in whoever reaches it: set auth.token_file or tls.client_ca_file",
                    each.name,
                    each.path,
                    each.address,
                )
