"""Parse an OTLP endpoint as users write it: address, protocol and security.

| written | means |
|---|---|
| ``collector:4317``, ``collector`` | gRPC, plaintext |
| ``collector:4318`` or any other port | HTTP, plaintext |
| ``grpc://…``, ``grpcs://…`` | gRPC, plaintext / TLS; port 4317 where none is given |
| ``http://…:4317``, ``https://…:4317`` | gRPC, plaintext / TLS |
| ``http://…``, ``https://…`` | HTTP, plaintext / TLS; a path is kept, but for ``/v1/traces`` and its like at its end |

An explicit ``protocol`` wins over the port. Unlike in the SDKs, no scheme does not silently mean TLS: in a cluster it hardly ever
does. The signal's own path is put back for each signal.
Source: OTLP exporter specification 1.x; case G10.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final
from urllib.parse import urlsplit

from handrail.config.masking import shown_value
from handrail.otlp.signals import Signal

GRPC_PORT: Final = 4317
_EXAMPLE = "valid: http://collector:4318, https://collector:4318, collector:4317, grpc://collector:4317"


class WireProtocol(str, Enum):
    """Protocol on the wire; the value is that of ``OTEL_EXPORTER_OTLP_PROTOCOL``."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place that takes OTLP.

    ``base_path`` has no trailing slash and no signal path; '' for gRPC.
    """

    protocol: WireProtocol
    host: str
    port: int
    secure: bool
    base_path: str = ""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def url(self, signal: Signal) -> str:
        """URL for HTTP posts of ``signal``."""
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.base_path}/v1/{signal.value}"

    def __str__(self) -> str:
        if self.protocol is WireProtocol.GRPC:
            return f"{'grpcs' if self.secure else 'grpc'}://{self.authority}"
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.base_path}"


def parse_endpoint(text: str, *, protocol: str | None = None) -> Endpoint:
    """Parse an endpoint by the table above.

    Raises ``ValueError`` with the mistake and the valid forms.
    """
    wanted = _protocol(protocol)
    written = text.strip()
    scheme, separator, _ = written.partition("://")
    url = urlsplit(written if separator else f"//{written}")
    scheme = scheme.lower() if separator else ""
    if scheme not in ("", "http", "https", "grpc", "grpcs"):
        raise ValueError(f"endpoint {shown_value(repr(text))}: scheme {shown_value(repr(scheme))} is not known; {_EXAMPLE}")
    try:
        host, port = url.hostname, url.port
    except ValueError:
        raise ValueError(f"endpoint {shown_value(repr(text))}: not a URL; {_EXAMPLE}") from None
    if not host or " " in host or port == 0:
        raise ValueError(f"endpoint {shown_value(repr(text))}: it has no host and port; {_EXAMPLE}")
    if url.username is not None or url.query or url.fragment:
        raise ValueError(f"endpoint of {host}: user, query and fragment are not allowed (use a header for a token); {_EXAMPLE}")
    return _endpoint(scheme, host, port, url.path, wanted)


def _protocol(name: str | None) -> WireProtocol | None:
    if name is None or name == "":
        return None
    try:
        return WireProtocol(name)
    except ValueError:
        # http/json is in the specification, but nothing that speaks it lacks protobuf.
        raise ValueError(f"protocol {name!r}: valid are {', '.join(item.value for item in WireProtocol)}") from None


def _endpoint(scheme: str, host: str, port: int | None, path: str, wanted: WireProtocol | None) -> Endpoint:
    secure = scheme in ("https", "grpcs")
    if scheme in ("grpc", "grpcs"):
        if wanted is WireProtocol.HTTP:
            raise ValueError(f"endpoint {scheme}://{host}: the scheme is for gRPC, but the protocol is {wanted.value}")
        chosen = WireProtocol.GRPC
    else:
        by_port = WireProtocol.GRPC if port == GRPC_PORT or (not scheme and port is None) else WireProtocol.HTTP
        chosen = wanted or by_port
    if chosen is WireProtocol.GRPC:
        return Endpoint(chosen, host, port or GRPC_PORT, secure)
    default = 443 if secure else 80
    return Endpoint(chosen, host, port or (default if scheme else 4318), secure, _base(path))


def _base(path: str) -> str:
    """``path`` without a trailing slash and without the path of one signal."""
    base = path.rstrip("/")
    for signal in Signal:
        base = base.removesuffix(f"/v1/{signal.value}")
    return base.rstrip("/")
