"""The device counters and UCX log lines of a virtual fleet's hosts.

Kernels count the bytes of ports and interfaces. Times are by the hosts' own clocks.
A device knows no request, only bytes: those of hand-offs among everything else that a host sends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from handrail_sim.emulator.faults import Active, Fault
from handrail_sim.emulator.observe import HostClock
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight
from handrail_sim.emulator.truth import FetchTruth

EVERY_NS = 1_000_000_000
NIC, PORT = "eth0", "mlx5_0/1"
NIC_BYTES_PER_S = 3.125e9  # 25 Gb/s, of the interface beside RDMA
TCP_HEADERS, RDMA_HEADERS = 1.04, 1.01  # bytes on the wire for one of KV: packets of 1500 bytes, and of 4096
HUM_BYTES_PER_S = 60_000.0  # requests, answers, health checks


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceObservation:
    """The counters of one device at one instant.

    ``line_bytes_per_s``: the line rate in one direction.
    """

    host: str
    device: str
    rdma: bool
    line_bytes_per_s: float
    sent_bytes: int
    received_bytes: int
    at_unix_ns: int
    started_unix_ns: int  # when its counters began
    reported_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneObservation:
    """UCX's log line at the reading engine: lane and device of its remote reads.

    ``gpu_get``: whether it reads from GPUs of its own host over ``cuda_ipc``.
    """

    host: str
    lane: str
    device: str
    gpu_get: bool
    at_unix_ns: int
    reported_ns: int


LinkObservation = DeviceObservation | LaneObservation


@dataclass(frozen=True, slots=True)
class _Moved:
    """KV on the wire, in true times."""

    prefill: str
    decode: str
    begin_ns: int
    end_ns: int
    size: int
    rdma: bool


def observe_links(
    scenario: Scenario,
    flights: Sequence[Flight],
    faults: Sequence[Fault],
    clocks: Mapping[str, HostClock],
    over_ns: int,
    *,
    seed: int,
) -> Iterator[LinkObservation]:
    """Yield all device and UCX records of P and D until the run is over.

    A collocated fleet has none, since it hands nothing over.
    """
    hosts = scenario.hosts()
    if hosts.collocated:
        return
    moved = _on_the_wire(scenario, flights, faults)
    for host in hosts.decode:
        yield _lane(scenario, clocks[host], host)
    for place, host in enumerate((*hosts.prefill, *hosts.decode)):
        devices = [(PORT, True, scenario.line_bytes_per_s)] if scenario.link_transport == "rdma" else []
        devices.append((NIC, False, NIC_BYTES_PER_S if devices else scenario.line_bytes_per_s))
        for device, rdma, line in devices:
            hum = Random(f"hum-{seed}-{place}-{device}")
            sent = _Counter([one for one in moved if one.rdma is rdma and one.prefill == host], rdma)
            received = _Counter([one for one in moved if one.rdma is rdma and one.decode == host], rdma)
            other = 0.0
            for at in range(0, over_ns + EVERY_NS, EVERY_NS):
                yield DeviceObservation(
                    host=host,
                    device=device,
                    rdma=rdma,
                    line_bytes_per_s=line,
                    sent_bytes=int(sent.at(at) + other),
                    received_bytes=int(received.at(at) + other),
                    at_unix_ns=clocks[host].unix_ns(at),
                    started_unix_ns=clocks[host].unix_ns(0),
                    reported_ns=at,
                )
                other += 0.0 if rdma else hum.expovariate(1 / HUM_BYTES_PER_S)


def _on_the_wire(scenario: Scenario, flights: Sequence[Flight], faults: Sequence[Fault]) -> list[_Moved]:
    """Find when the KV of each hand-off is on the wire.

    On a link that serves in turn, a transfer moves only when the one before it is through.
    """
    active, through, found = Active(faults), dict[tuple[str, str], int](), []
    for flight in sorted(flights, key=lambda flight: flight.loaded_ns or 0):
        began, ended, plan = flight.contact_ns, flight.loaded_ns, flight.plan
        if began is None or ended is None or flight.fetch not in (FetchTruth.OK, FetchTruth.STALE_READ):
            continue
        wire = plan.prefill_host, plan.decode_host
        if scenario.link_order == "in-turn":
            began = max(began, through.get(wire, 0))
            through[wire] = ended
        staged = active.find("no_p2p", ">".join(wire), began) is not None
        rdma = scenario.link_transport == "rdma" and not staged
        found.append(_Moved(*wire, min(began, ended), ended, flight.kv_bytes, rdma))
    return found


class _Counter:
    """Bytes of one direction of one device, read at rising times."""

    def __init__(self, moved: Sequence[_Moved], rdma: bool) -> None:
        self._moved = sorted(moved, key=lambda one: one.end_ns)
        self._headers = RDMA_HEADERS if rdma else TCP_HEADERS
        self._ends = [one.end_ns for one in self._moved]
        self._before = [0]
        for one in self._moved:
            self._before.append(self._before[-1] + one.size)

    def at(self, at_ns: int) -> float:
        place = bisect_right(self._ends, at_ns)
        whole = self._before[place]
        for one in self._moved[place : place + 256]:  # transfers under way; the number never grows beyond them
            if one.begin_ns < at_ns:
                whole += int(one.size * (at_ns - one.begin_ns) / (one.end_ns - one.begin_ns))
        return whole * self._headers


def _lane(scenario: Scenario, here: HostClock, host: str) -> LaneObservation:
    rdma = scenario.link_transport == "rdma"
    return LaneObservation(
        host=host,
        lane="rc_mlx5" if rdma else "tcp",
        device="mlx5_0:1" if rdma else NIC,
        gpu_get=rdma,
        at_unix_ns=here.unix_ns(0),
        reported_ns=0,
    )
