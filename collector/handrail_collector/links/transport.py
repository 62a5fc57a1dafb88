"""Find the transport of a link's KV from evidence. Pure.

The transport is NVLink, PCIe, RDMA, TCP, host memory, or unknown.

Counters come first: they show what moved.
The engine's own log comes second. UCX names the lane of remote memory access, and the blocks go over that lane
(case B01: not the list of what messages may use).
What a connector could use is no evidence of what it does use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail_collector.links.device_attribution import Carried, MediumVerdict
from handrail_collector.links.devices import DeviceCounts, Medium
from handrail_collector.links.facts import INTER, INTRA, LaneFacts
from handrail_collector.links.handoffs import EngineLink


class Transport(str, Enum):
    """Transport of a link's KV; the list is closed."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    RDMA = "rdma"
    TCP = "tcp"
    HOST_STAGED = "host_staged"  # through the memory of one host, without a network
    UNKNOWN = "unknown"


LANES: Final = {
    **dict.fromkeys(
        ("rc", "dc", "ud", "rc_mlx5", "dc_mlx5", "ud_mlx5", "rc_verbs", "ud_verbs", "srd", "gga_mlx5", "rc_x", "dc_x", "ud_x"),
        Transport.RDMA,
    ),
    "tcp": Transport.TCP,
    **dict.fromkeys(
        ("sysv", "posix", "cma", "knem", "xpmem", "self", "cuda_copy", "gdr_copy", "rocm_copy"), Transport.HOST_STAGED
    ),
}
"""Transports by UCX's lane names.

``cuda_ipc`` and similar names are missing: they mean GPU to GPU, by NVLink or by PCIe.
"""

