"""Encode links as JSON for the API and the command line. Pure.

Rates are bytes a second, durations ns, shares 0 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from handrail.device_counters.link import RECEIVE, TRANSMIT
from handrail_collector.links.devices import DeviceCounts
from handrail_collector.links.report import LinkLine
from handrail_collector.links.summary import sentence
from handrail_collector.links.throughput import DurationPercentiles


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
