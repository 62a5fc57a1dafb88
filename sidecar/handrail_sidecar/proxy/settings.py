"""Settings of the proxy.

They say where it listens, which process it stands in front of, and what it may change in a request's head.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Literal

from handrail.records import Process, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Settings of one proxy.

    Raises ``ValueError``, naming the setting and a valid example, for values that cannot work.
    ``trace_context``: ``set`` replaces the request's ``traceparent`` by the proxy's, ``pass`` leaves it alone.
    ``request_id``: ``add`` gives a request without ``X-Request-Id`` one (right at the edge), ``pass`` never does.
    ``engine_exports_to_us``: the engine's OTLP exporter sends to this sidecar's tap, so a trace that starts here may be sampled.
    ``idle_after_finish_s``: how long after ``finish_reason`` a stream may stay open and silent before its record is written.
    ``head_timeout_s``: how long a request's head may take, from the accept or its first byte on, without the TLS handshake.
    ``idle_timeout_s``: how long a client may send nothing between two requests or inside a body. An answer may take any time.
    ``max_streams``: None: as many as the descriptors allow.
    """

    listen_host: str
    listen_port: int
    upstream_host: str
    upstream_port: int
    role: Role
    process: Process
    trace_context: Literal["set", "pass"] = "set"
    request_id: Literal["add", "pass"] | None = None  # None: "add" at the edge, "pass" elsewhere
    engine_exports_to_us: bool = False
    max_head_bytes: int = 65536
    max_body_bytes: int | None = None
    connect_timeout_s: float = 5.0
    idle_after_finish_s: float = 5.0
    head_timeout_s: float = 30.0
    idle_timeout_s: float = 300.0
    max_streams: int | None = None
    record_all: bool = False
    tls: ssl.SSLContext | None = None  # None: plaintext

    def __post_init__(self) -> None:
        if "://" in self.upstream_host:
            raise ValueError(
                f"upstream_host: {self.upstream_host!r}: must be a host name or address without a scheme "
                "(the proxy forwards plain HTTP), such as 127.0.0.1"
            )
        if self.request_id is None:
            object.__setattr__(self, "request_id", "add" if self.role is Role.EDGE else "pass")

    @property
    def upstream(self) -> str:
        """``host:port`` of the observed process, for messages."""
        host = f"[{self.upstream_host}]" if ":" in self.upstream_host else self.upstream_host
        return f"{host}:{self.upstream_port}"
