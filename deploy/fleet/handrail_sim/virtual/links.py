"""What sidecars record of a virtual fleet's links: counters, UCX's log lines.

Kernels count the bytes of ports and interfaces. A device knows no request, only bytes: those of hand-offs among everything else
that a host sends. Times are by the hosts' own clocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from handrail.device_counters import link as names
from handrail.device_counters.link import Nature
from handrail.records import LineClock, LogFact, LogKind, Process, Source
from handrail.records.devices import Device, DeviceKind, DeviceRun, DeviceSample, DeviceValue, runs
from handrail_collector.event_rows import key_of
from handrail_collector.links.facts import link_fact_row
from handrail_collector.rows import LinkFactRow
from handrail_sim.emulator.faults import Active, Fault
from handrail_sim.emulator.observe import HostClock, clocks
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight, over_ns
from handrail_sim.emulator.truth import FetchTruth
from handrail_sim.virtual.engines import processes

EVERY_NS: Final = 1_000_000_000
_NIC, _PORT = "eth0", "mlx5_0/1"
_NIC_BYTES_PER_S: Final = 3.125e9  # 25 Gb/s, of the interface beside RDMA
_TCP_HEADERS, _RDMA_HEADERS = 1.04, 1.01  # bytes on the wire for one of KV: packets of 1500 bytes, and of 4096
_HUM_BYTES_PER_S: Final = 60_000.0  # requests, answers, health checks


def link_evidence(
    scenario: Scenario, flights: Sequence[Flight], faults: Sequence[Fault], seed: int, started_unix_ns: int
) -> tuple[list[DeviceRun], list[LinkFactRow]]:
    """Build what a collector stores of a run's links.

    That is samples of the hosts' devices, and facts from UCX's log lines.
    A collocated fleet has neither, since it hands nothing over.
    """
    hosts, here = scenario.hosts(), processes(scenario)
    if hosts.collocated:
        return [], []
    by_host = clocks(scenario, faults, started_unix_ns)
    facts = [fact for host in hosts.decode for fact in _lane_facts(scenario, here[host], by_host[host].unix_ns(0))]
    rows = [row for number, fact in enumerate(facts) if (row := link_fact_row(fact, number)) is not None]
    moved, over = _on_the_wire(scenario, flights, faults), over_ns(flights)
    samples = (
        sample
        for place, host in enumerate((*hosts.prefill, *hosts.decode))
        for device in _devices(scenario)
        for sample in _samples(here[host], device, moved, by_host[host], over, Random(f"hum-{seed}-{place}-{device.key}"))
    )
    return runs(samples), rows


def _devices(scenario: Scenario) -> list[Device]:
    """Build each host's devices: a network interface, and an RDMA port for KV.

    The port is there only where KV goes over it.
    """
    rdma = scenario.link_transport == "rdma"
    nic = Device(
        kind=DeviceKind.NIC,
        key=_NIC,
        product=f"{Nature.ADAPTER.value}, mlx5_core",
        line_rate_bytes=round(_NIC_BYTES_PER_S if rdma else scenario.line_bytes_per_s),
    )
    port = Device(kind=DeviceKind.RDMA, key=_PORT, product="MT4129, InfiniBand", line_rate_bytes=round(scenario.line_bytes_per_s))
    return [port, nic] if rdma else [nic]


def _samples(
    process: Process, device: Device, moved: Sequence[_Moved], clock: HostClock, over_ns: int, hum: Random
) -> Iterator[DeviceSample]:
    """Yield the samples of one device until the run is over.

    ``hum``: draws the bytes of everything but KV.
    """
    rdma = device.kind is DeviceKind.RDMA
    sent = _Counter([one for one in moved if one.rdma is rdma and one.prefill == process.host], rdma)
    received = _Counter([one for one in moved if one.rdma is rdma and one.decode == process.host], rdma)
    other = 0.0
    for at_ns in range(0, over_ns + EVERY_NS, EVERY_NS):
        counted = ((names.TRANSMIT, int(sent.at(at_ns) + other)), (names.RECEIVE, int(received.at(at_ns) + other)))
        yield DeviceSample(
            process=process,
            source=Source.RDMA if rdma else Source.NIC,
            device=device,
            at_unix_ns=clock.unix_ns(at_ns),
            values=(
                *(DeviceValue(name=names.BYTES, value=n, label=label, start_unix_ns=clock.unix_ns(0)) for label, n in counted),
                DeviceValue(name=names.UP, value=1.0),
                DeviceValue(name=names.LINE_RATE, value=float(device.line_rate_bytes or 0)),
            ),
        )
        other += 0.0 if rdma else hum.expovariate(1 / _HUM_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class _Moved:
    """KV on the wire, in true times."""

    prefill: str
    decode: str
    begin_ns: int
    end_ns: int
    size: int
    rdma: bool


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
        self._headers = _RDMA_HEADERS if rdma else _TCP_HEADERS
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


def _lane_facts(scenario: Scenario, process: Process, at_unix_ns: int) -> Iterator[LogFact]:
    """Yield the log facts of a reading engine's lane between hosts.

    Where UCX does not read from the host's own GPUs over ``cuda_ipc``, another is the line that says so.
    """
    rdma = scenario.link_transport == "rdma"
    lane, device = ("rc_mlx5", "mlx5_0:1") if rdma else ("tcp", _NIC)
    lines = [("ucx.lanes", (("transport", lane), ("nic", device), ("reach", "inter-node")))]
    for recogniser, words in lines if rdma else [*lines, ("ucx.no_nvlink", ())]:
        yield LogFact(
            process=process,
            source=Source.LOG,
            fact_id=key_of(process.host, recogniser),
            kind=LogKind.TRANSPORT,
            recogniser=recogniser,
            at_unix_ns=at_unix_ns,
            last_unix_ns=at_unix_ns,
            clock=LineClock.LINE,
            words=words,
        )
