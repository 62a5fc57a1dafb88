"""Find what is wrong or odd with a link, with evidence and advice. Pure.

The kinds are a closed list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail.durations import format_duration
from handrail_collector.links.devices import DeviceCounts, Medium
from handrail_collector.links.facts import Posts, Queue
from handrail_collector.links.throughput import LinkThroughput
from handrail_collector.links.transport import Transport, TransportEvidence


class LinkFindingKind(str, Enum):
    """Kind of a finding about a link; the list is closed."""

    TCP_THOUGH_RDMA = "tcp_though_rdma"
    TCP = "tcp"
    HOST_STAGED = "host_staged"
    NO_PEER_TO_PEER = "no_peer_to_peer"
    SLOW_PATH = "slow_path"  # slower than any transport that should carry KV
    FAR_BELOW_LINE = "far_below_line"
    ONE_OF_SEVERAL = "one_of_several"
    SUBMISSION_BOUND = "submission_bound"
    BOOTSTRAP_QUEUE = "bootstrap_queue"
    TIME_LIMIT = "time_limit"
    COLD_START = "cold_start"
    ABOVE_LINE = "above_line"
    LINK_ERRORS = "link_errors"
    CONTRADICTION = "contradiction"


SLOW: Final = frozenset(
    {LinkFindingKind.TCP_THOUGH_RDMA, LinkFindingKind.HOST_STAGED, LinkFindingKind.SLOW_PATH, LinkFindingKind.FAR_BELOW_LINE}
)
"""Transports that are a fault by themselves.

TCP is not among them: over 100 Gb/s it may be enough.
"""

GB: Final = 1e9
SLOW_ONE_HOST: Final = 2 * GB
"""Slow for two GPUs of one host, in bytes a second.

