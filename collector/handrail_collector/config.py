"""Configuration of the collector."""

# ruff: noqa: RUF009 - setting() and section() return dataclasses.field(), as a default should
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from handrail.config.listeners import AuthConfig, ConnectionsConfig, Listener, TlsConfig, clashes, exposed
from handrail.config.schema import Problem, section, setting
from handrail.config.telemetry import OtlpMetricsConfig, OwnTracesConfig
from handrail.config.types import Address, Duration, Size, Url


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionConfig:
    """When a request is decided.

    The state of the request decides, not a fixed wait from its first span.
    """

    settle: Duration = setting(
        Duration(2 * 10**9),
        help="time to gather evidence that comes after the decision, before the collector writes the row again",
        example="5s",
    )
    engine_wait: Duration = setting(
        Duration(12 * 10**9),
        help="longest wait for the engines' own spans, which batching exporters send seconds late",
        example="20s",
    )
    max_open: Duration = setting(
        Duration(3600 * 10**9),
        help="longest time to hold the evidence of a prefill for its decode and its edge, which end with the stream",
        example="30m",
        at_least=10**9,
    )
    max_open_requests: int = setting(
        100_000,
        help="most requests in memory, including those decided in the last two minutes; beyond it the collector decides the "
        "oldest early and counts it",
        example="250000",
        at_least=1,
    )

    hung_after: Duration = setting(
        Duration(60 * 10**9),
        help="age from which an open KV hand-off counts as hung",
        example="30s",
        at_least=10**9,
    )

    def too_short(self) -> Iterator[Problem]:
        """Report a ``max_open`` below the waits, which would cut every request."""
        for name in ("settle", "engine_wait"):
            if getattr(self, name) > self.max_open:
                rule = f"must not be longer than decision.max_open ({self.max_open})"
                yield Problem(
                    path=f"decision.{name}", value=str(getattr(self, name)), rule=rule, example=f"decision: {{{name}: 2s}}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """How long the store keeps data, and when maintenance runs."""

    retention: Duration | None = setting(
        Duration(30 * 24 * 3600 * 10**9),
        help="time to keep a day's requests and spans after its end",
        example="14d",
        unset="for ever",
        at_least=24 * 3600 * 10**9,
    )
    samples_retention: Duration | None = setting(
        Duration(3 * 24 * 3600 * 10**9),
        help="time to keep a day's samples of GPUs, links and engines after its end, if shorter than retention; a host of "
        "eight GPUs writes up to 233 MB a day",
        example="7d",
        unset="as long as requests",
        at_least=24 * 3600 * 10**9,
    )
    max_bytes: Size | None = setting(
        None,
        help="bound of the store on disk; beyond it the collector removes first the samples of the oldest days, then "
        "the oldest days, but never the current day; removed files still use disk space for store.grace",
        example="200GiB",
        unset="no bound but the disk",
        at_least=2**20,
    )
    compact_after: Duration = setting(
        Duration(15 * 60 * 10**9),
        help="time after the end of an hour until the collector merges its files into one",
        example="1h",
    )
    grace: Duration = setting(
        Duration(10 * 60 * 10**9),
        help="time that a removed file stays on disk, for queries that began before",
        example="1h",
        at_least=10**9,
    )
    upkeep_interval: Duration = setting(
        Duration(5 * 60 * 10**9),
        help="time between two passes of maintenance (retention, the bound, compaction)",
        example="1m",
        at_least=10**9,
    )


class CollectorListener(str, Enum):
    """Listeners of a collector; ``api`` serves /metrics too."""

    OTLP_GRPC = "otlp_grpc"
    OTLP_HTTP = "otlp_http"
    API = "api"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorConfig:
    """Configuration of one collector."""

    otlp_grpc: Address | None = setting(
        Address("127.0.0.1", 4317),
        help="address of the OTLP/gRPC receiver",
        example="127.0.0.1:4317",
        unset="off",
    )
    otlp_http: Address | None = setting(
        Address("127.0.0.1", 4318),
        help="address of the OTLP/HTTP receiver",
        example="127.0.0.1:4318",
        unset="off",
    )
    api: Address | None = setting(
        Address("127.0.0.1", 4380),
        help="address of the HTTP API, /metrics, /healthz and /readyz",
        example="127.0.0.1:4380",
        unset="off",
    )
    tls: TlsConfig = section(TlsConfig)
    auth: AuthConfig = section(AuthConfig)
    plaintext: tuple[CollectorListener, ...] = setting(
        (),
        help="listeners without TLS, even if other hosts can reach them, because a mesh or a NetworkPolicy protects the network",
        example="[otlp_grpc, otlp_http]",
        unset="none",
    )
    connections: ConnectionsConfig = section(ConnectionsConfig)
    data: Path = setting(Path("handrail-data"), help="folder of the journal and the store", example="/var/lib/handrail")
    journal_max_bytes: Size = setting(
        Size(4 * 2**30),
        help="bound of the journal; when it is full, senders must retry later",
        example="16GiB",
        at_least=16 * 2**20,
    )
    flush_interval: Duration = setting(
        Duration(5 * 10**9),
        help="time between two publishes of decided requests and their spans to the store",
        example="1s",
        at_least=10**7,
    )
    decision: DecisionConfig = section(DecisionConfig)
    store: StoreConfig = section(StoreConfig)
    forward: tuple[Url, ...] = setting(
        (),
        help="OTLP endpoints that get a copy of what the collector receives (Tempo, Jaeger, an OpenTelemetry Collector)",
        example="[http://tempo:4318]",
        schemes=("http", "https", "grpc", "grpcs"),
        unset="none",
    )
    otlp_metrics: OtlpMetricsConfig = section(OtlpMetricsConfig)
    own_traces: OwnTracesConfig = section(OwnTracesConfig)
    ready_file: Path | None = setting(
        None,
        help="file that gets the pid and the bound addresses as JSON when everything listens",
        example="/run/handrail/collector.json",
        unset="none",
    )

    def cross_check(self) -> Iterator[Problem]:
        """Report problems between values."""
        if self.otlp_grpc is None and self.otlp_http is None:
            rule = "must be given unless otlp_grpc is: a collector without a receiver collects nothing"
            yield Problem(path="otlp_http", rule=rule, example="otlp_http: 127.0.0.1:4318")
        yield from self.decision.too_short()
        yield from self.tls.incomplete()
        yield from exposed(self.listeners, self.tls, self.plaintext)
        yield from clashes({name: getattr(self, name) for name in ("otlp_grpc", "otlp_http", "api")})

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The configured listeners."""
        return tuple(Listener(each.value, each.value, getattr(self, each.value)) for each in CollectorListener)
