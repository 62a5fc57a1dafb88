"""Listeners of a process: addresses, TLS, tokens and the ready file.

With ``tls.cert_file`` every listener uses TLS except those that ``plaintext`` names. A listener outside the loopback without TLS
is an error unless ``plaintext`` names it.
"""

# ruff: noqa: RUF009 - setting() returns dataclasses.field(), which is what a default should be
from __future__ import annotations

import json
import logging
import os
import ssl
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail.config.schema import Problem, setting
from handrail.config.types import Address, Duration
from handrail.security.file_reload import ReloadingFile
from handrail.security.tls import ServerTls
from handrail.security.tokens import Authenticator, tokens
from handrail.wal.filesystem import REACHABLE_MODE, READABLE_MODE, replace_file


def clashes(addresses: Mapping[str, Address | None]) -> Iterator[Problem]:
    """Settings that would bind the same port."""
    taken: dict[Address, str] = {}
    for path, address in addresses.items():
        if address is None or not address.port:
            continue
        if address in taken:
            example = f"{path}: {Address(address.host, 0)}"
            yield Problem(path=path, value=repr(str(address)), rule=f"is already taken by {taken[address]}", example=example)
        taken.setdefault(address, path)


def bound(**addresses: tuple[str, int] | None) -> dict[str, str]:
    """Bound sockets by name as ``host:port``, without those that are off."""
    return {name: str(Address(*at)) for name, at in addresses.items() if at is not None}