GPU_LANES: Final = frozenset({"cuda_ipc", "rocm_ipc", "ze_ipc"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportEvidence:
    """Transport of a link with the evidence for it.

    ``evidence``: what the transport rests on, strongest first.
    ``examined``: other sources that were checked and hold no evidence.
    ``devices``: the devices that carried the KV, of both hosts.
    ``line_rate``: what the devices can carry, bytes a second in each direction, by the slower end; None where a device does
    not say.
    """

    transport: Transport
    evidence: tuple[str, ...]
    examined: tuple[str, ...] = ()
    devices: tuple[DeviceCounts, ...] = ()
    line_rate: int | None = None
    one_of: tuple[DeviceCounts, ...] = ()  # ports like the only one that carried bytes: up, but idle
    contradicted: bool = False  # counters and log disagree; the counters are believed


def transport_evidence(
    link: EngineLink, sent: Sequence[Carried], received: Sequence[Carried], lane_facts: Iterable[LaneFacts]
) -> TransportEvidence:
    """Decide the transport of a link.

    ``sent``: what the producer's transmit counters show.
    ``received``: what the consumer's receive counters show.
    """
    lanes = [each for each in lane_facts if _of(each, link)]
    by_log, log_evidence = _by_log(lanes)
    by_counters, counter_evidence = _by_counters(link, (*sent, *received), lanes)
    carrying = [one for one in (*sent, *received) if _carried_it(one, by_counters)]
    if by_counters is not Transport.UNKNOWN:
        return TransportEvidence(
            transport=by_counters,
            evidence=(*counter_evidence, *log_evidence),
            devices=tuple(device for one in carrying for device, _ in one.devices),
            line_rate=_line_rate(carrying),
            one_of=_one_of(carrying),
            contradicted=by_log not in (Transport.UNKNOWN, by_counters),
        )
    known = by_log is not Transport.UNKNOWN
    return TransportEvidence(
        transport=by_log,
        evidence=log_evidence if known else (),
        examined=counter_evidence if known else (*log_evidence, *counter_evidence),
    )


def _of(lane_facts: LaneFacts, link: EngineLink) -> bool:
    """Whether the lane belongs to this link: one of its engines, and its reach."""
    near = INTRA if link.one_host else INTER if link.producer_host and link.consumer_host else ""
    return lane_facts.instance in (link.producer, link.consumer) and (
        not lane_facts.reach or not near or lane_facts.reach == near
    )


def _by_log(lanes: Sequence[LaneFacts]) -> tuple[Transport, tuple[str, ...]]:
    """Return the one transport that all lanes share, and the log's evidence."""
    found = {LANES.get(each.lane, Transport.UNKNOWN) for each in lanes if each.lane not in GPU_LANES}
    words = {
        f"the log of {each.instance} names {each.lane}{f' on {each.nic}' if each.nic else ''} as the lane of remote reads"
        f"{f' ({each.recogniser})' if each.recogniser else ''}": None
        for each in lanes
    }
    return (found.pop() if len(found) == 1 else Transport.UNKNOWN), tuple(words)


_ORDER: Final = (
    (Medium.NIC, Transport.TCP),  # before RDMA: IP over InfiniBand moves the adapter's counters too
    (Medium.LOOPBACK, Transport.TCP),
    (Medium.RDMA, Transport.RDMA),
    (Medium.NVLINK, Transport.NVLINK),
    (Medium.PCIE, Transport.PCIE),  # last: everything that enters a GPU from outside passes its PCIe, except NVLink
)


def _by_counters(link: EngineLink, every: Sequence[Carried], lanes: Sequence[LaneFacts]) -> tuple[Transport, tuple[str, ...]]:
    for medium, transport in _ORDER:
        ends = [one for one in every if one.medium is medium and one.verdict is not MediumVerdict.CANNOT_TELL]
        if not ends or any(one.verdict is not MediumVerdict.CARRIED for one in ends):
            continue
        evidence = tuple(_moved(one) for one in ends)
        if medium is not Medium.PCIE:
            return transport, evidence
        if not link.one_host:  # the bytes went on over a device whose counters were not read
            continue
        if any(each.lane in GPU_LANES for each in lanes):
            return Transport.PCIE, evidence
        if any(LANES.get(each.lane) is Transport.HOST_STAGED for each in lanes):
            return Transport.HOST_STAGED, evidence
        return Transport.PCIE, (*evidence, "these counters do not show whether from GPU to GPU or through host memory")
    return Transport.UNKNOWN, tuple(map(_moved, every)) or (_nothing(link),)


def _carried_it(one: Carried, transport: Transport) -> bool:
    return one.verdict is MediumVerdict.CARRIED and dict(_ORDER).get(one.medium) is transport


def _nothing(link: EngineLink) -> str:
    hosts = " and ".join(sorted({link.producer_host, link.consumer_host} - {""})) or "its hosts"
    return f"no counters of {hosts} cover the transfers: run sidecars beside the engines with links.sample"


_KIND: Final = {
    Medium.NVLINK: "NVLink",
    Medium.PCIE: "PCIe",
    Medium.RDMA: "RDMA ports",
    Medium.NIC: "network interfaces",
    Medium.LOOPBACK: "the loopback",
}
_DID: Final = {"transmit": "sent", "receive": "received"}


def _moved(one: Carried) -> str:
    """Describe in words what one medium shows."""
    kind, did = _KIND[one.medium], _DID[one.direction]
    windows = f"{one.windows} windows of {max(1, round(one.window_ns / 1e9))} s"
    if one.verdict is MediumVerdict.CANNOT_TELL:
        return f"{kind} of {one.host}: too few bytes, or too steady a rate, to conclude anything ({windows})"
    names = ", ".join(device.device.key for device, _ in one.devices[:4]) or kind
    share = f"{one.share or 0:.2f} bytes for each byte fetched"
    if one.verdict is MediumVerdict.NOT:
        return f"{kind} of {one.host} {did} {share}: not by them"
    return f"{names} at {one.host} {did} {share} ({windows})"


def _line_rate(carrying: Sequence[Carried]) -> int | None:
    """Return the line rate of the slower end; None where a device does not report it."""
    ends = [[device.line_rate for device, _ in one.devices] for one in carrying]
    sums = [sum(rate for rate in rates if rate is not None) for rates in ends if rates and None not in rates]
    return min(sums) if len(sums) == len(ends) and sums else None


def _one_of(carrying: Sequence[Carried]) -> tuple[DeviceCounts, ...]:
    """Return idle RDMA ports of the same rate beside the only port in use."""
    return tuple(
        other
        for one in carrying
        if one.medium is Medium.RDMA and len(one.devices) == 1
        for other in one.others
        if other.line_rate == one.devices[0][0].line_rate
    )
