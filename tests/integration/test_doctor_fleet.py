"""``handrail doctor`` and the emulated fleet.

The tests use its engines over HTTP, and the published experiments' hand-offs as measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builders.doctor_facts import D, P, found, model, same_host, verdict
from builders.records import EPOCH
from builders.stitched import stitched
from doubles.doctor import NO_NVML
from fleet.running import MODEL, engine
from handrail_collector.api.schema import fetch_to_json, row_to_json
from handrail_doctor.checks.result import CheckStatus
from handrail_doctor.facts import DoctorOptions, Placement
from handrail_doctor.gather.collector import traffic
from handrail_doctor.gather.gather import Wanted, gather
from handrail_doctor.prediction import RateSource, predicted
from handrail_doctor.split_worth import CriterionSide, judged
from handrail_sim.emulator.scenario import load
from handrail_sim.emulator.simulate import Simulation
from handrail_sim.emulator.virtual_run import VirtualRunSettings, plan_requests
from handrail_sim.virtual.observers import arrivals


async def test_running_engines_are_looked_at(tmp_path: Path) -> None:
    async with engine("prefill") as (_, prefill), engine("decode") as (_, decode):
        wanted = Wanted(options=DoctorOptions(tokens=8000), urls={P: prefill, D: decode}, root=tmp_path, timeout_s=20.0)
        facts = await gather(wanted, NO_NVML.reader(), {})
    assert facts.placement is Placement.SAME_HOST
    for check in ("engine.prefill", "engine.decode", "pair.served", "pair.version", "engine.decode.telemetry"):
        assert verdict(facts, check) is CheckStatus.PASS, check
    served = found(facts, "pair.served")
    assert served is not None
    assert served.seen == MODEL
    revision = found(facts, "pair.revision")
    assert revision is not None
    assert (revision.verdict, revision.seen) == (CheckStatus.SKIP, "neither says")  # no running engine shows it


def seen(scenario_name: str, requests: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a run's requests and hand-offs as the collector's API lists them.

    The run is in virtual time.
    """
    scenario = load(scenario_name)
    flights = Simulation(scenario, plan_requests(VirtualRunSettings(scenario=scenario, requests=requests, seed=1)), 1).run()
    arrived = arrivals(scenario, flights, (), seed=1, started_unix_ns=EPOCH, plugin=True)
    all_reported = stitched([one.record for one in arrived])
    rows = [json.loads(json.dumps(row_to_json(row))) for row in all_reported.rows]
    return rows, [json.loads(json.dumps(fetch_to_json(fetch))) for fetch in all_reported.fetches]


@pytest.mark.parametrize(("scenario_name", "seconds"), [("l40s-split", 1.3), ("h100-70b-split", 0.0655)])
def test_hand_offs_that_were_measured_predict_the_next(scenario_name: str, seconds: float) -> None:
    """The prediction rests on no assumption.

    The rate is the median of what the emulated link carried, by its plugins' records.
    """
    requests, hand_offs = seen(scenario_name, 40)
    name, tokens = ("qwen2.5-7b", 8192) if scenario_name == "l40s-split" else ("llama-3.1-70b", 10_000)
    whole = same_host(
        options=DoctorOptions(tokens=tokens, ttft_ns=10**9), sizes=model(name), traffic=traffic(requests, hand_offs, "the run")
    )
    rate = predicted(whole)
    assert rate is not None
    assert rate.source is RateSource.MEASURED
    assert model(name).request(tokens).transfer_ns(rate.bytes_per_s) == pytest.approx(seconds * 1e9, rel=0.1)
    sides = {reason.criterion: reason.side for reason in judged(whole, rate).reasons}
    slow = scenario_name == "l40s-split"
    assert sides["interconnect"] is (CriterionSide.STAY if slow else CriterionSide.SPLIT)
    assert sides["time to first token"] is (CriterionSide.STAY if slow else CriterionSide.SPLIT)
    assert sides["prompts"] is CriterionSide.SPLIT
