"""Settings of an OTLP client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from handrail.security.tokens import AUTHORIZATION

File = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Names:
    """Users' names of these settings, for messages.

    ``prefix``: of each name; ``known``: those that exist, beside the endpoint.
    """

    prefix: str = ""
    known: frozenset[str] = frozenset({"headers", "ca_file", "cert_file", "key_file", "token_file"})

    def of(self, setting: str) -> str:
        """Full name of a setting; '' where users have no such setting."""
        return f"{self.prefix}{setting}" if setting in self.known else ""


NAMELESS: Final = Names(known=frozenset())
"""Names for a connection of which a user sets only the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Settings of one OTLP client.

    ``protocol``: None lets the endpoint decide (``endpoint.py``). Headers may hold secrets: they are not printed.
    """

    endpoint: str
    protocol: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    compression: str = "gzip"
    timeout_s: float = 10.0
    ca_file: File = None  # PEM; None: the system's
    cert_file: File = None  # PEM, with key_file: the client's own certificate
    key_file: File = None
    token_file: File = None  # a bearer token; its first line is sent
    names: Names = Names()

    def problems(self) -> list[str]:
        """All mistakes in these settings apart from the endpoint itself."""
        found = []
        if self.compression not in ("gzip", "none"):
            found.append(f"compression {self.compression!r}: valid are gzip, none")
        if not self.timeout_s > 0:
            found.append(f"timeout_s {self.timeout_s!r}: must be above 0, e.g. 10")
        if (self.cert_file is None) != (self.key_file is None):
            found.append(f"{self.names.prefix}cert_file and {self.names.prefix}key_file: give both or neither")
        if self.token_file is not None and any(name.lower() == AUTHORIZATION for name in self.headers):
            found.append(f"{self.names.prefix}token_file and a header authorization: give one of them")
        return found
