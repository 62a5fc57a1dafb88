"""From stores to a comparison: scopes, runs, hand-off cost, incomparable arms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.gaps import gap_fields, gaps_of
from builders.request_rows import MS, STARTED, phase, request_row, spread
from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.compare.comparison import Arm, CompareError, compare
from handrail_collector.compare.figures import measure
from handrail_collector.compare.load import StorePeriod, read_sample
from handrail_collector.compare.report import Comparison, Estimate, SloTargets, from_plain, to_plain
from handrail_collector.compare.ttft_breakdown import losses
from handrail_collector.rows import PhaseRow, RequestRow
from handrail_collector.store.publish import StorePublisher

S = 1000 * MS
GOAL = SloTargets()


def rows(
    count: int,
    *,
    split: bool,
    seed: int = 1,
    ttft_ms: float = 100.0,
    gap_ms: float = 20.0,
    extra: tuple[PhaseRow, ...] = (),
    **more_ms: float,
) -> list[RequestRow]:
    """Return rows of streams with eleven chunks, two requests a second.

    ``more_ms``: added to each duration of ``spread``.
    """
    rng = random.Random(seed)
    made = []
    for number in range(count):
        wait = rng.expovariate(1 / 20)
        at_p = {"compute": ttft_ms} | more_ms | {"queue": wait + more_ms.get("queue", 0)}
        phases = spread(**at_p) if split else (phase("prefill_compute", ttft_ms + wait, "decode", "otlp"),)
        phases = (*phases, *extra)
        gaps = GapSketch()
        gaps.extend([round(gap_ms * MS * rng.uniform(0.9, 1.1)) for _ in range(10)])
        decode = f"10.0.0.{2 + number % 2}:8200"
        more = {} if split else {"prefill_instance": None, "prefill_host": None, "kv_outcome": None, "decode_instance": decode}
        row = request_row(
            phases,
            request_id=f"{seed:08x}{number:08x}",
            client_request_id=f"r-{seed}-{number}",
            request_key=f"r-{seed}-{number}",
            response_id=None,
            started_unix_ns=STARTED + int((number + rng.random()) * S / 2),
            gap_count=10,
            **gap_fields(gaps),
            gap_p99_ns=gaps.quantile(0.99),
            gap_max_ns=gaps.max_ns,
            output_tokens=11,
            **more,
        )
        made.append(row)
    return made


def stored(folder: Path, made: Sequence[RequestRow]) -> StorePeriod:
    publisher = StorePublisher(folder)
    publisher.open()
    publisher.publish(0, 10, 10, [], made)
    publisher.close()
    return StorePeriod(root=folder, where=folder.name)


@pytest.fixture
def arms(tmp_path: Path) -> list[Arm]:
    plain = stored(tmp_path / "plain", rows(600, split=False, seed=1, gap_ms=80))
    split = stored(tmp_path / "split", rows(600, split=True, seed=2))
    return [Arm(name="plain", stretches=(plain,)), Arm(name="split", stretches=(split,))]


def test_figures_are_those_of_the_rows(tmp_path: Path) -> None:
    made = rows(600, split=True)
    found = compare([Arm(name=name, stretches=(stored(tmp_path / name, made),)) for name in "ab"], GOAL).arms[0]
    ttft = sorted(row.ttft_token_ns or 0 for row in made)
    assert found.figures["ttft_p50_ns"].value == ttft[299]
    assert found.figures["ttft_p90_ns"].value == ttft[539]
    merged = GapSketch()
    for row in made:
        merged.merge(gaps_of(row))
    assert found.gaps == merged.count == 6000
    assert found.figures["gap_p99_ns"].value == pytest.approx(merged.quantile(0.99), rel=1e-9)
    assert found.figures["per_token_ns"].value == pytest.approx(merged.sum_ns / 6000)
    assert sum(each.value or 0 for each in found.phases_ns.values()) == pytest.approx(np.mean(ttft))
    assert found.rate == pytest.approx(599 / ((max(r.started_unix_ns for r in made) - STARTED) / S), rel=0.01)


def test_equal_arms_do_not_differ_at_all(tmp_path: Path) -> None:
    made = rows(400, split=True)
    found = compare([Arm(name=name, stretches=(stored(tmp_path / name, made),)) for name in "ab"], GOAL)
    assert [change.difference.value for change in found.pairs[0].changes] == [0] * 7
    assert found.word == "no difference"


def test_a_split_that_pays(arms: list[Arm]) -> None:
    found = compare(arms, GOAL)
    assert found.headline == "split pays: ITL tail fixed, TTFT longer but within its objective"
    assert [(arm.layout, arm.gpus, arm.scope) for arm in found.arms] == [("collocated", 2, "edge"), ("split", 2, "edge")]


def test_the_hand_off_is_bounded_where_no_transfer_was_measured(arms: list[Arm]) -> None:
    plain, split = compare(arms, GOAL).arms
    assert plain.handoff is None
    assert split.handoff is not None
    assert split.handoff.measured == 0
    assert split.handoff.at_least_ns.value == 0
    assert split.handoff.at_most_ns.value == pytest.approx(21 * MS)  # the unattributed time at D
    assert split.handoff.at_most_per_1000_tokens_ns.value == pytest.approx(21 * MS / 1.204)
    assert split.handoff.between_ns.value == pytest.approx(6.2 * MS)  # not a part of it


def test_the_hand_off_is_exact_where_it_was_measured(tmp_path: Path, arms: list[Arm]) -> None:
    kv = (phase("kv_wait", 3, "decode"), phase("kv_transfer", 40, "decode"), phase("prefill_compute", 60, "prefill"))
    made = [
        request_row((*kv, phase("unattributed", 5, "prefill")), request_id=f"{n:016x}", started_unix_ns=STARTED + n * S)
        for n in range(300)
    ]
    measured = Arm(name="measured", stretches=(stored(tmp_path / "m", made),))
    handoff = compare([arms[0], measured], GOAL).arms[1].handoff
    assert handoff is not None
    assert handoff.measured == 1
    assert handoff.at_least_ns == handoff.at_most_ns
    assert handoff.at_most_ns.value == 43 * MS


@pytest.mark.parametrize(
    ("more", "where"),
    [
        pytest.param({"hops": 1500}, "between the processes (router and network)", id="router"),
        pytest.param({"hidden": 1500}, "in the hand-off", id="unattributed-at-d"),
        pytest.param({"extra": (phase("kv_transfer", 1500, "decode"),)}, "in the hand-off", id="kv-phases"),
        pytest.param({"queue": 1500}, "in the prefill queue", id="prefill-queue"),
        pytest.param({"ttft_ms": 1600}, "in prefill", id="prefill-compute"),
        pytest.param({"extra": (phase("decode_queue", 1500, "decode"),)}, "in D's queue", id="decode-queue"),
        pytest.param({"first_step": 1500}, "in D's first step", id="first-step"),
        pytest.param({"extra": (phase("unattributed", 1500, "path"),)}, "in unattributed time", id="unattributed-between"),
        pytest.param({"extra": (phase("unattributed", 1500, "prefill"),)}, "in unattributed time", id="at-p"),
        pytest.param({"hops": 700, "queue": 700, "hidden": 700}, "", id="everywhere"),
    ],
)
def test_a_ttft_is_lost_where_its_phases_say(more: dict[str, Any], where: str, tmp_path: Path) -> None:
    plain, split = (
        Arm(name=name, stretches=(stored(tmp_path / name, made),))
        for name, made in (("plain", rows(300, split=False)), ("split", rows(300, split=True, seed=3, **more)))
    )
    found = compare([plain, split], GOAL)
    assert found.word == "split does not pay"
    assert found.pairs[0].short[1] == f"TTFT lost {where}".rstrip()
    (reason,) = (reason for reason in found.pairs[0].reasons if "in the mean TTFT" in reason)
    assert f"{where} " in reason
    assert "in the hand-off" in reason


def test_the_places_of_a_loss_add_up_to_it(tmp_path: Path) -> None:
    goal = SloTargets()
    plain, split = (
        read_sample([stored(tmp_path / name, made)], "edge", None)
        for name, made in (("p", rows(400, split=False)), ("s", rows(400, split=True, hops=90, hidden=300, queue=50)))
    )
    lost = losses(measure(plain, goal, 1), measure(split, goal, 2))
    assert lost.all_ns.value == pytest.approx(np.nanmean(split.ttft_ns) - np.nanmean(plain.ttft_ns))
    assert sum(each.more_ns.value or 0.0 for each in lost.places) == pytest.approx(lost.all_ns.value)


def test_a_loss_is_put_nowhere_where_few_phases_are_known(tmp_path: Path) -> None:
    made = [
        row if at % 3 == 0 else replace(row, phases=(), phase_of="")
        for at, row in enumerate(rows(300, split=True, seed=3, hidden=1500))
    ]
    stores = {"plain": rows(300, split=False), "split": made}
    found = compare([Arm(name=name, stretches=(stored(tmp_path / name, each),)) for name, each in stores.items()], GOAL)
    assert found.word == "split does not pay"
    assert found.pairs[0].short[1] == "TTFT lost"


def test_unattributed_time_at_p_is_not_the_hand_off(tmp_path: Path) -> None:
    made = [
        request_row((phase("unattributed", 50, "prefill"), phase("first_step", 9, "decode")), request_id=f"{n:016x}")
        for n in range(3)
    ]
    sample = read_sample([stored(tmp_path / "p", made)], "edge", None)
    assert sample.handoff.requests.sum() == 3
    assert sample.handoff.hidden_ns.sum() == 0


def test_several_runs_make_one_arm_with_a_level_each(tmp_path: Path, arms: list[Arm]) -> None:
    slow = [replace(row, started_unix_ns=STARTED + (row.started_unix_ns - STARTED) * 4) for row in rows(600, split=True, seed=5)]
    both = Arm(name="both", stretches=(*arms[1].stretches, stored(tmp_path / "slow", slow)))
    found = compare([arms[0], both], GOAL).arms[1]
    assert [round(level.rate, 1) for level in found.goodput.levels] == [0.5, 2.0]
    assert found.requests == 1200
    assert found.where == ("split", "slow")


def test_a_period_takes_part_of_a_run(tmp_path: Path) -> None:
    stretch = stored(tmp_path / "run", rows(600, split=True))
    half = replace(stretch, until_unix_ns=STARTED + 150 * S)
    rest = replace(stretch, since_unix_ns=STARTED + 150 * S)
    found = compare([Arm(name="before", stretches=(half,)), Arm(name="after", stretches=(rest,))], GOAL)
    assert [arm.requests for arm in found.arms] == [300, 300]
    assert found.arms[0].end_unix_ns < STARTED + 150 * S <= found.arms[1].begin_unix_ns


def test_scopes_never_mix(tmp_path: Path, arms: list[Arm]) -> None:
    mixed = [replace(row, scope="decode" if at % 2 else "edge") for at, row in enumerate(rows(600, split=True, seed=7))]
    found = compare([arms[0], Arm(name="mixed", stretches=(stored(tmp_path / "x", mixed),))], GOAL).arms[1]
    assert (found.scope, found.requests) == ("edge", 300)
    assert "omitted, because scopes never mix: 300 of scope decode" in found.notes
    only = Arm(name="only", stretches=(stored(tmp_path / "y", [replace(row, scope="decode") for row in mixed]),))
    with pytest.raises(CompareError, match="the arms share no scope"):
        compare([arms[0], only], GOAL)
    with pytest.raises(CompareError, match="no requests of scope decode in every arm"):
        compare(arms, GOAL, scope="decode")


def test_an_arm_without_requests_is_an_error(arms: list[Arm]) -> None:
    empty = Arm(name="later", stretches=(replace(arms[0].stretches[0], since_unix_ns=STARTED + 10**6 * S),))
    with pytest.raises(CompareError, match="later: no request began in that time"):
        compare([arms[0], empty], GOAL)
    with pytest.raises(CompareError, match="no request of model 'other'"):
        compare(arms, GOAL, model="other")


def test_a_handful_of_requests_gives_values_without_intervals(tmp_path: Path) -> None:
    few = [
        Arm(name=name, stretches=(stored(tmp_path / name, rows(count, split=True, seed=count)),))
        for name, count in (("a", 1), ("b", 3))
    ]
    found = compare(few, GOAL)
    assert found.word == "cannot tell"
    assert found.arms[0].figures["ttft_p50_ns"].low is None
    assert found.arms[0].goodput.levels == ()


def test_the_report_survives_json(arms: list[Arm]) -> None:
    import json

    found = compare(arms, GOAL)
    assert from_plain(Comparison, json.loads(json.dumps(to_plain(found), allow_nan=False))) == found


@pytest.mark.parametrize("plain", [{}, [], {"value": "7", "low": None, "high": None}, None])
def test_what_is_no_report_is_refused(plain: object) -> None:
    with pytest.raises(ValueError, match="not understood as Estimate"):
        from_plain(Estimate, plain)
