"""The referee on short runs of fixed seeds: faults, clocks and wrong answers."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.stalls.scenes import SCENES
from bench.truth import baseline, judge, report
from bench.truth.cases import CASES, Case
from bench.truth.judge import Counts, Known, Score
from bench.truth.run import Referee
from handrail_collector.rows import PhaseRow, RequestRow
from handrail_sim.emulator import truth
from handrail_sim.emulator.faults import FAULTS

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def referee() -> Referee:
    return Referee(1200, seed=1)


@pytest.fixture(scope="module")
def small_referee() -> Referee:
    return Referee(200, seed=3)


def test_the_right_phase_and_host_are_named_in_a_small_fleet(small_referee: Referee) -> None:
    score = small_referee.score(BY_NAME["slow_prefill"])
    assert score.slow >= 20
    assert score.phase_right == score.host_right == score.outcome_right == 1
    assert score.misnamed == score.false_findings == 0


@pytest.mark.eval
@pytest.mark.parametrize("name", ["slow_prefill", "bad_host_p", "router_slow", "slow_link", "no_p2p", "preemption_storm"])
def test_the_right_phase_and_host_are_named(referee: Referee, name: str) -> None:
    score = referee.score(BY_NAME[name])
    assert score.slow >= 20
    assert score.phase_right is not None
    assert score.phase_right >= 0.9
    assert score.host_right is not None
    assert score.host_right >= 0.9
    assert score.misnamed is not None
    assert score.misnamed <= 0.02
    assert score.outcome_right == 1
    assert score.kv_outcome_wrong == 0
    assert score.false_findings <= 0.01


@pytest.mark.eval
def test_what_spans_cannot_reveal_is_never_named(referee: Referee) -> None:
    score = referee.score(BY_NAME["slow_link"])
    assert (score.named, score.misnamed) == (0, 0)
    assert score.baseline_phase_right == 0


@pytest.mark.eval
@pytest.mark.parametrize("clock", ["clock_offset:edge:2", "clock_offset:p0:2", "clock_offset:d0:-2", "clock_offset:*:-2"])
def test_clocks_two_seconds_off_change_no_phase(referee: Referee, clock: str) -> None:
    fault = "slow_link:p0>d1:30"
    healthy, wrong = referee.rows(Case(name="right", fault=fault)), referee.rows(Case(name="off", fault=fault, clocks=(clock,)))
    assert len(wrong) == 1200
    assert {name: row.phases for name, row in wrong.items()} == {name: row.phases for name, row in healthy.items()}


@pytest.mark.eval
def test_failed_and_hung_requests_have_the_right_outcome(referee: Referee) -> None:
    assert referee.score(BY_NAME["fetch_failed"]).outcome_right == 1
    assert referee.score(BY_NAME["kv_pressure_hung"]).outcome_right == 1


def test_every_fault_and_trace_has_a_case() -> None:
    played = {text.partition(":")[0] for case in CASES for text in (case.fault, *case.clocks)}
    of_gaps = {"gpu_throttled", "host_pause", "client_slow"}  # tests/bench/stalls judges these
    of_processes = {"engine_hung"}  # make test-oncall judges this one: its requests are not slow, they are open
    assert set(FAULTS) - of_gaps - of_processes <= played
    assert of_gaps <= {fault.name for scene in SCENES for fault in scene.setting.faults}
    assert {case.trace for case in CASES if not case.fault} >= {"AzureLLMInferenceTrace_conv", "mooncake_conversation"}


def test_a_score_as_json_has_these_keys_and_no_others(small_referee: Referee) -> None:
    assert list(json.loads(json.dumps(small_referee.score(BY_NAME["slow_prefill"]).plain()))) == [
        "scenario",
        "requests",
        "slow",
        "phase_right",
        "host_right",
        "outcome_right",
        "misnamed",
        "false_findings",
        "baseline_phase_right",
    ]


# --- the judge itself: answers that are changed must be judged otherwise ---------------------------------------------------


@pytest.fixture(scope="module")
def played(small_referee: Referee) -> list[Known]:
    kept: list[list[Known]] = []
    original = judge.judge

    def keep(run: list[Known], place: str, false: int) -> Counts:
        kept.append(run)
        return original(run, place, false)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.truth.run.judge", keep)
        small_referee.score(BY_NAME["slow_prefill"])
    return kept[0]


def swapped(row: RequestRow) -> RequestRow:
    """Return an answer that swaps compute and first step."""
    other = {"prefill_compute": "first_step", "first_step": "prefill_compute"}
    return replace(row, phases=tuple(replace(p, phase=other.get(p.phase, p.phase)) for p in row.phases))


def elsewhere(row: RequestRow) -> RequestRow:
    return replace(row, prefill_host={"p0": "p1", "p1": "p0"}[row.prefill_host or ""])


def hidden(row: RequestRow) -> RequestRow:
    def one(p: PhaseRow) -> PhaseRow:
        return replace(p, phase="unattributed", may_be=("prefill_compute", "prefill_queue")) if p.process == "prefill" else p

    return replace(row, phases=tuple(map(one, row.phases)))


WRONG: list[tuple[str, Callable[[RequestRow], RequestRow], Callable[[Score], bool]]] = [
    ("phases swapped", swapped, lambda score: (score.misnamed or 0) > 0.4),
    ("hosts swapped", elsewhere, lambda score: score.host_right == 0),
    ("outcomes wrong", lambda row: replace(row, outcome="stream_error"), lambda score: score.outcome_right == 0),
    ("KV outcome wrong", lambda row: replace(row, kv_outcome="expired"), lambda score: score.kv_outcome_wrong == 1),
    ("all hidden", hidden, lambda score: score.named == 0 and score.misnamed == 0 and score.phase_right == 0),
]


@pytest.mark.parametrize(("name", "change", "judged"), WRONG, ids=[name for name, *_ in WRONG])
def test_a_wrong_answer_is_judged_wrong(
    played: list[Known], name: str, change: Callable[[RequestRow], RequestRow], judged: Callable[[Score], bool]
) -> None:
    wrong = [replace(known, row=change(known.row)) if known.row is not None else known for known in played]
    assert judged(Score.of(name, judge.judge(wrong, "elsewhere", 0)))


def test_a_request_without_a_row_is_not_right(played: list[Known]) -> None:
    score = Score.of("silence", judge.judge([replace(known, row=None) for known in played], "p0", 0))
    assert (score.phase_right, score.host_right, score.outcome_right, score.open) == (0, 0, 0, 1)


def test_a_missed_goal_is_reported(played: list[Known]) -> None:
    wrong = [replace(known, row=swapped(known.row)) if known.row is not None else known for known in played]
    lines = report.missed([Score.of("wrong", judge.judge(wrong, "p0", 0))])
    assert [line.split(":")[1].split()[0] for line in lines] == ["misnamed", "phase", "host"]
    assert report.missed([Score.of("right", judge.judge(played, "p0", 0))]) == []


def test_the_goal_for_phases_is_higher_with_the_plugin(played: list[Known]) -> None:
    score = replace(Score.of("right", judge.judge(played, "p0", 0)), phase_right=0.93)
    assert report.missed([score]) == []
    assert report.missed([score], plugin=True) == ["right: phase right 93.0%; the goal is at least 95%"]


def test_runs_are_counted_together(played: list[Known]) -> None:
    one, two = (Score.of("runs", judge.judge(part, "p0", 0)) for part in (played, [replace(k, row=None) for k in played]))
    both = Score.of("runs", judge.judge(played, "p0", 0) + judge.judge([replace(k, row=None) for k in played], "p0", 0))
    assert both.slow == one.slow + two.slow
    assert both.phase_right == pytest.approx((one.phase_right or 0) / 2, abs=1e-4)


@pytest.mark.eval
def test_vllm_alone_names_a_hidden_wait_a_queue(referee: Referee) -> None:
    score = referee.score(BY_NAME["slow_link"])
    assert score.baseline_misnamed == 1
    assert baseline.named([]) == {}


def test_the_truth_is_written_without_the_toolkit() -> None:
    tree = ast.parse(Path(truth.__file__).read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.partition(".")[0] == "handrail"]
