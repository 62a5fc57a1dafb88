"""Which GPUs are on the way of a hand-off within one host, and whether reads over cuda_ipc are what carries it."""

from __future__ import annotations

from typing import Final

from handrail_doctor.facts import Facts, SourcedValue
from handrail_doctor.host_facts import GpuFacts, P2p, P2pStatus
from handrail_doctor.pair import PairSide, Placement

_PULLS: Final = ("NixlConnector", "NixlPullConnector")
_GET_ZCOPY: Final = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
_ON: Final = ("y", "yes", "on", "1", "try", "force")


def pairs_of(facts: Facts) -> list[P2p]:
    """D's GPUs with P's, as D reads; where the engines' GPUs are not known, every pair."""
    prefill, decode = facts.gpus_of(PairSide.PREFILL), facts.gpus_of(PairSide.DECODE)
    if prefill is None or decode is None:
        return list(facts.host.gpus.p2p)
    return [pair for pair in facts.host.gpus.p2p if pair.source in decode and pair.target in prefill]


def chosen(facts: Facts) -> bool:
    """Both engines' GPUs are known."""
    return facts.gpus_of(PairSide.PREFILL) is not None and facts.gpus_of(PairSide.DECODE) is not None


def used(facts: Facts) -> list[GpuFacts]:
    """The GPUs of the engines; all where that is not known."""
    known = [indexes for side in PairSide if (indexes := facts.gpus_of(side)) is not None]
    wanted = {index for indexes in known for index in indexes}
    return [gpu for gpu in facts.host.gpus.devices if not known or gpu.index in wanted]


def has_rdma(facts: Facts) -> bool:
    """A port is up here, so an adapter can carry KV, also within the host."""
    return any(port.active for port in facts.host.rdma or ())


def connector(facts: Facts) -> SourcedValue | None:
    """D's, since D reads; else P's."""
    return facts.engine(PairSide.DECODE).setting("connector") or facts.engine(PairSide.PREFILL).setting("connector")


def get_zcopy(facts: Facts) -> SourcedValue | None:
    """The variable that switches reads over cuda_ipc on, where D's environment has it."""
    return facts.engine(PairSide.DECODE).variable(_GET_ZCOPY)


def pulls_over_cuda_ipc(facts: Facts) -> bool:
    """Reads over cuda_ipc between GPUs that are peers without NVLink are what would carry the KV (cases B01, B10)."""
    pairs = pairs_of(facts)
    if facts.placement is not Placement.SAME_HOST or not pairs or has_rdma(facts):
        return False
    peers = all(pair.read is P2pStatus.OK for pair in pairs)
    return peers and not all(pair.nvlink is P2pStatus.OK for pair in pairs)


def pull_falls_to_tcp(facts: Facts) -> bool:
    """UCX switches those reads off, and nobody has switched them on."""
    found, switch = connector(facts), get_zcopy(facts)
    pulls = found is None or found.value in _PULLS
    on = switch is not None and switch.value.lower() in _ON
    return pulls_over_cuda_ipc(facts) and pulls and not on and not get_zcopy_elsewhere(facts)


def get_zcopy_elsewhere(facts: Facts) -> bool:
    """It may be on: what it is set to is not known."""
    return facts.engine(PairSide.DECODE).set_elsewhere(_GET_ZCOPY)
