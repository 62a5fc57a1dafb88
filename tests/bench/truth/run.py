"""Run one case from beginning to end.

It simulates the case and its twin, feeds what the hosts reported through the pipeline, and judges the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.truth import baseline
from bench.truth.cases import TRACES, Case
from bench.truth.judge import Counts, Known, Score, by_request, found_in, judge
from handrail.records import EngineRequest
from handrail_collector.batch import newest, rows_of
from handrail_collector.rows import RequestRow
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.observe import STARTED_UNIX_NS
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight, Simulation, record
from handrail_sim.emulator.truth import RequestTruth, excess
from handrail_sim.emulator.virtual_run import VirtualRunSettings, plan_requests
from handrail_sim.emulator.workload import WorkloadRequest
from handrail_sim.virtual.observers import arrivals


@dataclass(frozen=True, slots=True)
class _Twin:
    """A run without a fault; several cases share one."""

    plans: Sequence[WorkloadRequest]
    truths: Sequence[RequestTruth]
    flights: Sequence[Flight]
    rows: Sequence[RequestRow]
    found: int


class Referee:
    """Judge of cases of ``requests`` requests each, with one seed."""

    def __init__(self, requests: int, seed: int, traces: Path = TRACES, *, plugin: bool = False) -> None:
        self._plugin = plugin
        self._requests = requests
        self._seed = seed
        self._traces = traces
        self._twins: dict[tuple[str, str, float], _Twin] = {}

    def score(self, case: Case) -> Score:
        """Return the score of this one run."""
        return Score.of(case.name, self.counts(case))

    def counts(self, case: Case) -> Counts:
        """Return the counts of this one run.

        Raises what the simulation raises: ``ValueError``, ``OSError``.
        """
        settings = case.settings(self._requests, self._seed, self._traces)
        twin = self._twin(case, settings)
        faults = case.faults(twin.plans)
        if not faults:
            healthy = [Known(truth, None, None, "") for truth in twin.truths]
            return judge(healthy, "", twin.found)
        flights = Simulation(settings.scenario, twin.plans, self._seed, faults).run()
        rows, vllm = self._report(settings.scenario, flights, faults)
        request_rows = by_request(rows)
        run = []
        for well, flight in zip(twin.truths, flights, strict=True):
            truth = record(settings.scenario, flight)
            run.append(Known(truth, excess(well, truth), request_rows.get(truth.request_id), vllm.get(truth.request_id, "")))
        return judge(run, faults[0].place, twin.found)

    def rows(self, case: Case) -> dict[str, RequestRow]:
        """Return the rows of the case's requests, by the client's id."""
        settings = case.settings(self._requests, self._seed, self._traces)
        twin = self._twin(case, settings)
        faults = case.faults(twin.plans)
        if not faults:
            return dict(by_request(twin.rows))
        flights = Simulation(settings.scenario, twin.plans, self._seed, faults).run()
        return dict(by_request(self._report(settings.scenario, flights, faults)[0]))

    def _twin(self, case: Case, settings: VirtualRunSettings) -> _Twin:
        key = (case.scenario, case.trace, case.rate)
        if key not in self._twins:
            plans = plan_requests(settings)
            flights = Simulation(settings.scenario, plans, self._seed).run()
            rows, _ = self._report(settings.scenario, flights, ())
            truths = [record(settings.scenario, flight) for flight in flights]
            self._twins[key] = _Twin(plans, truths, flights, rows, found_in(rows))
        return self._twins[key]

    def _report(
        self, scenario: Scenario, flights: Sequence[Flight], faults: Sequence[Fault]
    ) -> tuple[list[RequestRow], dict[str, str]]:
        """Return the rows, and the phases that vLLM alone would name."""
        made = arrivals(scenario, flights, faults, seed=self._seed, started_unix_ns=STARTED_UNIX_NS, plugin=self._plugin)
        rows = newest(rows_of((one.received_unix_ns, one.record) for one in made))
        return rows, baseline.named(one.record for one in made if isinstance(one.record, EngineRequest))
