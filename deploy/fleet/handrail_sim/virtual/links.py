"""Device counters and UCX lines of a virtual fleet, as sidecars record them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from handrail.device_counters import link as names
from handrail.device_counters.link import Nature
from handrail.records import LineClock, LogFact, LogKind, Process, Role, Source
from handrail.records.devices import Device, DeviceKind, DeviceRun, DeviceSample, DeviceValue, runs
from handrail_collector.links.facts import link_fact_row
from handrail_collector.rows import LinkFactRow
from handrail_collector.stitch.events import key_of
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.observe import clocks
from handrail_sim.emulator.observe_links import DeviceObservation, LaneObservation, observe_links
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight
from handrail_sim.virtual.observers import over_ns


def link_evidence(
    scenario: Scenario, flights: Sequence[Flight], faults: Sequence[Fault], seed: int, started_unix_ns: int
) -> tuple[list[DeviceRun], list[LinkFactRow]]:
    """Build what a collector stores of a run's links.

    These are samples of the hosts' devices, and facts from UCX's log lines.
    """
    roles = scenario.hosts()
    processes = {
        host: Process(role=role, instance=f"{host}:8000", host=host, host_name=host)
        for role, hosts in ((Role.PREFILL, roles.prefill), (Role.DECODE, roles.decode))
        for host in hosts
    }
    by_host = clocks(scenario, faults, started_unix_ns)
    statement = list(observe_links(scenario, flights, faults, by_host, over_ns(flights), seed=seed))
    facts = [fact for one in statement if isinstance(one, LaneObservation) for fact in lane_facts(one, processes)]
    rows = [row for number, fact in enumerate(facts) if (row := link_fact_row(fact, number)) is not None]
    return runs(device_sample(one, processes) for one in statement if isinstance(one, DeviceObservation)), rows


def device_sample(device_observation: DeviceObservation, processes: Mapping[str, Process]) -> DeviceSample:
    """Build one device sample. ``processes``: by host."""
    line_rate = round(device_observation.line_bytes_per_s)
    counted = ((names.TRANSMIT, device_observation.sent_bytes), (names.RECEIVE, device_observation.received_bytes))
    return DeviceSample(
        process=processes[device_observation.host],
        source=Source.RDMA if device_observation.rdma else Source.NIC,
        device=Device(
            kind=DeviceKind.RDMA if device_observation.rdma else DeviceKind.NIC,
            key=device_observation.device,
            product="MT4129, InfiniBand" if device_observation.rdma else f"{Nature.ADAPTER.value}, mlx5_core",
            line_rate_bytes=line_rate,
        ),
        at_unix_ns=device_observation.at_unix_ns,
        values=(
            *(
                DeviceValue(name=names.BYTES, value=value, label=label, start_unix_ns=device_observation.started_unix_ns)
                for label, value in counted
            ),
            DeviceValue(name=names.UP, value=1.0),
            DeviceValue(name=names.LINE_RATE, value=float(line_rate)),
        ),
    )


def lane_facts(lane_observation: LaneObservation, processes: Mapping[str, Process]) -> list[LogFact]:
    """Build the log facts of one lane.

    One is the line on the lane between hosts. Where UCX does not read from GPUs, another is the line that says so.
    """
    words = (("transport", lane_observation.lane), ("nic", lane_observation.device), ("reach", "inter-node"))
    facts = [_fact(lane_observation, processes, "ucx.lanes", words)]
    return facts if lane_observation.gpu_get else [*facts, _fact(lane_observation, processes, "ucx.no_nvlink", ())]


def _fact(
    lane_observation: LaneObservation, processes: Mapping[str, Process], recogniser: str, words: tuple[tuple[str, str], ...]
) -> LogFact:
    return LogFact(
        process=processes[lane_observation.host],
        source=Source.LOG,
        fact_id=key_of(lane_observation.host, recogniser),
        kind=LogKind.TRANSPORT,
        recogniser=recogniser,
        at_unix_ns=lane_observation.at_unix_ns,
        last_unix_ns=lane_observation.at_unix_ns,
        clock=LineClock.LINE,
        words=words,
    )
