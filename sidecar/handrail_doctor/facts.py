"""The facts that the checks judge: pair, host, engines and ways between them.

Plain data. None means: not known. An empty list was read and is empty; what could not be read has a reason instead.
The host's facts include which GPU may read whose memory. The packages are those of this Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from handrail.otlp.settings import ClientSettings
from handrail_doctor.connectors import Connector
from handrail_doctor.kv_size.size import Sizes


class PairSide(str, Enum):
    """The two engines of a pair."""

    PREFILL = "prefill"
    DECODE = "decode"


SIDES: Final = (PairSide.PREFILL, PairSide.DECODE)


class Placement(str, Enum):
    """The placement of the two engines, which decides the path of the KV."""

    SAME_HOST = "same-host"
    ACROSS_HOSTS = "across-hosts"
    UNKNOWN = "unknown"


class P2pStatus(str, Enum):
    """NVML's peer-to-peer states (``nvmlGpuP2PStatus_t``).

    nvidia-smi topo -p2p abbreviates them.
    """

    OK = "ok"
    CHIPSET = "chipset not supported"
    GPU = "GPU not supported"
    TOPOLOGY = "topology not supported"
    REGKEY = "disabled by registry key"
    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU from NVML. Links: (up, in all); None: not asked or not answered."""

    index: int
    uuid: str = ""
    name: str = ""
    mig: bool | None = None
    nvlinks: tuple[int, int] | None = None
    nvlink_bytes_per_s: int | None = None  # one direction, all links that are up
    pcie_now: tuple[int, int] | None = None  # generation, lanes
    pcie_most: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class P2p:
    """What one GPU may do with another's memory, by their indexes.

    ``source`` is the first GPU, ``target`` the other. None: the driver did not say.
    """

    source: int
    target: int
    read: P2pStatus | None
    write: P2pStatus | None
    nvlink: P2pStatus | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusFacts:
    """The GPUs, or the reason why there are none.

    ``missing``: why there is nothing, and ``provide``: what would help; '' where NVML answered. ``refused``: the calls that it
    refused.
    """

    missing: str = ""
    provide: str = ""
    driver: str = ""
    devices: tuple[GpuFacts, ...] = ()
    p2p: tuple[P2p, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    address: str
    kind: str  # IB/RoCE v1 | RoCE v2


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of one adapter, from ``/sys/class/infiniband``."""

    adapter: str
    port: int
    state: str  # ACTIVE, DOWN, ...; '' unreadable
    physical: str  # LinkUp, Polling, ...
    bits_per_s: float | None
    lanes: int | None
    link_layer: str  # InfiniBand | Ethernet
    netdev: str = ""
    gids: tuple[Gid, ...] = ()

    @property
    def key(self) -> str:
        """Return the port's name in UCX_NET_DEVICES."""
        return f"{self.adapter}:{self.port}"

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network interface, from ``/sys/class/net``.

    ``physical``: it has a device behind it.
    """

    name: str
    up: bool
    bits_per_s: float | None
    mtu: int | None
    physical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """This host's facts.

    ``rdma`` and ``modules`` are None where sysfs could not be read; ``unread`` has the reason.
    """

    here: frozenset[PairSide] = frozenset()  # the engines that run on it
    gpus: GpusFacts = field(default_factory=lambda: GpusFacts(missing="not asked"))
    rdma: tuple[RdmaPort, ...] | None = None
    nics: tuple[Nic, ...] = ()
    modules: frozenset[str] | None = None
    open_driver: bool | None = None  # NVIDIA's open kernel modules
    kernel: tuple[int, int] | None = None
    unread: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)  # version by name, of this Python
    plugin_found: bool = False  # this Python's vllm.general_plugins contain handrail


ANY: Final = "*"
"""In ``Setup.elsewhere``: variables of any name may be set from elsewhere."""
ALL_PLUGINS: Final = ("*",)
"""Value of ``Setup.plugins`` where VLLM_PLUGINS is not set.

vLLM then loads every installed plugin.
"""


# --- engines --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One source's view of an engine's settings; ``by`` names the source.

    ``whole``: it is the command line, so what it leaves out has its default.
    """

    by: str
    whole: bool = False
    model: str | None = None  # the path or name that the engine got
    revision: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None  # --block-size
    group_block_size: int | None = None  # the smallest of the model's groups of layers, as the running engine has it
    kv_layout: str | None = None
    tp: int | None = None
    dcp: int | None = None  # decode context-parallel ranks
    version: str | None = None  # of the engine
    attention_backend: str | None = None  # where one is named; else the engine chooses
    speculation: Mapping[str, Any] | None = None  # --speculative-config; empty: there is none
    hf_overrides: str | None = None  # as JSON; '': there are none
    max_model_len: int | None = None
    hybrid: bool | None = None  # the hybrid KV cache manager is on
    connector: Connector | None = None
    kv_role: str | None = None  # kv_producer | kv_consumer | kv_both
    lease_s: float | None = None
    failure_policy: str | None = None
    backends: tuple[str, ...] | None = None  # those of NIXL
    side_host: str | None = None  # VLLM_NIXL_SIDE_CHANNEL_HOST
    side_port: int | None = None  # VLLM_NIXL_SIDE_CHANNEL_PORT
    otlp_endpoint: str | None = None
    middleware: tuple[str, ...] | None = None
    log_stats: bool | None = None
    plugins: tuple[str, ...] | None = None  # VLLM_PLUGINS, or ALL_PLUGINS
    env: Mapping[str, str] | None = None  # the process's environment, as far as the source has it
    elsewhere: frozenset[str] = frozenset()  # variables that are set where it runs, to values that no source has; ANY: any
    whole_env: bool = False  # it is the environment itself: a variable that it lacks is not set


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and its source."""

    value: Any
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """The answer to one HTTP request to an engine.

    ``error`` is '' where there was an answer.
    """

    status: int | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEngine:
    """The answers of a running engine over HTTP."""

    health: HttpAnswer
    models: tuple[str, ...] = ()  # under the names that it serves
    metrics: HttpAnswer = field(default_factory=HttpAnswer)
    families: frozenset[str] = frozenset()  # names on its metrics page
    clock: tuple[int, int] | None = None  # its clock minus ours lies in this interval, ns; from the Date header, so seconds wide


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One side of the pair. ``setups``: the most reliable source first."""

    side: PairSide
    url: str | None = None
    host: str | None = None
    live: LiveEngine | None = None
    setups: tuple[Setup, ...] = ()

    def setting(self, name: str) -> SourcedValue | None:
        """Return the value of ``name``, a field of ``Setup``.

        The first source that has it decides.
        """
        return next((SourcedValue(value, each.by) for each in self.setups if (value := getattr(each, name)) is not None), None)

    @property
    def connector(self) -> Connector | None:
        """Return its KV connector; None where no source names one."""
        return next((each.connector for each in self.setups if each.connector is not None), None)

    def value(self, name: str) -> Any:
        found = self.setting(name)
        return None if found is None else found.value

    def variable(self, name: str) -> SourcedValue | None:
        """Return a variable of its environment.

        The first source that has its environment decides.
        """
        found = ((each.env.get(name), each.by) for each in self.setups if each.env is not None)
        return next((SourcedValue(value, by) for value, by in found if value is not None), None)

    def set_elsewhere(self, name: str) -> bool:
        """Test whether the variable may be set to a value that no source has."""
        if self.variable(name) is not None or any(each.whole_env for each in self.setups):
            return False
        return any({name, ANY} & each.elsewhere for each in self.setups)

    @property
    def whole(self) -> bool:
        """Test whether its command line is known."""
        return any(each.whole for each in self.setups)

    @property
    def environment_known(self) -> bool:
        return any(each.env is not None for each in self.setups)


# --- the ways between -----------------------------------------------------------------------------------------------------


class Reach(str, Enum):
    """The outcome of a TCP connect."""

    OPEN = "open"  # and the peer speaks ZeroMQ, as NIXL's side channel does
    MUTE = "open, but no ZeroMQ"  # something accepts: a mesh's proxy, another service
    REFUSED = "refused"
    SILENT = "no answer"
    UNRESOLVED = "name does not resolve"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannel:
    """The port at which an engine answers its peers where its KV is.

    ``reach``: from this host; None: not tried, and ``why_not`` has the reason.
    """

    side: PairSide
    host: str | None = None
    port: int | None = None
    by: str = ""
    reach: Reach | None = None
    detail: str = ""
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpTarget:
    """An OTLP endpoint and the result of an empty export.

    ``problem`` is '' where the endpoint accepted it.
    """

    name: str
    endpoint: str
    problem: str = ""
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPair:
    """The offset between two clocks.

    ``target``'s clock minus ``source``'s lies in ``low_ns`` to ``high_ns``; None: open on that side.
    """

    source: str
    target: str
    low_ns: int | None
    high_ns: int | None
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTraffic:
    """The traffic of this pair or of the service, as a collector saw it.

    A figure is None where there were too few requests.
    """

    by: str
    requests: int = 0
    requests_per_s: float | None = None
    busiest_over_mean: float | None = None  # requests in the busiest minute over those in a mean one
    prompt_tokens: int | None = None  # median
    ttft_ns: int | None = None  # median
    prefill_token_ns: float | None = None  # median of computing one prompt token
    gap_p99_ns: int | None = None
    fetches: int = 0
    fetch_bytes_per_s: float | None = None  # median over hand-offs that succeeded
    split: bool = False  # hand-offs were seen, or requests whose P is another engine than their D


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSetup:
    """A sidecar's configuration, as far as the pair is concerned."""

    by: str
    role: str
    collector: str = ""
    sends: ClientSettings | None = None  # the address by which it reaches that collector
    plugin_socket: str | None = None
    metrics_url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """The options of the command line."""

    tokens: int
    link_bits_per_s: float | None = None
    ttft_ns: int | None = None
    itl_ns: int | None = None
    requests_per_s: float | None = None
    gpus: Mapping[PairSide, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts.

    ``sizes``: of the model, where its config could be read; else ``no_sizes`` has the reason.
    """

    options: DoctorOptions
    placement: Placement = Placement.UNKNOWN
    placement_by: str = ""
    engines: Mapping[PairSide, EngineView] = field(default_factory=dict)
    host: HostFacts = field(default_factory=HostFacts)
    side_channels: tuple[SideChannel, ...] = ()
    otlp: tuple[OtlpTarget, ...] = ()
    clocks: tuple[ClockPair, ...] = ()
    no_clocks: str = ""
    traffic: ObservedTraffic | None = None
    sidecars: tuple[SidecarSetup, ...] = ()
    sizes: Sizes | None = None
    no_sizes: str = ""

    def engine(self, side: PairSide) -> EngineView:
        """Return the view of one engine; empty where nothing is known of it."""
        return self.engines.get(side, EngineView(side=side))

    def gpus_of(self, side: PairSide) -> tuple[int, ...] | None:
        """Return the NVML indexes of the engine's GPUs; None: not known.

        They come from the options, else from its CUDA_VISIBLE_DEVICES by number or UUID.
        """
        if side in self.options.gpus:
            return self.options.gpus[side]
        sourced_value = self.engine(side).variable("CUDA_VISIBLE_DEVICES")
        if sourced_value is None:
            return None
        by_uuid = {gpu.uuid: gpu.index for gpu in self.host.gpus.devices if gpu.uuid}
        found: list[int] = []
        for word in str(sourced_value.value).split(","):
            name = word.strip()
            uuids = [index for uuid, index in by_uuid.items() if name and uuid.startswith(name)]
            if name.isdigit():
                found.append(int(name))
            elif len(uuids) == 1:
                found.append(uuids[0])
            else:
                return None
        return tuple(found)
