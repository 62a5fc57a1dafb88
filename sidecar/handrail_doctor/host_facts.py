"""The facts of this host: GPUs, RDMA ports, interfaces, driver and packages.

They include which GPU may read whose memory. The packages are those of this Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from handrail_doctor.pair import PairSide


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