PCIe 3.0 x16 through host memory reaches several times this rate, NVLink a hundred times.
"""

SLOW_BETWEEN_HOSTS: Final = 1 * GB
"""Slow between hosts, in bytes a second: less than a 10 Gb/s network carries."""

FAR_BELOW: Final = 0.3
ABOVE: Final = 1.05
SATURATED: Final = 0.7
SUBMISSION: Final = 0.5
MANY_DESCRIPTORS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFinding:
    """One finding about a link.

    ``seen``: the evidence with its numbers.
    ``advice``: what to do; '' where there is nothing to do.
    """

    kind: LinkFindingKind
    seen: str
    advice: str = ""


def findings(
    figures: LinkThroughput,
    transport_evidence: TransportEvidence,
    devices: Sequence[DeviceCounts],
    posts: Sequence[Posts] = (),
    queues: Sequence[Queue] = (),
    no_gpu_get: Sequence[str] = (),
) -> tuple[LinkFinding, ...]:
    """Return the findings of one link.

    ``devices``: all devices of both hosts. The other arguments are what the link's engines report.
    ``no_gpu_get``: engines whose UCX cannot read from another GPU.
    """
    found = (
        _path(figures, transport_evidence, devices, no_gpu_get),
        _rate(figures, transport_evidence),
        _engine(posts, queues),
        _odd(figures, transport_evidence),
    )
    return tuple(finding for part in found for finding in part)


def _path(
    figures: LinkThroughput, transport_evidence: TransportEvidence, devices: Sequence[DeviceCounts], no_gpu_get: Sequence[str]
) -> Iterator[LinkFinding]:
    link = figures.link
    if transport_evidence.transport is Transport.TCP:
        both = {link.producer_host, link.consumer_host}
        ports = [each for each in devices if each.medium is Medium.RDMA and each.up and each.host in both]
        if both and {each.host for each in ports} == both:
            names = ", ".join(each.name for each in ports[:4])
            seen = f"the hand-off is on TCP{_at(figures)}, though {names} {'is' if len(ports) == 1 else 'are'} up"
            advice = "check UCX_NET_DEVICES and UCX_TLS of both engines, and that the pods have the RDMA device (handrail doctor)"
            yield LinkFinding(kind=LinkFindingKind.TCP_THOUGH_RDMA, seen=seen, advice=advice)
        else:
            advice = "use an RDMA network between the hosts; without one, check whether splitting pays (handrail compare)"
            if link.one_host:
                advice = _pull_advice(figures) or "use GPUs with a path to each other (nvidia-smi topo -p2p r)"
            yield LinkFinding(kind=LinkFindingKind.TCP, seen=f"the hand-off is on TCP{_at(figures)}", advice=advice)
    if transport_evidence.transport is Transport.HOST_STAGED:
        seen = f"the hand-off goes through host memory{_at(figures)}"
        yield LinkFinding(
            kind=LinkFindingKind.HOST_STAGED, seen=seen, advice="use GPUs with a path to each other (nvidia-smi topo -p2p r)"
        )
    for instance in dict.fromkeys(no_gpu_get):
        seen = f"UCX at {instance} does not read over cuda_ipc, since it sees no NVLink"
        yield LinkFinding(
            kind=LinkFindingKind.NO_PEER_TO_PEER, seen=seen, advice=_pull_advice(figures) or "nvidia-smi topo -p2p r shows why"
        )
    if (
        transport_evidence.one_of
        and transport_evidence.line_rate
        and (figures.rate_low or 0) >= SATURATED * transport_evidence.line_rate
    ):
        idle = ", ".join(each.name for each in transport_evidence.one_of[:4])
        rate = percent(figures.rate_low or 0, transport_evidence.line_rate)
        seen = f"one port carries all of it, at {rate} of its line rate; idle: {idle}"
        yield LinkFinding(
            kind=LinkFindingKind.ONE_OF_SEVERAL,
            seen=seen,
            advice="name more ports in UCX_NET_DEVICES, set UCX_MAX_RMA_RAILS above 1",
        )


def _pull_advice(figures: LinkThroughput) -> str:
    """Return the advice for a slow pulling connector.

    Case B10: on one host without RDMA, the pulling connector moves a hundredth of what the pushing one does.
    """
    pulls = "pull" in figures.modes or any(name in ("NixlConnector", "NixlPullConnector") for name in figures.connectors)
    if not pulls or not figures.link.one_host:
        return ""
    return "pull over cuda_ipc: GET uses TCP where UCX sees no NVLink; use NixlPushConnector, which writes, or UCX with RDMA"


def _rate(figures: LinkThroughput, transport_evidence: TransportEvidence) -> Iterator[LinkFinding]:
    low, high, line = figures.rate_low, figures.rate_high, transport_evidence.line_rate
    if low is None:
        return
    if line and low > ABOVE * line:
        seen = f"{gigabytes(low)} while transferring is more than the line rate of {gigabytes(line)}"
        advice = "some counter of bytes or times is wrong: do not trust this rate"
        yield LinkFinding(kind=LinkFindingKind.ABOVE_LINE, seen=seen, advice=advice)
        return
    if high is None:
        return
    slow, where = (SLOW_ONE_HOST, "within one host") if figures.link.one_host else (SLOW_BETWEEN_HOSTS, "between hosts")
    if high < slow:
        seen = f"{gigabytes(high)} while transferring; less than {gigabytes(slow)} {where} is a slow path, whatever the transport"
        advice = _pull_advice(figures) if transport_evidence.transport in (Transport.TCP, Transport.UNKNOWN) else ""
        yield LinkFinding(kind=LinkFindingKind.SLOW_PATH, seen=seen, advice=advice or "handrail doctor names what the path lacks")
    elif line and high < FAR_BELOW * line:
        seen = f"{gigabytes(high)} while transferring is {percent(high, line)} of the line rate of {gigabytes(line)}"
        advice = "small transfers, many descriptors or a busy engine: check its post times (handrail metrics) and the block size"
        yield LinkFinding(kind=LinkFindingKind.FAR_BELOW_LINE, seen=seen, advice=advice)


def _engine(posts: Sequence[Posts], queues: Sequence[Queue]) -> Iterator[LinkFinding]:
    for each in posts:
        if each.transfers and each.share >= SUBMISSION:
            many = f", {each.descriptors:,} descriptors each" if each.descriptors else ""
            seen = (
                f"{each.instance} spends {100 * each.share:.0f} % of a transfer's time on posting it "
                f"({format_duration(each.post_ns)} of {format_duration(each.transfer_ns)}{many}), not on the wire"
            )
            more = (each.descriptors or 0) >= MANY_DESCRIPTORS
            advice = (
                "use a larger --block-size, or a KV layout with fewer pieces a block"
                if more
                else "check what else its thread does"
            )
            yield LinkFinding(kind=LinkFindingKind.SUBMISSION_BOUND, seen=seen, advice=advice)
    for queue in queues:
        if queue.bootstrapping > max(queue.transferring, queue.queued):
            rate = f"; therefore its ranks together move only {queue.rate / 1e6:.1f} MB/s" if queue.rate is not None else ""
            seen = f"{queue.bootstrapping:,} requests of {queue.ranks} ranks at {queue.instance} wait at bootstrap{rate}"
            advice = "the decode engines have not offered them space: add decode capacity, or run fewer prefills at once"
            yield LinkFinding(kind=LinkFindingKind.BOOTSTRAP_QUEUE, seen=seen, advice=advice)


def _odd(figures: LinkThroughput, transport_evidence: TransportEvidence) -> Iterator[LinkFinding]:
    if figures.stuck_at_ns is not None:
        seen = f"{figures.stuck:,} hand-offs ended without their KV after {figures.stuck_at_ns / 1e9:.1f} s each: a time limit"
        advice = "they hung from their start: check UCX_NET_DEVICES of both engines, and the first error in their logs"
        yield LinkFinding(kind=LinkFindingKind.TIME_LIMIT, seen=seen, advice=advice)
    for cold in figures.cold_ns:
        seen = f"the handshake took {format_duration(cold)}; no figure includes it"
        yield LinkFinding(kind=LinkFindingKind.COLD_START, seen=seen, advice="warm up a new pair with one request before traffic")
    if transport_evidence.contradicted:
        seen = (
            f"counters say {transport_evidence.transport.value}, the engine's log another transport; Handrail trusts the counters"
        )
        yield LinkFinding(kind=LinkFindingKind.CONTRADICTION, seen=seen)
    for device in transport_evidence.devices:
        wrong = {name: count for name, count in device.errors.items() if name not in _HARMLESS}
        if wrong:
            named = ", ".join(f"{count:,} {name}" for name, count in sorted(wrong.items(), key=lambda each: -each[1])[:3])
            advice = "check the cable, the switch port and the flow control of this port"
            yield LinkFinding(kind=LinkFindingKind.LINK_ERRORS, seen=f"{device.name} counted {named} meanwhile", advice=advice)


_HARMLESS: Final = frozenset({"duplicate_request", "rx_dropped", "VL15_dropped"})
"""Error counters that grow on healthy hosts too.

They count packets without a receiver, and repeated requests of other tenants.
"""


def _at(figures: LinkThroughput) -> str:
    return f", at {gigabytes(figures.rate_low)}" if figures.rate_low is not None else ""


def gigabytes(bytes_per_second: float) -> str:
    """Format a rate: ``0.36 GB/s``, of 10^9 bytes, as is usual for networks."""
    value = bytes_per_second / GB
    return f"{value:.0f} GB/s" if value >= 100 else f"{value:.1f} GB/s" if value >= 10 else f"{value:.2f} GB/s"


def percent(part: float, whole: float) -> str:
    """Format a share: ``12 %``."""
    return f"{100 * part / whole:.0f} %" if part >= 0.1 * whole else f"{100 * part / whole:.1f} %"
