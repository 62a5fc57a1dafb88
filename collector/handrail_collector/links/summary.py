"""Write a link as one sentence for a person on call, and as JSON. Pure.

In JSON, rates are bytes a second, durations ns, shares 0 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from handrail.device_counters.link import RECEIVE, TRANSMIT
from handrail.durations import format_duration
from handrail_collector.links.devices import DeviceCounts
from handrail_collector.links.findings import gigabytes, percent
from handrail_collector.links.report import LinkLine
from handrail_collector.links.throughput import DurationPercentiles
from handrail_collector.links.transport import Transport

MUCH_OF_TTFT: Final = 0.2
"""Least share of the TTFT at which transfers may explain a long TTFT."""

WORDS: Final = {
    Transport.NVLINK: "over NVLink",
    Transport.PCIE: "over PCIe",
    Transport.RDMA: "over RDMA",
    Transport.TCP: "over TCP",
    Transport.HOST_STAGED: "through host memory",
    Transport.UNKNOWN: "over an unknown transport",
}


def sentence(line: LinkLine) -> str:
    """Describe the link's rate, transport and line rate."""
    figures, transport_evidence = line.figures, line.transport
    name = f"{figures.link.producer}>{figures.link.consumer}"
    if figures.rate_low is None:
        return f"The link {name}: {figures.hand_offs:,} hand-offs, none with known bytes and time."
    slow = "is slow: KV moves" if line.slow else "moves KV"
    took = f" ({format_duration(figures.transfer.p50_ns)} for a median transfer)" if figures.transfer is not None else ""
    return (
        f"The link {name} {slow} at {rate(line)} while transferring{took}, {WORDS[transport_evidence.transport]}{_of_line(line)}."
    )


def rate(line: LinkLine) -> str:
    """Format the rate; as a range where polling leaves more than a tenth open."""
    low, high = line.figures.rate_low, line.figures.rate_high
    if low is None:
        return "–"
    if high is None:
        return f"at least {gigabytes(low)}"
    return f"{gigabytes(low)} to {gigabytes(high)}" if high > 1.1 * low else gigabytes(line.figures.rate or low)


def _of_line(line: LinkLine) -> str:
    devices = list(dict.fromkeys(device.device.key for device in line.transport.devices))
    named = ", ".join(devices[:3]) + (f" and {len(devices) - 3} more" if len(devices) > 3 else "")
    share, of = line.share_of_line, line.transport.line_rate
    parts = [named] if named else []
    parts += [f"{percent(share, 1.0)} of its line rate of {gigabytes(of)}"] if share is not None and of else []
    return f" ({': '.join(parts)})" if parts else ""


def of_period(lines: Sequence[LinkLine], median_ttft_ns: int | None) -> list[str]:
    """Describe for ``explain`` the links that matter, worst first.

    A link matters when it is slow, or when its transfers are a large part of a median TTFT.
    """
    reports = []
    for line in lines:
        transfer = line.figures.transfer
        share = transfer.p50_ns / median_ttft_ns if transfer is not None and median_ttft_ns else 0.0
        if line.figures.rate_low is not None and (line.slow or share >= MUCH_OF_TTFT):
            of_ttft = f" That is {percent(share, 1.0)} of the median time to first token." if share >= MUCH_OF_TTFT else ""
            reports.append((line.slow, share, f"{sentence(line)}{of_ttft}"))
    return [text for _, _, text in sorted(reports, key=lambda each: (-each[0], -each[1], each[2]))]


def plain(line: LinkLine) -> dict[str, Any]:
    """Encode one link."""
    figures, transport_evidence = line.figures, line.transport
    carrying = {(device.host, device.device.key, device.medium) for device in transport_evidence.devices}
    return {
        "producer": figures.link.producer,
        "consumer": figures.link.consumer,
        "producer_host": figures.link.producer_host or None,
        "consumer_host": figures.link.consumer_host or None,
        "backwards": figures.backwards,
        "connectors": list(figures.connectors),
        "modes": list(figures.modes),
        "kv_fetches": figures.hand_offs,
        "failed": figures.failed,
        "open": figures.open,
        "timed": figures.timed,
        "moved_bytes": figures.moved_bytes,
        "bytes_counted": figures.counted,
        "busy_ns": figures.busy_ns,
        "rate": figures.rate,
        "rate_low": figures.rate_low,
        "rate_high": figures.rate_high,
        "effective_rate": figures.effective_rate,
        "transfer": _times(figures.transfer),
        "kv_fetch": _times(figures.whole),
        "cold_starts_ns": list(figures.cold_ns),
        "stuck": figures.stuck,
        "stuck_at_ns": figures.stuck_at_ns,
        "descriptors": figures.descriptors,
        "first_unix_ns": figures.first_unix_ns,
        "last_unix_ns": figures.last_unix_ns,
        "transport": transport_evidence.transport.value,
        "evidence": list(transport_evidence.evidence),
        "examined": list(transport_evidence.examined),
        "line_rate": transport_evidence.line_rate,
        "share_of_line": line.share_of_line,
        "slow": line.slow,
        "summary": sentence(line),
        "findings": [{"kind": each.kind.value, "seen": each.seen, "advice": each.advice} for each in line.findings],
        "devices": [_device(each, carried=(each.host, each.device.key, each.medium) in carrying) for each in line.devices],
    }


def rest(lines: Sequence[LinkLine]) -> dict[str, int]:
    """Sum up the links that are not listed one by one."""
    return {
        "links": len(lines),
        "kv_fetches": sum(line.figures.hand_offs for line in lines),
        "moved_bytes": sum(line.figures.moved_bytes for line in lines),
        "slow": sum(line.slow for line in lines),
    }


def _times(times: DurationPercentiles | None) -> dict[str, int] | None:
    return asdict(times) if times is not None else None


def _device(device: DeviceCounts, *, carried: bool) -> dict[str, Any]:
    peaks = {direction: device.peak(direction) for direction in (RECEIVE, TRANSMIT)}
    return {
        "host": device.host,
        "device": device.device.key,
        "medium": device.medium.value,
        "product": device.device.product,
        "up": device.up,
        "line_rate": device.line_rate,
        "carried": carried,
        "mean": {direction: found[0] for direction, found in peaks.items() if found is not None},
        "peak": {direction: found[1] for direction, found in peaks.items() if found is not None},
        "errors": dict(device.errors),
    }
