"""What could carry the KV: UCX's transports, and reads between GPUs of a host.

UCX_TLS selects the transports, UCX_NET_DEVICES the devices. cuda_ipc reads carry a hand-off within one host where GPUs allow.
Source: the UCX manual (ucp_context: aliases of transports, ``^`` negates the whole list). NIXL hands over through UCX by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from handrail_doctor.facts import Facts, GpuFacts, P2p, P2pStatus, PairSide, Placement, SourcedValue

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
_ALL: Final = frozenset(name for names in _ALIASES.values() for name in names) | {"tcp", "self"}
RDMA: Final = _ALIASES["ib"] | {"srd"}  # srd: EFA's, which counts only where it is named


def transports(text: str | None) -> frozenset[str]:
    """Return the transports that UCX_TLS leaves; all where it is not set or ``all``."""
    words = [word.strip() for word in (text or "all").split(",") if word.strip()]
    negated = bool(words) and words[0].startswith("^")
    named = frozenset(name for word in words for name in _expanded(word.lstrip("^")))
    return _ALL - named if negated else named


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


_PULLS: Final = ("NixlConnector", "NixlPullConnector")
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


def connector(facts: Facts) -> SourcedValue | None:
    """Return D's connector, since D reads; else P's."""
    return facts.engine(PairSide.DECODE).setting("connector") or facts.engine(PairSide.PREFILL).setting("connector")


def get_zcopy(facts: Facts) -> SourcedValue | None:
    """Return the variable in D's environment that switches reads over cuda_ipc on."""
    return facts.engine(PairSide.DECODE).variable(_GET_ZCOPY)


def pulls_over_cuda_ipc(facts: Facts) -> bool:
    """Test whether cuda_ipc reads between peers without NVLink would carry the KV.

    Cases B01, B10.
    """
    pairs = pairs_of(facts)
    if facts.placement is not Placement.SAME_HOST or not pairs or has_rdma(facts):
        return False
    peers = all(pair.read is P2pStatus.OK for pair in pairs)
    return peers and not all(pair.nvlink is P2pStatus.OK for pair in pairs)


def pull_falls_to_tcp(facts: Facts) -> bool:
    """Test whether UCX switches those reads off and no setting switches them on."""
    found, switch = connector(facts), get_zcopy(facts)
    pulls = found is None or found.value in _PULLS
    on = switch is not None and switch.value.lower() in _ON
    return pulls_over_cuda_ipc(facts) and pulls and not on and not get_zcopy_elsewhere(facts)


def get_zcopy_elsewhere(facts: Facts) -> bool:
    """Test whether D's environment may set that variable to an unknown value."""
    return facts.engine(PairSide.DECODE).set_elsewhere(_GET_ZCOPY)
