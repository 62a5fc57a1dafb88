"""The GPUs of a hand-off within one host, and whether cuda_ipc reads carry it."""

from __future__ import annotations

from typing import Final

from handrail_doctor.facts import Facts, SourcedValue
from handrail_doctor.host_facts import GpuFacts, P2p, P2pStatus
from handrail_doctor.pair import PairSide, Placement

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
