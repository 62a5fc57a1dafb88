"""Observed process, source of a record, and the record's place in its trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Role(str, Enum):
    """Role of the observed process in the serving stack."""

    EDGE = "edge"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    COLLOCATED = "collocated"
    UNKNOWN = "unknown"


class Source(str, Enum):
    """Source that a fact came from."""

    PROXY = "proxy"
    PLUGIN = "plugin"
    MIDDLEWARE = "middleware"
    OTLP = "otlp"
    METRICS = "metrics"
    LOG = "log"
    NVML = "nvml"
    DCGM = "dcgm"
    RDMA = "rdma"
    NIC = "nic"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanIds:
    """Place of a record in its trace.

    ``parent_span_id`` is '' for a root; ``flags`` are the W3C trace flags.
    """

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Observed process and its host, from the resource."""

    role: Role
    instance: str  # host:port of the engine or router; '' when unknown
    host: str  # host.id, else host.name, else ''; equal strings share one wall clock
    service: str = ""
    sender: str = ""  # handrail.sender.id of the sidecar that sent it
    host_name: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Error or oddity of one request, in closed words plus the ids that show it."""

    kind: str
    detail: str = ""
    evidence: tuple[str, ...] = field(default=())
