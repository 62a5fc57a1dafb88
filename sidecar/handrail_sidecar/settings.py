"""Settings of one sidecar.

It also names the file in which a started sidecar publishes the addresses that it listens on.
"""

# ruff: noqa: RUF009 - setting() and section() return dataclasses.field(), which is what a default should be
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from handrail.config.listeners import AuthConfig, ConnectionsConfig, Listener, TlsConfig, clashes, exposed
from handrail.config.schema import Problem, section, setting
from handrail.config.telemetry import OtlpMetricsConfig, OwnTracesConfig
from handrail.config.types import Address, Duration, Size, Url, nearest
from handrail.device_counters.gpu import NAMES as GPU_COUNTERS
from handrail.otlp.settings import ClientSettings, Names
from handrail.records import Role
from handrail.security.tokens import AUTHORIZATION

ROLES: Final = (Role.EDGE, Role.ROUTER, Role.PREFILL, Role.DECODE, Role.COLLOCATED)


class TraceContextMode(str, Enum):
    """What the proxy does with ``traceparent`` (DESIGN section 4)."""

    SET = "set"  # forward the inbound trace id and flags with the proxy's span as the parent; start a trace without them
    PASS = "pass"  # forward the inbound context unchanged, add nothing


class NewTraces(str, Enum):
    """The sampled flag of a trace that starts at this proxy.

    A trace starts here when the client sent none.
    """

    AUTO = "auto"  # sampled when the engine exports to a tap of this sidecar
    SAMPLED = "sampled"  # at an edge: the engines behind it report to taps of their own
    UNSAMPLED = "unsampled"


