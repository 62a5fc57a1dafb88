"""Run a simulation with and without its faults, and write the results.

Serves ``python -m handrail_sim.emulator simulate``. Both runs have the same seed and are in virtual time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.observe import clocks, observe
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight, Ran, Simulation, record
from handrail_sim.emulator.truth import Excess, RequestTruth, TrueOutcome, TruePhase, excess
from handrail_sim.emulator.workload import (
    Arrival,
    TraceError,
    WorkloadRequest,
    generate,
    plans,
    read_azure,
    read_mooncake,
    repeat,
)


class SimulationError(ValueError):
    """The run cannot be made.

    Its trace cannot be read, or a request fits into no engine.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRunSettings:
    """Settings of a run.

    ``trace``: arrivals and lengths from a file, ``rate`` times as fast; without it, the scenario's own.
    """

    scenario: Scenario
    requests: int
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    trace: Path | None = None
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """One request of a run: its truth, its excess and its flight.

    The excess is what the faults cost it; None in a run without faults.
    """

    truth: RequestTruth
    excess: Excess | None
    flight: Flight


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace: ``.csv`` in Azure's format, ``.jsonl`` in Mooncake's.

    Raises ``TraceError`` and ``OSError``.
    """
    readers: dict[str, Callable[[list[str]], list[Arrival]]] = {".csv": read_azure, ".jsonl": read_mooncake}
    reader = readers.get(path.suffix)
    if reader is None:
        raise TraceError(f"{path}: a trace ends in one of {', '.join(readers)}")
    try:
        return reader(path.read_text(encoding="utf-8").splitlines())
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def simulate(settings: VirtualRunSettings) -> list[VirtualRequest]:
    """Run the settings, and again without the faults if there are any.

    Raises ``SimulationError`` and ``OSError``.
    """
    healthy = fly(dataclasses.replace(settings, faults=())) if settings.faults else None
    return compared(settings.scenario, fly(settings), healthy)


def compared(scenario: Scenario, flights: Sequence[Flight], healthy: Sequence[Flight] | None) -> list[VirtualRequest]:
    """Return each request with its truth and its excess over the healthy run.

    ``healthy``: that run's flights; None where there were no faults.
    """
    truths = [record(scenario, flight) for flight in flights]
    if healthy is None:
        return [VirtualRequest(truth, None, flight) for truth, flight in zip(truths, flights, strict=True)]
    return [
        VirtualRequest(truth, excess(record(scenario, well), truth), flight)
        for well, truth, flight in zip(healthy, truths, flights, strict=True)
    ]


def fly(settings: VirtualRunSettings, progress: Callable[[int], None] | None = None) -> list[Flight]:
    """Run the settings once, without the twin run.

    ``progress``: gets now and then how many requests have ended. Raises ``SimulationError`` and ``OSError``.
    """
    return ran(settings, progress).flights


def ran(settings: VirtualRunSettings, progress: Callable[[int], None] | None = None) -> Ran:
    """Run as ``fly`` does, and also return what the hosts did."""
    try:
        return Simulation(settings.scenario, plan_requests(settings), settings.seed, settings.faults).ran(progress)
    except ValueError as error:
        raise SimulationError(str(error)) from None


def plan_requests(settings: VirtualRunSettings) -> list[WorkloadRequest]:
    """Plan the load: what each request asks, and of which hosts.

    Raises ``TraceError`` and ``OSError``.
    """
    if settings.trace is None:
        arrivals = generate(settings.scenario, settings.requests, settings.seed)
    else:
        arrivals = repeat(read_trace(settings.trace), settings.requests, settings.rate)
    return plans(settings.scenario, arrivals, settings.seed)


def lines(settings: VirtualRunSettings, virtual_requests: Sequence[VirtualRequest]) -> Iterator[str]:
    """Yield one JSON object a request: ``truth``, ``excess`` and ``observed``."""
    by_host = clocks(settings.scenario, settings.faults)
    for one in virtual_requests:
        statement = observe(settings.scenario, one.flight, settings.faults, by_host)
        yield json.dumps(
            {
                "truth": dataclasses.asdict(one.truth),
                "excess": dataclasses.asdict(one.excess) if one.excess else None,
                "observed": [{"source": type(item).__name__, **dataclasses.asdict(item)} for item in statement],
            }
        )


def summary(virtual_requests: Sequence[VirtualRequest]) -> dict[str, Any]:
    """Compute the figures of a run, in ms.

    They are TTFT, gaps and phases at p50 and p99, outcomes, and where the faults made requests slow.
    """
    ttft = [one.truth.ttft_ns for one in virtual_requests if one.truth.ttft_ns is not None]
    gaps = [gap_ns for one in virtual_requests for gap_ns in one.truth.gaps_ns]
    slow: dict[str, int] = {}
    for one in virtual_requests:
        cause, truth = one.excess, one.truth
        if cause is None or cause.ttft_ns is None or truth.ttft_ns is None or cause.phase is None:
            continue
        if cause.slow(truth.ttft_ns - cause.ttft_ns):
            name = f"{cause.phase.value} at {cause.place}"
            slow[name] = slow.get(name, 0) + 1
    return {
        "requests": len(virtual_requests),
        "outcomes": {outcome.value: sum(one.truth.outcome is outcome for one in virtual_requests) for outcome in TrueOutcome},
        "ttft_ms": _quantiles(ttft),
        "gap_ms": _quantiles(gaps),
        "phases_ms": {
            phase.value: _quantiles([one.truth.phases[phase] for one in virtual_requests if phase in one.truth.phases])
            for phase in TruePhase
        },
        "slow": dict(sorted(slow.items(), key=lambda item: -item[1])),
    }


def _quantiles(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] / 1e6, 3) for share in (50, 99)}
