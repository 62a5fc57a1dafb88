"""What the kernels and UCX of a virtual fleet's hosts said of its links, as the records that sidecars make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from handrail.cli.simulated import over_ns
from handrail.hardware import Device, DeviceKind, DeviceRun, DeviceSample, DeviceValue, runs
from handrail.links import counters as names
from handrail.links.nic import Nature
from handrail.records import LineClock, LogFact, LogKind, Process, Role, Source
from handrail_collector.links.facts import link_fact_row
from handrail_collector.rows import LinkFactRow
from handrail_collector.stitch.events import key_of
from handrail_fleet.faults import Fault
from handrail_fleet.observe import clocks
from handrail_fleet.observe_links import DeviceObservation, LaneObservation, observe_links
from handrail_fleet.scenario import Scenario
from handrail_fleet.simulate import Flight


def link_evidence(
    scenario: Scenario, flights: Sequence[Flight], faults: Sequence[Fault], seed: int, started_unix_ns: int
) -> tuple[list[DeviceRun], list[LinkFactRow]]:
    """What a collector stores of a run's links: samples of the hosts' devices, and UCX's lines."""
    roles = scenario.hosts()
    processes = {
        host: Process(role=role, instance=f"{host}:8000", host=host, host_name=host)
        for role, hosts in ((Role.PREFILL, roles.prefill), (Role.DECODE, roles.decode))
        for host in hosts
    }
    by_host = clocks(scenario, faults, started_unix_ns)
    said = list(observe_links(scenario, flights, faults, by_host, over_ns(flights), seed=seed))
    facts = [fact for one in said if isinstance(one, LaneObservation) for fact in lane_facts(one, processes)]
    rows = [row for number, fact in enumerate(facts) if (row := link_fact_row(fact, number)) is not None]
    return runs(device_sample(one, processes) for one in said if isinstance(one, DeviceObservation)), rows


def device_sample(said: DeviceObservation, processes: Mapping[str, Process]) -> DeviceSample:
    """``processes`` by host."""
    line_rate = round(said.line_bytes_per_s)
    counted = ((names.TRANSMIT, said.sent_bytes), (names.RECEIVE, said.received_bytes))
    return DeviceSample(
        process=processes[said.host],
        source=Source.RDMA if said.rdma else Source.NIC,
        device=Device(
            kind=DeviceKind.RDMA if said.rdma else DeviceKind.NIC,
            key=said.device,
            product="MT4129, InfiniBand" if said.rdma else f"{Nature.ADAPTER.value}, mlx5_core",
            line_rate_bytes=line_rate,
        ),
        at_unix_ns=said.at_unix_ns,
        values=(
            *(
                DeviceValue(name=names.BYTES, value=value, label=label, start_unix_ns=said.started_unix_ns)
                for label, value in counted
            ),
            DeviceValue(name=names.UP, value=1.0),
            DeviceValue(name=names.LINE_RATE, value=float(line_rate)),
        ),
    )


def lane_facts(said: LaneObservation, processes: Mapping[str, Process]) -> list[LogFact]:
    """The line on the lane between hosts; and, where UCX does not read from GPUs, the line that says so."""
    words = (("transport", said.lane), ("nic", said.device), ("reach", "inter-node"))
    facts = [_fact(said, processes, "ucx.lanes", words)]
    return facts if said.gpu_get else [*facts, _fact(said, processes, "ucx.no_nvlink", ())]


def _fact(
    said: LaneObservation, processes: Mapping[str, Process], recogniser: str, words: tuple[tuple[str, str], ...]
) -> LogFact:
    return LogFact(
        process=processes[said.host],
        source=Source.LOG,
        fact_id=key_of(said.host, recogniser),
        kind=LogKind.TRANSPORT,
        recogniser=recogniser,
        at_unix_ns=said.at_unix_ns,
        last_unix_ns=said.at_unix_ns,
        clock=LineClock.LINE,
        words=words,
    )
