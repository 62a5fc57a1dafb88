"""Settings of an OTLP client, from code or ``OTEL_EXPORTER_OTLP_*`` variables.

Source: OpenTelemetry specification, "OTLP Exporter Configuration". Timeouts are in milliseconds there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from handrail.config.masking import shown_value
from handrail.security.tokens import AUTHORIZATION

File = str | os.PathLike[str] | None

_PREFIX = "OTEL_EXPORTER_OTLP_"


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

    ``protocol`` and ``insecure``: None lets the endpoint decide (``endpoint.py``). Headers may hold secrets: they are not
    printed.
    """

    endpoint: str
    protocol: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    compression: str = "gzip"
    timeout_s: float = 10.0
    insecure: bool | None = None
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

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], default_endpoint: str) -> ClientSettings:
        """Read the ``OTEL_EXPORTER_OTLP_*`` variables; empty ones count as unset.

        Raises ``ValueError`` with the variable's name.
        """

        def value(name: str) -> str | None:
            return environ.get(_PREFIX + name) or None

        return cls(
            endpoint=value("ENDPOINT") or default_endpoint,
            protocol=value("PROTOCOL"),
            headers=parse_headers(value("HEADERS") or ""),
            compression=value("COMPRESSION") or "gzip",
            timeout_s=_milliseconds(value("TIMEOUT") or "10000"),
            insecure=_boolean(value("INSECURE")),
            ca_file=value("CERTIFICATE"),
            cert_file=value("CLIENT_CERTIFICATE"),
            key_file=value("CLIENT_KEY"),
        )


def parse_headers(text: str) -> dict[str, str]:
    """Parse ``key=value,key2=value2``, values percent-encoded as in W3C baggage.

    Raises ``ValueError``, without quoting a value.
    """
    headers = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{_PREFIX}HEADERS: an item without '=' or name; valid: authorization=Bearer%20TOKEN,x-tenant=a")
        headers[key.strip().lower()] = unquote(value.strip())
    return headers


def _milliseconds(text: str) -> float:
    try:
        return float(text) / 1000
    except ValueError:
        raise ValueError(f"{_PREFIX}TIMEOUT {shown_value(repr(text))}: milliseconds, e.g. 10000") from None


def _boolean(text: str | None) -> bool | None:
    if text is None:
        return None
    # The specification: only "true" in any case is true, everything else is false.
    return text.strip().lower() == "true"
