"""Hand-offs and device samples of a small fleet: hosts p0, p1 and d0.

By default one link carries hand-offs of 470 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from handrail.device_counters import link as names
from handrail.records import Process, Role, Source
from handrail.records.devices import Device, DeviceKind, DeviceSample, DeviceValue
from handrail_collector.links.devices import DeviceCounts, counted
from handrail_collector.links.handoffs import EngineLink, HandOff, Piece
from handrail_collector.rows import FetchRow

S = 10**9
MS = 10**6
BEGAN = 1_700_000_000 * S
P0_D0 = EngineLink("p0:8000", "d0:8000", "p0", "d0")


def hand_off(
    at_s: float,
    took_s: float,
    size: int = 470_000_000,
    *,
    link: EngineLink = P0_D0,
    bound_s: float = 0.0,
    outcome: str = "ok",
    connector: str = "NixlConnector",
    mode: str = "pull",
    handshake_ns: int | None = 0,
    whole_s: float | None = None,
    moved: bool = True,
) -> HandOff:
    """Build a hand-off whose bytes moved from ``at_s`` for ``took_s`` seconds."""
    begin = BEGAN + round(at_s * S)
    piece = Piece(begin, begin + round(took_s * S), size, round(bound_s * S))
    return HandOff(
        link=link,
        started_unix_ns=begin,
        pieces=(piece,) if moved else (),
        outcome=outcome,
        connector=connector,
        mode=mode,
        taken_ns=round((took_s if whole_s is None else whole_s) * S),
        handshake_ns=handshake_ns,
    )


def process(host: str, sender: str = "") -> Process:
    return Process(role=Role.DECODE, instance=f"{host}:8000", host=host, host_name=host, sender=sender or f"sidecar-{host}")


RDMA = Device(kind=DeviceKind.RDMA, key="mlx5_0/1", product="MT4129, InfiniBand", line_rate_bytes=50_000_000_000)
ETH = Device(kind=DeviceKind.NIC, key="eth0", product="adapter, mlx5_core", line_rate_bytes=3_125_000_000)
LO = Device(kind=DeviceKind.NIC, key="lo", product="loopback")

Moved = Callable[[float], float]
"""Bytes since the run began, as a function of seconds."""


def nothing(_: float) -> float:
    return 0.0


def by(hand_offs: Iterable[HandOff], *, times: float = 1.0, background: float = 20_000.0) -> Moved:
    """Return the bytes that a device has moved when it carries these hand-offs.

    It moves ``times`` as much as they need, plus ``background`` bytes per second.
    """
    pieces = [piece for one in hand_offs for piece in one.pieces]

    def moved(at_s: float) -> float:
        at = BEGAN + at_s * S
        shares = (min(1.0, max(0.0, (at - p.begin_ns) / max(1, p.end_ns - p.begin_ns))) * p.bytes for p in pieces)
        return times * sum(shares) + background * at_s

    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What one device of a host does during the run."""

    host: str
    device: Device = ETH
    sent: Moved = nothing
    received: Moved = nothing
    up: bool = True
    errors: tuple[tuple[str, int], ...] = ()  # at the end
    ahead_s: float = 0.0  # the host's wall clock
    sender: str = ""

    def samples(self, until_s: float, every_s: float = 0.5, *, from_s: float = 0.0) -> list[DeviceSample]:
        """Sample the devices at even times."""
        steps = round((until_s - from_s) / every_s)
        return [self._sample(from_s + step * every_s, first=step == 0, last=step == steps) for step in range(steps + 1)]

    def _sample(self, at_s: float, *, first: bool, last: bool) -> DeviceSample:
        start = BEGAN
        values = [
            DeviceValue(name=names.BYTES, value=int(self.sent(at_s)), label=names.TRANSMIT, start_unix_ns=start),
            DeviceValue(name=names.BYTES, value=int(self.received(at_s)), label=names.RECEIVE, start_unix_ns=start),
        ]
        if first or last:
            values.append(DeviceValue(name=names.UP, value=float(self.up)))
            values += [
                DeviceValue(name=names.ERRORS, value=count if last else 0, label=error, start_unix_ns=start)
                for error, count in self.errors
            ]
        return DeviceSample(
            process=process(self.host, self.sender),
            source=Source.RDMA if self.device.kind is DeviceKind.RDMA else Source.NIC,
            device=self.device,
            at_unix_ns=BEGAN + round((at_s + self.ahead_s) * S),
            values=tuple(values),
        )


def devices(hosts: Sequence[Host], until_s: float, every_s: float = 0.5) -> list[DeviceCounts]:
    return counted(sample for host in hosts for sample in host.samples(until_s, every_s))


def fetch_row(at: int, **changed: object) -> FetchRow:
    """Build the row of a KV fetch from p0.

    It began ``at`` seconds after the run did.
    By default it moves 100 MB in 30 ms, from 20 ms after D knew the request.
    """
    base: dict[str, object] = {
        "started_unix_ns": BEGAN + at * S,
        "trace_id": f"{at:032x}",
        "request_id": f"{at:016x}",
        "version": 1,
        "number": 0,
        "span_id": f"{at:016x}",
        "consumer_instance": "d0:8000",
        "consumer_host": "d0",
        "outcome": "ok",
        "producer_instance": "p0:8000",
        "producer_host": "p0",
        "posted_ns": 20 * MS,
        "transfer_ns": 30 * MS,
        "transfer_bound_ns": 5 * MS,
        "bytes_moved": 10**8,
        "duration_ns": 60 * MS,
        "handshake_ns": 0,
        "mode": "pull",
    }
    return FetchRow(**{**base, **changed})  # type: ignore[arg-type]
