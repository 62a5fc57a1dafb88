"""What could carry the KV: UCX's transports, and reads between GPUs of a host.

UCX_TLS selects the transports, UCX_NET_DEVICES the devices. cuda_ipc reads carry a hand-off within one host where GPUs allow.
Source: the UCX manual (ucp_context: aliases of transports, ``^`` negates the whole list). NIXL hands over through UCX by default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from handrail_doctor.connectors import Connector, ConnectorKind
from handrail_doctor.facts import EngineView, Facts, GpuFacts, P2p, P2pStatus, PairSide, Placement, RdmaPort, SourcedValue

_ALIASES: Final[Mapping[str, frozenset[str]]] = {
    "rc": frozenset({"rc_verbs", "rc_mlx5"}),
    "rc_v": frozenset({"rc_verbs"}),
    "rc_x": frozenset({"rc_mlx5"}),
    "ud": frozenset({"ud_verbs", "ud_mlx5"}),
    "ud_v": frozenset({"ud_verbs"}),
    "ud_x": frozenset({"ud_mlx5"}),
    "dc": frozenset({"dc_mlx5"}),
    "dc_x": frozenset({"dc_mlx5"}),
    "ib": frozenset({"rc_verbs", "rc_mlx5", "ud_verbs", "ud_mlx5", "dc_mlx5"}),
    "cuda": frozenset({"cuda_copy", "cuda_ipc", "gdr_copy"}),
    "sm": frozenset({"posix", "sysv", "xpmem", "cma", "knem"}),
    "shm": frozenset({"posix", "sysv", "xpmem", "cma", "knem"}),
}
SRD: Final = "srd"
"""The transport of EFA, AWS's adapters, which carry no other RDMA."""
_ALL: Final = frozenset(name for names in _ALIASES.values() for name in names) | {"tcp", "self", SRD}
RDMA: Final = _ALIASES["ib"] | {SRD}
_SHARED_MEMORY: Final = _ALIASES["sm"]
_COPIES: Final = frozenset({"self", "cuda_copy", "gdr_copy", "rocm_copy", "ze_copy"})
"""Transports that reach no other process."""
_RDMA_NAME: Final = re.compile(r"mlx|bnxt_re|irdma|rdmap|roce|efa|hns|ib")
UCX: Final = "UCX"
"""NIXL's backend in vLLM where none is named."""


def transports(text: str | None) -> frozenset[str]:
    """Return the transports that UCX_TLS leaves; all where it is not set or ``all``."""
    words = [word.strip() for word in (text or "all").split(",") if word.strip()]
    negated = bool(words) and words[0].startswith("^")
    named = frozenset(name for word in words for name in _expanded(word.lstrip("^")))
    if negated:
        return _ALL - named - ({SRD} if named >= _ALIASES["ib"] else set())
    return named


def _expanded(word: str) -> frozenset[str]:
    if word == "all":
        return _ALL
    # An auxiliary transport follows a colon: rc_x:aux.
    plain = word.partition(":")[0]
    return _ALIASES.get(plain, frozenset({plain}))


def devices(text: str | None) -> tuple[str, ...] | None:
    """Return the devices in UCX_NET_DEVICES, as ``mlx5_0:1`` or ``eth0``; None: any."""
    words = tuple(word.strip() for word in (text or "all").split(",") if word.strip())
    return None if not words or "all" in words else words


def carriers(engine: EngineView, *, within: bool) -> frozenset[str]:
    """Return the transports to another engine that UCX_TLS and UCX_NET_DEVICES leave to this one.

    ``within``: the other engine may be on the same host.
    """
    tls, named = engine.variable("UCX_TLS"), engine.variable("UCX_NET_DEVICES")
    left = transports(tls.value if tls is not None else None) - _COPIES
    chosen_devices = devices(named.value if named is not None else None)
    if chosen_devices is not None and not any(":" in name or _RDMA_NAME.match(name) for name in chosen_devices):
        left -= RDMA
    if chosen_devices is not None and all(":" in name for name in chosen_devices):
        left -= {"tcp"}
    return left if within else left - _SHARED_MEMORY


