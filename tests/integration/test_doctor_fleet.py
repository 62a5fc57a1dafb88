"""``handrail doctor`` and the emulated fleet: its engines over HTTP, and the published experiments' hand-offs as measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builders import EPOCH
from doctor_doubles import NO_NVML
from doctor_facts import D, P, found, model, same_host, verdict
from fleet.running import MODEL, engine
from handrail.cli.simulated import arrivals
from handrail.doctor.facts import Asked
from handrail.doctor.gather import Wanted, gather
from handrail.doctor.observed import traffic
from handrail.doctor.pair import Placement
from handrail.doctor.predict import RateSource, predicted
from handrail.doctor.verdict import Verdict
from handrail.doctor.worth import Side, judged
from handrail_collector.api.json import fetch_to_json, row_to_json
from handrail_fleet.scenario import load
from handrail_fleet.simulate import Simulation
from handrail_fleet.virtual import Settings, asked
from joined import told


async def test_running_engines_are_looked_at(tmp_path: Path) -> None:
    async with engine("prefill") as (_, prefill), engine("decode") as (_, decode):
        wanted = Wanted(asked=Asked(tokens=8000), urls={P: prefill, D: decode}, root=tmp_path, timeout_s=20.0)
        facts = await gather(wanted, NO_NVML.reader(), {})
    assert facts.placement is Placement.SAME_HOST
    for check in ("engine.prefill", "engine.decode", "pair.served", "pair.version", "engine.decode.telemetry"):
        assert verdict(facts, check) is Verdict.PASS, check
    served = found(facts, "pair.served")
    assert served is not None
    assert served.seen == MODEL
    revision = found(facts, "pair.revision")
    assert revision is not None
    assert (revision.verdict, revision.seen) == (Verdict.SKIP, "neither says")  # no running engine tells it


def seen(scenario_name: str, requests: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Requests and hand-offs of a run in virtual time, as the collector's API lists them."""
    scenario = load(scenario_name)
    flights = Simulation(scenario, asked(Settings(scenario=scenario, requests=requests, seed=1)), 1).run()
    arrived = arrivals(scenario, flights, (), seed=1, started_unix_ns=EPOCH, plugin=True)
    all_said = told([one.record for one in arrived])
    rows = [json.loads(json.dumps(row_to_json(row))) for row in all_said.rows]
    return rows, [json.loads(json.dumps(fetch_to_json(fetch))) for fetch in all_said.fetches]


@pytest.mark.parametrize(("scenario_name", "seconds"), [("l40s-split", 1.3), ("h100-70b-split", 0.0655)])
def test_hand_offs_that_were_measured_predict_the_next(scenario_name: str, seconds: float) -> None:
    """No assumption is in it: the rate is the median of what the emulated link carried, by what its plugins said."""
    requests, hand_offs = seen(scenario_name, 40)
    name, tokens = ("qwen2.5-7b", 8192) if scenario_name == "l40s-split" else ("llama-3.1-70b", 10_000)
    whole = same_host(
        asked=Asked(tokens=tokens, ttft_ns=10**9), sizes=model(name), traffic=traffic(requests, hand_offs, "the run")
    )
    rate = predicted(whole)
    assert rate is not None
    assert rate.source is RateSource.MEASURED
    assert model(name).request(tokens).transfer_ns(rate.bytes_per_s) == pytest.approx(seconds * 1e9, rel=0.1)
    sides = {reason.criterion: reason.side for reason in judged(whole, rate).reasons}
    slow = scenario_name == "l40s-split"
    assert sides["interconnect"] is (Side.STAY if slow else Side.SPLIT)
    assert sides["time to first token"] is (Side.STAY if slow else Side.SPLIT)
    assert sides["prompts"] is Side.SPLIT