class RequestIdMode(str, Enum):
    """What the proxy does with a request that has no ``X-Request-Id``."""

    AUTO = "auto"  # add at the edge, pass elsewhere
    ADD = "add"
    PASS = "pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorEndpoint:
    """Where the sidecar sends its records."""

    endpoint: Url = setting(
        Url("http://127.0.0.1:4318"),
        help="OTLP endpoint of the collector: http(s) for OTLP/HTTP, grpc(s) for OTLP/gRPC",
        example="grpcs://collector:4317",
        flag="--collector",
        schemes=("http", "https", "grpc", "grpcs"),
    )
    headers: Mapping[str, str] = setting(
        default_factory=dict,
        help="headers of every export; for a token use collector.token_file",
        example="{x-scope: team-a}",
        flag="--collector-header",
        secret=True,
        unset="none",
    )
    ca_file: Path | None = setting(
        None,
        help="PEM file with the authorities that check the collector's certificate; read again when it changes",
        example="/etc/handrail/tls/ca.crt",
        unset="the system's",
    )
    cert_file: Path | None = setting(
        None,
        help="PEM file with the sidecar's certificate for the collector; read again when it changes",
        example="/etc/handrail/tls/tls.crt",
        unset="none",
    )
    key_file: Path | None = setting(
        None,
        help="PEM file with the private key of cert_file, not encrypted",
        example="/etc/handrail/tls/tls.key",
        unset="none",
    )
    token_file: Path | None = setting(
        None,
        help="file with the collector's bearer token in its first line; read again when it changes",
        example="/etc/handrail/token",
        unset="none",
    )

    @property
    def client(self) -> ClientSettings:
        """Settings for the client of this endpoint."""
        return ClientSettings(
            endpoint=self.endpoint,
            headers=self.headers,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
            token_file=self.token_file,
            names=Names("collector."),
        )

    def inconsistent(self) -> Iterator[Problem]:
        """Find values that have no effect, or not the effect that they seem to have."""
        if (self.cert_file is None) != (self.key_file is None):
            missing = "cert_file" if self.cert_file is None else "key_file"
            rule = "must be given with the other: a certificate and its key"
            yield Problem(path=f"collector.{missing}", rule=rule, example=_CLIENT_CERT)
        if self.endpoint.scheme in ("http", "grpc"):
            for name in ("ca_file", "cert_file"):
                if getattr(self, name) is not None:
                    rule = f"does nothing with {self.endpoint.scheme}://, which is plaintext"
                    secure = f"{self.endpoint.scheme}s{self.endpoint.removeprefix(self.endpoint.scheme)}"
                    yield Problem(path=f"collector.{name}", rule=rule, example=f"collector: {{endpoint: {secure}}}")
        if self.token_file is not None and any(name.lower() == AUTHORIZATION for name in self.headers):
            rule = "and a header authorization: give one of them"
            yield Problem(path="collector.token_file", rule=rule, example="collector: {token_file: /etc/handrail/token}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolConfig:
    """The spool of what the collector has not acknowledged yet."""

    dir: Path | None = setting(
        None,
        help="folder that keeps unacknowledged records over a restart of the sidecar",
        example="/var/lib/handrail/spool",
        unset="in memory",
    )
    max_bytes: Size = setting(
        Size(64 * 2**20),
        help="bound of the spool, on disk or in memory; beyond it the tap refuses (retryable), and the sidecar drops and "
        "counts its own spans",
        example="256MiB",
        at_least=2**20,
    )


class SidecarListener(str, Enum):
    """What a sidecar listens on, besides the plugin's socket."""

    ADMIN = "admin"  # admin: /metrics, /healthz, /readyz
    TAP = "tap"  # otlp_grpc, otlp_http
    PROXY = "proxy"  # listen


class LogStart(str, Enum):
    """Where to begin in a log file that exists at start and has no saved position."""

    END = "end"
    START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The engine's log."""

    files: tuple[str, ...] = setting(
        (),
        help="log files or named pipes of the engine with its KV lines; - is standard input",
        example="[/var/log/vllm/decode.log]",
        flag="--log-file",
        unset="none",
    )
    start: LogStart = setting(
        LogStart.END,
        help="where reading begins in an existing file whose position is not in spool.dir",
        example="start",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """The engine's own metrics page."""

    url: Url | None = setting(
        None,
        help="address of the engine's or router's metrics page; the default path is /metrics",
        example="http://127.0.0.1:8200/metrics",
        unset="none",
    )
    interval: Duration = setting(
        Duration(5 * 10**9),
        help="time between two reads of the page",
        example="2s",
        at_least=100 * 10**6,
    )
    timeout: Duration = setting(
        Duration(4 * 10**9),
        help="longest time for an answer",
        example="10s",
        at_least=10 * 10**6,
    )
    headers: Mapping[str, str] = setting(
        default_factory=dict,
        help="headers of each request, such as a token",
        example='{authorization: "Bearer ..."}',
        flag="--metrics-header",
        secret=True,
        unset="none",
    )
    hung_after: Duration = setting(
        Duration(30 * 10**9),
        help="time without a counted step, token or finished request, while work waits, after which the engine counts as hung",
        example="1m",
        at_least=10**9,
    )


class Sampling(str, Enum):
    """Whether this sidecar reads counters of its host's hardware."""

    AUTO = "auto"  # beside an engine
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksConfig:
    """RDMA ports and network interfaces of this host."""

    sample: Sampling = setting(
        Sampling.AUTO,
        help="read the counters of RDMA ports and network interfaces; auto: only beside an engine (role prefill, decode or "
        "collocated)",
        example="off",
    )
    devices: tuple[str, ...] = setting(
        (),
        help="the only devices to read; * matches any characters; an RDMA port is adapter/port",
        example="[mlx5_*, bond0]",
        unset="RDMA ports, the loopback, adapters, bonds and VLANs; in a pod's network its virtual interfaces too",
    )
    interval: Duration = setting(
        Duration(100 * 10**6),
        help="time between two reads of the byte counters; all other counters are read every 5 s",
        example="1s",
        at_least=10 * 10**6,
    )
    sysfs: Path = setting(
        Path("/sys"),
        help="folder of sysfs; in a container a mount of the host's, for example",
        example="/host/sys",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    """The GPUs of this host, through NVML."""

    sample: Sampling = setting(
        Sampling.AUTO,
        help="read NVML; auto: only beside an engine (role prefill, decode or collocated); without a driver the sidecar "
        "reads nothing and logs that",
        example="off",
    )
    interval: Duration = setting(
        Duration(100 * 10**6),
        help="time between two reads of fast counters: 100ms is 10 Hz; down to 10ms for a short capture",
        example="20ms",
        at_least=10 * 10**6,
        at_most=60 * 10**9,
    )
    devices: tuple[str, ...] = setting(
        (),
        help="indices or UUIDs of the GPUs that the engine uses; the sidecar reads no others",
        example="[0, GPU-8f1b]",
        unset="those in CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES, else all",
    )
    without: tuple[str, ...] = setting(
        (),
        help="names of counters to omit (handrail gpus lists them)",
        example="[energy_joules, sm_occupancy_ratio]",
        unset="none",
    )
    dcgm_url: Url | None = setting(
        None,
        help="dcgm-exporter's metrics page; the sidecar reads it every 5 s, instead of NVML, if it has no driver",
        example="http://127.0.0.1:9400/metrics",
        unset="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Limits by which ``handrail_slo_requests_total`` counts requests as good.

    The rules that page are made from a file of their own.
    """

    ttft: Duration = setting(
        Duration(10**9),
        help="objective for a request's time to first token",
        example="500ms",
        at_least=10**6,
    )
    itl: Duration = setting(
        Duration(50 * 10**6),
        help="objective for the gaps of a request: 99 % of them must meet it",
        example="30ms",
        at_least=10**6,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Limits of the inline proxy.

    An answer may take any time, and a stream may last any time.
    """

    max_streams: int | None = setting(
        None,
        help="most streams at once; further requests get 503 with Retry-After",
        example="200",
        unset="by the limit of descriptors, two a stream (docs/deployment.md)",
        at_least=1,
    )
    head_timeout: Duration = setting(
        Duration(30 * 10**9),
        help="longest time for a request's head, from the connection or the head's first byte on",
        example="10s",
        at_least=10**8,
    )
    idle_timeout: Duration = setting(
        Duration(300 * 10**9),
        help="longest silence of a client between two requests, or inside a request's body",
        example="2m",
        at_least=10**9,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """One sidecar beside one router or engine process."""

    role: Role = setting(
        help="role of the process that this sidecar observes",
        example="decode",
        choices=tuple(role.value for role in ROLES),
    )
    listen: Address | None = setting(
        None,
        help="address of the inline proxy; needs upstream",
        example="127.0.0.1:8000",
        unset="no proxy",
    )
    upstream: Url | None = setting(
        None,
        help="process to which the proxy forwards (plain HTTP)",
        example="http://127.0.0.1:8100",
        schemes=("http",),
        path=False,
        unset="none",
    )
    proxy: ProxyConfig = section(ProxyConfig)
    instance: str = setting(
        "",
        help="host:port that names the observed process in every row and metric",
        example="10.0.0.7:8100",
        unset="host:port of upstream, else of metrics.url",
    )
    service_name: str = setting(
        "",
        help="service.name of the sidecar's spans",
        example="chat-decode",
        unset="OTEL_SERVICE_NAME, else handrail-ROLE",
    )
    cluster: str = setting("", help="name of the cluster; every resource carries it", example="eu-1", unset="none")
    collector: CollectorEndpoint = section(CollectorEndpoint)
    otlp_grpc: Address | None = setting(
        None,
        help="address of the OTLP/gRPC tap for the engine's exporter",
        example="127.0.0.1:4327",
        unset="off",
    )
    otlp_http: Address | None = setting(
        None,
        help="address of the OTLP/HTTP tap for the engine's exporter",
        example="127.0.0.1:4328",
        unset="off",
    )
    plugin_socket: Path | None = setting(
        None,
        help="datagram socket for the plugin inside vLLM: the same path as the engine's HANDRAIL_SOCKET",
        example="/run/handrail/engine.sock",
        unset="off",
    )
    kv_hung_after: Duration = setting(
        Duration(60 * 10**9),
        help="age from which an open KV fetch counts as hung on /metrics",
        example="10s",
        at_least=10**9,
    )
    slo: SloConfig = section(SloConfig)
    otlp_metrics: OtlpMetricsConfig = section(OtlpMetricsConfig)
    own_traces: OwnTracesConfig = section(OwnTracesConfig)
    log: LogConfig = section(LogConfig)
    metrics: MetricsConfig = section(MetricsConfig)
    links: LinksConfig = section(LinksConfig)
    gpu: GpuConfig = section(GpuConfig)
    admin: Address | None = setting(
        Address("127.0.0.1", 0),
        help="address of /metrics, /healthz and /readyz",
        example="127.0.0.1:9464",
        unset="off",
    )
    tls: TlsConfig = section(TlsConfig)
    auth: AuthConfig = section(AuthConfig)
    plaintext: tuple[SidecarListener, ...] = setting(
        (),
        help="listeners without TLS, even if other hosts can reach them, because a mesh or a NetworkPolicy protects the network",
        example="[proxy]",
        unset="none",
    )
    connections: ConnectionsConfig = section(ConnectionsConfig)
    spool: SpoolConfig = section(SpoolConfig)
    trace_context: TraceContextMode = setting(
        TraceContextMode.SET,
        help="set: forward a traceparent with the proxy's span as the parent; pass: forward the headers unchanged",
        example="pass",
    )
    new_traces: NewTraces = setting(
        NewTraces.AUTO,
        help="sampled flag of a trace that starts here; engines export spans of sampled traces only; auto: sampled if this "
        "sidecar has a tap; use sampled at an edge whose engines export to taps of their own",
        example="sampled",
    )
    request_id: RequestIdMode = setting(
        RequestIdMode.AUTO,
        help="X-Request-Id if the client sends none: add one, or pass the request as it is; auto: add at the edge only",
        example="pass",
    )
    drain: Duration = setting(
        Duration(30 * 10**9),
        help="time for running requests after SIGTERM, before the sidecar cuts them",
        example="5m",
    )
    ready_file: Path | None = setting(
        None,
        help="file that gets the pid and the bound addresses as JSON when everything listens",
        example="/run/handrail/edge.json",
        unset="none",
    )

    def cross_check(self) -> Iterator[Problem]:
        """Find values that contradict each other."""
        if self.listen is not None and self.upstream is None:
            yield Problem(
                path="upstream", rule="must be given with listen: the proxy needs a process to forward to", example=_UPSTREAM
            )
        if not self._observes():
            rule = (
                "nothing to observe: give listen (an inline proxy), otlp_grpc or otlp_http (a tap for the engine's spans), "
                "plugin_socket (the plugin inside vLLM), log.files (its log) or metrics.url (its metrics page)"
            )
            yield Problem(path="listen", rule=rule, example="listen: 127.0.0.1:8000")
        if self.upstream is None and self.metrics.url is None and not self.instance:
            rule = "must be given without upstream and metrics.url, since nothing else names the process"
            yield Problem(path="instance", rule=rule, example="instance: 10.0.0.7:8100")
        if self.listen and self.upstream and self.listen.port and _same_place(self.listen, self.upstream):
            yield Problem(
                path="upstream", value=repr(str(self.upstream)), rule="is the sidecar's own listen address", example=_UPSTREAM
            )
        if len(set(self.log.files)) < len(self.log.files):
            yield Problem(path="log.files", rule="names a file twice", example="log: {files: [/var/log/vllm/decode.log]}")
        for name in self.gpu.without:
            if name not in GPU_COUNTERS:
                near = nearest(name, GPU_COUNTERS)
                yield Problem(
                    path="gpu.without",
                    value=repr(name),
                    rule="is not a counter",
                    nearest=near,
                    example="gpu: {without: [energy_joules]}",
                )
        yield from self.collector.inconsistent()
        yield from self.tls.incomplete()
        yield from exposed(self.listeners, self.tls, self.plaintext)
        yield from clashes({name: getattr(self, name) for name in ("listen", "otlp_grpc", "otlp_http", "admin")})

    def resolved(self) -> SidecarConfig:
        """``instance`` and ``request_id`` as they take effect."""
        add = self.role is Role.EDGE
        mode = (RequestIdMode.ADD if add else RequestIdMode.PASS) if self.request_id is RequestIdMode.AUTO else self.request_id
        named = self.upstream or self.metrics.url
        instance = self.instance or (str(Address(named.host, named.port)) if named else "")
        url = self.metrics.url
        if url is not None and not urlsplit(url).path.strip("/"):
            url = Url(f"{url.rstrip('/')}/metrics")
        return replace(self, instance=instance, request_id=mode, metrics=replace(self.metrics, url=url))

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The listeners that are on."""
        return (
            Listener(SidecarListener.PROXY.value, "listen", self.listen, guarded=False),
            Listener(SidecarListener.TAP.value, "otlp_grpc", self.otlp_grpc),
            Listener(SidecarListener.TAP.value, "otlp_http", self.otlp_http),
            Listener(SidecarListener.ADMIN.value, "admin", self.admin),
        )

    @property
    def proxies(self) -> bool:
        """Whether the inline proxy is on."""
        return self.listen is not None and self.upstream is not None

    @property
    def samples_links(self) -> bool:
        """Whether the counters of links are read."""
        return self._samples(self.links.sample)

    @property
    def samples_gpus(self) -> bool:
        """Whether NVML is read if it is there."""
        return self._samples(self.gpu.sample)

    def _samples(self, chosen: Sampling) -> bool:
        beside_engine = self.role in (Role.PREFILL, Role.DECODE, Role.COLLOCATED)
        return beside_engine if chosen is Sampling.AUTO else chosen is Sampling.ON

    def _observes(self) -> bool:
        sources = (self.listen, self.otlp_grpc, self.otlp_http, self.plugin_socket, self.metrics.url)
        return any(each is not None for each in sources) or bool(self.log.files)


_CLIENT_CERT: Final = "collector: {cert_file: /etc/handrail/tls/tls.crt, key_file: /etc/handrail/tls/tls.key}"
_UPSTREAM: Final = "upstream: http://127.0.0.1:8100"


def _same_place(listen: Address, upstream: Url) -> bool:
    if listen.port != upstream.port:
        return False
    near = upstream.host == "localhost" or Address(upstream.host, 0).loopback
    return listen.host == upstream.host or (near and (listen.loopback or listen.host in ("0.0.0.0", "::")))
