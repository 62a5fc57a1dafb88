"""Predict the rate of this pair's link, and so the time of a hand-off.

A measured rate is used where there is one, else that of the hardware that carries the KV.
Rates of hardware are line rates: an upper bound, before posting, descriptors and other traffic. Where the KV goes through host
memory there is no line rate; the prediction then uses a published measurement and names its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail_doctor.facts import Facts, P2pStatus, PairSide, Placement, RdmaPort
from handrail_doctor.transports import devices, has_rdma, pairs_of, pull_falls_to_tcp

HOST_STAGED_BYTES_PER_S: Final = 470e6 / 1.3
"""About 470 MB in about 1.3 s: NIXL between two L40S without a peer-to-peer path.

The model is Qwen2.5-7B with 8,000-token prompts (the vLLM team's guide to splitting prefill from decode, 2026). The other
published figure, with peers but reads over TCP, is 0.5 GB/s.
"""
HOST_STAGED_BEST_BYTES_PER_S: Final = 0.5e9
"""Published rate of a pull over TCP on one node (vllm-project/vllm#52607)."""
_PCIE_LANE_BYTES: Final = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Usable bytes a second of one lane and direction, after encoding, by generation."""


class RateSource(str, Enum):
    """The source of a rate, the most reliable first."""

    MEASURED = "measured"
    CONFIGURED = "given"
    NVLINK = "NVLink"
    PCIE = "PCIe peer-to-peer"
    RDMA = "RDMA"
    TCP = "TCP"
    HOST_STAGED = "through host memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Bytes a second over the whole hand-off.

    ``best``: the higher rate that is possible, where there is one.
    """

    bytes_per_s: float
    source: RateSource
    why: str
    best_bytes_per_s: float | None = None

    @property
    def assumed(self) -> bool:
        """Test whether the rate rests on another's measurement."""
        return self.source is RateSource.HOST_STAGED


def predicted(facts: Facts) -> Rate | None:
    """Predict the rate; None where nothing is known of the path.

    A measured rate wins over a configured one, and that wins over hardware. Hardware counts only where an engine runs on this
    host.
    """
    traffic = facts.traffic
    if traffic is not None and traffic.fetch_bytes_per_s:
        why = f"median of {traffic.fetches} hand-offs that {traffic.by} saw"
        return Rate(bytes_per_s=traffic.fetch_bytes_per_s, source=RateSource.MEASURED, why=why)
    if facts.options.link_bits_per_s:
        return Rate(bytes_per_s=facts.options.link_bits_per_s / 8, source=RateSource.CONFIGURED, why="--link-gbps")
    if not facts.host.here:  # this host's hardware is not the engines'
        return None
    rdma = _rdma(facts)
    if facts.placement is Placement.SAME_HOST:
        return _between_gpus(facts) or rdma
    if facts.placement is Placement.ACROSS_HOSTS:
        return rdma or _tcp(facts)
    return None


def _between_gpus(facts: Facts) -> Rate | None:
    pairs = pairs_of(facts)
    if has_rdma(facts) and any(pair.read is not P2pStatus.OK for pair in pairs):
        return None  # the adapters serve the GPU
    if not pairs or any(pair.read is None for pair in pairs):
        return None
    bad = next((pair for pair in pairs if pair.read is not P2pStatus.OK), None)
    if bad is not None:
        return _host_staged(f"GPU {bad.source} cannot read GPU {bad.target}'s memory")
    used = {index for pair in pairs for index in (pair.source, pair.target)}
    gpus = [gpu for gpu in facts.host.gpus.devices if gpu.index in used]
    if all(pair.nvlink is P2pStatus.OK for pair in pairs):
        rates = [gpu.nvlink_bytes_per_s for gpu in gpus if gpu.nvlink_bytes_per_s]
        if len(rates) == len(gpus):
            return Rate(bytes_per_s=min(rates), source=RateSource.NVLINK, why="all NVLinks of one GPU, one direction, by NVML")
        return None
    if pull_falls_to_tcp(facts):
        return _host_staged("UCX switches reads over cuda_ipc off without NVLink")
    lanes = [gpu.pcie_most for gpu in gpus if gpu.pcie_most and gpu.pcie_most[0] in _PCIE_LANE_BYTES]
    if len(lanes) < len(gpus):
        return None
    generation, width = min(lanes, key=lambda each: _PCIE_LANE_BYTES[each[0]] * each[1])
    rate = _PCIE_LANE_BYTES[generation] * width
    return Rate(bytes_per_s=rate, source=RateSource.PCIE, why=f"PCIe {generation} x{width}, the slower of the two GPUs")


def _rdma(facts: Facts) -> Rate | None:
    """Predict the rate of one RDMA port; UCX may use more, and each rank its own."""
    named = devices(_net_devices(facts))
    active = [port for port in facts.host.rdma or () if port.active and port.bits_per_s and _chosen(port, named)]
    if not active:
        return None
    slowest = min(port.bits_per_s or 0 for port in active) / 8
    ranks = facts.sizes.serving.tp if facts.sizes else 1
    ways = min(len(active), ranks)
    best = slowest * ways if ways > 1 else None
    why = f"one port at {slowest * 8 / 1e9:g} Gb/s" + (f"; {ways} if every rank has its own" if best else "")
    return Rate(bytes_per_s=slowest, source=RateSource.RDMA, why=why, best_bytes_per_s=best)


def _net_devices(facts: Facts) -> str | None:
    for side in (PairSide.DECODE, PairSide.PREFILL):
        sourced_value = facts.engine(side).variable("UCX_NET_DEVICES")
        if sourced_value is not None:
            return str(sourced_value.value)
    return None


def _chosen(port: RdmaPort, named: tuple[str, ...] | None) -> bool:
    return named is None or port.key in named or (port.port == 1 and port.adapter in named)


def _tcp(facts: Facts) -> Rate | None:
    if facts.host.rdma is None:
        return None
    rates = [nic.bits_per_s for nic in facts.host.nics if nic.up and nic.physical and nic.bits_per_s]
    if not rates:
        return None
    why = f"the fastest interface, {max(rates) / 1e9:g} Gb/s; through host memory, so perhaps much less"
    return Rate(bytes_per_s=max(rates) / 8, source=RateSource.TCP, why=why)


def _host_staged(because: str) -> Rate:
    return Rate(
        bytes_per_s=HOST_STAGED_BYTES_PER_S,
        source=RateSource.HOST_STAGED,
        why=f"{because}: assumed from a published figure, 470 MB in 1.3 s between two L40S; 0.5 GB/s elsewhere "
        "(vllm-project/vllm#52607)",
        best_bytes_per_s=HOST_STAGED_BEST_BYTES_PER_S,
    )