def write_ready(path: Path, addresses: Mapping[str, str]) -> None:
    """Write the ready file: all addresses are bound.

    Content: ``{"pid": ..., "addresses": {...}}``. A reader may open the file as soon as it exists, so it is written under
    another name and renamed. Raises ``OSError``.
    """
    line = json.dumps({"pid": os.getpid(), "addresses": dict(addresses)}) + "\n"
    replace_file(path, line.encode(), READABLE_MODE, REACHABLE_MODE)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS settings of this process's listeners."""

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
        """TLS settings that need another setting which is missing."""
        example = "tls: {cert_file: /etc/handrail/tls/tls.crt, key_file: /etc/handrail/tls/tls.key}"
        if (self.cert_file is None) != (self.key_file is None):
            missing = "cert_file" if self.cert_file is None else "key_file"
            yield Problem(path=f"tls.{missing}", rule="must be given with the other: a certificate and its key", example=example)
        elif self.client_ca_file is not None and self.cert_file is None:
            rule = "must be given with tls.client_ca_file, and so must tls.key_file: client certificates need TLS"
            yield Problem(path="tls.cert_file", rule=rule, example=example)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Authentication settings of this process's listeners."""

    token_file: Path | None = setting(
        None,
        help="file with bearer tokens, one a line, all valid; read again when it changes (/healthz and /readyz stay open)",
        example="/etc/handrail/tokens",
        unset="no token required",
    )


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening address.

    It has the name that ``plaintext`` uses, the path of its setting, and whether tokens apply to it.
    """

    name: str
    path: str
    address: Address | None
    guarded: bool = True


def exposed(listeners: Collection[Listener], tls: TlsConfig, plaintext: Collection[str]) -> Iterator[Problem]:
    """Listeners that would use plaintext beyond this host without permission."""
    for each in listeners:
        if each.address is None or each.address.loopback or each.name in plaintext or tls.cert_file is not None:
            continue
        rule = (
            "would listen beyond this host without TLS: set tls.cert_file and tls.key_file (docs/security.md), "
            f"or use a loopback address, or, if something else protects the network, set plaintext: [{each.name}]"
        )
        yield Problem(
            path=each.path, value=repr(str(each.address)), rule=rule, example=f"{each.path}: 127.0.0.1:{each.address.port}"
        )


class ListenerSecurity:
    """TLS and tokens of one process's listeners, as configured.

    Raises ``OSError`` for a file that cannot be read and ``ValueError`` for one that cannot be used; the error names setting and
    file.
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
        """TLS of the listener; None where it uses plaintext."""
        return None if listener in self._plaintext else self._tls

    def context(self, listener: str, *, ask_only: bool = False) -> ssl.SSLContext | None:
        """TLS context of the listener; ``ask_only``: see ``ServerTls.context``."""
        tls = self.tls(listener)
        return None if tls is None else tls.context(ask_only=ask_only)

    def guard(self, listener: str, *, certificates: bool = False) -> Authenticator:
        """Authenticator of the listener.

        ``certificates``: the handshake only asks for a client certificate (``ask_only``), so the authenticator has to require it.
        """
        tls = self.tls(listener)
        guard = Authenticator(listener, self._tokens, certificates=certificates and tls is not None and tls.wants_clients)
        self.guards.append(guard)
        return guard

    def described(self, listener: Listener) -> str:
        """Protection of a listener for the start message.

        Example: ``TLS, client certificates, token``, or ``plaintext``.
        """
        tls = self.tls(listener.name)
        words = ["plaintext"] if tls is None else ["TLS"]
        words += ["client certificates"] if tls is not None and tls.wants_clients else []
        words += ["token"] if listener.guarded and self._tokens is not None else []
        return ", ".join(words)

    def describe(self, bound: Mapping[str, str], listeners: Collection[Listener]) -> str:
        """Names, addresses and protection of everything that is bound.

        Example: ``api 127.0.0.1:4380 (TLS, token), plugin /run/handrail.sock``.
        """
        known = {name: each for each in listeners for name in (each.name, each.path)}
        statement = {name: f" ({self.described(known[name])})" if name in known else "" for name in bound}
        return ", ".join(f"{name} {at}{statement[name]}" for name, at in bound.items())

    @property
    def watched(self) -> list[ReloadingFile[Any]]:
        """Files to watch for changes."""
        found: list[ReloadingFile[Any]] = [] if self._tls is None else [self._tls.identity]
        return found if self._tokens is None else [*found, self._tokens]

    def warn_of_open(self, listeners: Collection[Listener]) -> None:
        """Warn once at start about listeners that anyone beyond this host can use."""
        for each in listeners:
            if each.address is None or each.address.loopback:
                continue
            tls = self.tls(each.name)
            if tls is None:
                log.warning(
                    "%s (%s) on %s listens without TLS, as the setting plaintext allows: only a trusted network may reach it",
                    each.name,
                    each.path,
                    each.address,
                )
            elif each.guarded and self._tokens is None and not tls.wants_clients:
                log.warning(
                    "%s (%s) on %s accepts every client that can reach it: set auth.token_file or tls.client_ca_file",
                    each.name,
                    each.path,
                    each.address,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionsConfig:
    """Connections to the listeners of this process. The proxy has bounds of its own."""

    max_per_listener: int | None = setting(
        None,
        help="most connections of one listener at once; it refuses more",
        example="1000",
        unset="by the limit of descriptors, at most 4096 (docs/security.md)",
        at_least=1,
    )
    max_per_peer: int | None = setting(
        None,
        help="most connections of one listener from one address; raise it if many senders share an address (NAT, a balancer)",
        example="1000",
        unset="a quarter of max_per_listener, at least 64",
        at_least=1,
    )
    handshake_timeout: Duration = setting(
        Duration(10 * 10**9),
        help="longest wait for the start of a TLS handshake, and longest time for the handshake",
        example="5s",
        at_least=10**8,
    )
    head_timeout: Duration = setting(
        Duration(10 * 10**9),
        help="longest time from the connection to a whole request head, and for the head of a later request",
        example="5s",
        at_least=10**8,
    )
    idle_timeout: Duration = setting(
        Duration(300 * 10**9),
        help="longest time between two requests of a connection",
        example="1m",
        at_least=10**9,
    )