def nixl_backends(engine: EngineView) -> tuple[str, ...] | None:
    """Return NIXL's backends of an engine; None where it is not known to hand over with NIXL."""
    if engine.connector is None or engine.connector.nixl is None:
        return None
    return engine.value("backends") or (UCX,)


def uses_ucx(engine: EngineView) -> bool:
    """Test whether UCX carries its KV, or may: a connector that no source names is taken for NIXL's."""
    return engine.connector is None or UCX in (nixl_backends(engine) or ())


def efa_ports(facts: Facts) -> list[RdmaPort]:
    """Return the ports of EFA adapters that are up here."""
    if "efa" not in (facts.host.modules or ()):
        return []
    return [port for port in facts.host.rdma or () if port.active and port.link_layer not in ("InfiniBand", "Ethernet")]


_GET_ZCOPY: Final = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
_ON: Final = ("y", "yes", "on", "1", "try", "force")


def pairs_of(facts: Facts) -> list[P2p]:
    """Return the pairs of D's GPUs with P's, in the direction in which D reads.

    Where the engines' GPUs are not known, returns every pair.
    """
    prefill, decode = facts.gpus_of(PairSide.PREFILL), facts.gpus_of(PairSide.DECODE)
    if prefill is None or decode is None:
        return list(facts.host.gpus.p2p)
    return [pair for pair in facts.host.gpus.p2p if pair.source in decode and pair.target in prefill]


def chosen(facts: Facts) -> bool:
    """Test whether both engines' GPUs are known."""
    return facts.gpus_of(PairSide.PREFILL) is not None and facts.gpus_of(PairSide.DECODE) is not None


def used(facts: Facts) -> list[GpuFacts]:
    """Return the engines' GPUs; all GPUs where those are not known."""
    known = [indexes for side in PairSide if (indexes := facts.gpus_of(side)) is not None]
    wanted = {index for indexes in known for index in indexes}
    return [gpu for gpu in facts.host.gpus.devices if not known or gpu.index in wanted]


def has_rdma(facts: Facts) -> bool:
    """Test whether an RDMA port is up here.

    An adapter can then carry KV, also within the host.
    """
    return any(port.active for port in facts.host.rdma or ())


def connector(facts: Facts) -> Connector | None:
    """Return D's connector, since D reads; else P's."""
    return facts.engine(PairSide.DECODE).connector or facts.engine(PairSide.PREFILL).connector


def get_zcopy(facts: Facts) -> SourcedValue | None:
    """Return the variable in D's environment that switches reads over cuda_ipc on."""
    return facts.engine(PairSide.DECODE).variable(_GET_ZCOPY)


def pulls_over_cuda_ipc(facts: Facts) -> bool:
    """Test whether cuda_ipc reads between peers without NVLink would carry the KV.

    Cases B01, B10.
    """
    pairs = pairs_of(facts)
    if facts.placement is not Placement.SAME_HOST or not pairs or has_rdma(facts) or not uses_ucx(facts.engine(PairSide.DECODE)):
        return False
    peers = all(pair.read is P2pStatus.OK for pair in pairs)
    return peers and not all(pair.nvlink is P2pStatus.OK for pair in pairs)


def pull_falls_to_tcp(facts: Facts) -> bool:
    """Test whether UCX switches those reads off and no setting switches them on."""
    found, switch = connector(facts), get_zcopy(facts)
    pulls = found is None or ConnectorKind.NIXL_PULL in found.kinds
    on = switch is not None and switch.value.lower() in _ON
    return pulls_over_cuda_ipc(facts) and pulls and not on and not get_zcopy_elsewhere(facts)


def get_zcopy_elsewhere(facts: Facts) -> bool:
    """Test whether D's environment may set that variable to an unknown value."""
    return facts.engine(PairSide.DECODE).set_elsewhere(_GET_ZCOPY)
