"""Rollups under the store's promises.

A damaged rollup is made again, and no request counts twice with several versions.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from builders.store_rows import START_UNIX_NS
from doubles.damaged_parquet import DAMAGES, damage
from handrail_collector.explain.period.report import PeriodAnswer
from handrail_collector.rows import MERGED, RequestRow
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.layout import DAY_NS, HOUR_NS
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.queries.period import load_period
from handrail_collector.store.schema import Table
from harness.rollup_check import disagreement, exact_answer, first_answer, requests_in
from harness.store import ROWS, Kept

HOUR0 = (START_UNIX_NS // HOUR_NS + 1) * HOUR_NS
PERIOD = PeriodQuery(since_unix_ns=HOUR0 - HOUR_NS, until_unix_ns=HOUR0 + 4 * HOUR_NS)


def at(row: RequestRow, hour: int, version: int = 1, **changes: str) -> RequestRow:
    """Return the row at its place within another hour."""
    started = HOUR0 + hour * HOUR_NS + int(row.request_id, 16) % HOUR_NS
    return replace(row, started_unix_ns=started, version=version, **changes)  # type: ignore[arg-type]


class Growing:
    """A store that gets rows, and its first answer."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.offset = 0
        self._exact: PeriodAnswer | None = None

    def publish(self, *rows: RequestRow) -> None:
        self.kept.publisher.publish(self.offset, self.offset + 10, self.offset, [], rows)
        self.offset += 10
        self._exact = None

    def exact(self) -> PeriodAnswer:
        """Return the answer of the rows, which only a publish changes."""
        self._exact = self._exact or exact_answer(self.kept.reader, PERIOD)
        return self._exact

    def answers(self, requests: int, rolled_hours: int) -> bool:
        """Check that the first answer counts ``requests`` and rests on ``rolled_hours``.

        It must also agree with the rows.
        """
        first = first_answer(self.kept.reader, PERIOD)
        assert (requests_in(first), first.rolled_hours) == (requests, rolled_hours)
        assert disagreement(first, self.exact()) == ""
        return True


@pytest.fixture
def growing(store: Kept) -> Growing:
    return Growing(store)


@pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("restarted", [False, True], ids=["found_at_work", "found_at_a_start"])
def test_one_that_is_damaged_is_answered_by_rows_and_made_again(
    growing: Growing, how: Callable[[bytes], bytes | None], restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    growing.publish(*(at(row, 0) for row in ROWS))
    upkeep = growing.kept.upkeep(rollups=True)
    upkeep.run_pass()
    assert growing.answers(12, 1)
    (victim,) = growing.kept.files(Table.ROLLUPS)
    damage(growing.kept.root / victim.path, how)
    assert growing.answers(12, 0)
    if restarted:
        upkeep = growing.kept.upkeep(rollups=True)
    for _ in range(3):
        upkeep.run_pass()
    assert growing.answers(12, 1)
    assert victim not in growing.kept.files(Table.ROLLUPS)
    assert (upkeep.stats.rollups.damaged, upkeep.stats.rollups.made) == (1, 1 if restarted else 2)
    assert (upkeep.stats.failures, upkeep.stats.files_damaged) == (0, 0)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert victim.path in lines[0]
    assert "makes it again" in lines[0]


def test_a_failing_machine_costs_no_rollup(growing: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    growing.publish(*(at(row, 0) for row in ROWS))
    growing.kept.upkeep(rollups=True).run_pass()
    upkeep = growing.kept.upkeep(rollups=True)

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.ParquetFile", fails)
        upkeep.run_pass()
    assert (upkeep.stats.failures, upkeep.stats.rollups.damaged) == (1, 0)
    assert growing.answers(12, 1)


@pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_of_requests_waits_for_its_rollup_without_failing(
    growing: Growing, how: Callable[[bytes], bytes | None], caplog: pytest.LogCaptureFixture
) -> None:
    growing.publish(*(at(row, 0) for row in ROWS))
    growing.publish(*(at(row, 1, trace_id="ab" * 16) for row in ROWS))
    victim = growing.kept.files(Table.REQUESTS)[0]
    data = damage(growing.kept.root / victim.path, how)
    upkeep = growing.kept.upkeep(rollups=True)
    for _ in range(3):
        upkeep.run_pass()
    assert (upkeep.stats.failures, upkeep.stats.files_damaged, upkeep.stats.rollups.made) == (0, 1, 1)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    (growing.kept.root / victim.path).write_bytes(data)
    upkeep.run_pass()
    assert growing.answers(24, 2)


def test_a_rollup_answers_for_a_file_that_was_damaged_later(growing: Growing) -> None:
    growing.publish(*(at(row, 0) for row in ROWS))
    growing.kept.upkeep(rollups=True).run_pass()
    damage(growing.kept.root / growing.kept.files(Table.REQUESTS)[0].path, DAMAGES["other_bytes"])
    growing.kept.upkeep(rollups=True).run_pass()
    assert requests_in(first_answer(growing.kept.reader, PERIOD)) == 12
    with pytest.raises(StoreDamagedError):
        load_period(growing.kept.reader, PERIOD, fast=False)


@pytest.mark.parametrize("hour", [-1, 1, 3], ids=["an_earlier_hour", "the_next_hour", "a_later_hour"])
@pytest.mark.parametrize("scope", ["edge", MERGED], ids=["replaced", "withdrawn"])
def test_a_later_version_in_another_hour_counts_once(growing: Growing, hour: int, scope: str) -> None:
    left = 11 if scope == MERGED else 12
    growing.publish(*(at(row, 0) for row in ROWS))
    upkeep = growing.kept.upkeep(rollups=True)
    upkeep.run_pass()
    growing.publish(at(ROWS[3], hour, 2, scope=scope))
    assert growing.answers(left, 0), "before upkeep has seen it the hour goes by its rows"
    upkeep.run_pass()
    assert growing.answers(left, 2)
    assert upkeep.stats.rollups.rows_replaced == 1
    upkeep.run_pass()
    assert upkeep.stats.rollups.made == 3, "nothing is due any more"


def test_a_version_that_came_before_its_hour_was_rolled_counts_once(growing: Growing) -> None:
    growing.publish(*(at(row, 0) for row in ROWS))
    growing.publish(*(at(row, 2, 2) for row in ROWS[:3]), at(ROWS[3], 1, 2))
    growing.publish(at(ROWS[0], 1, 3))
    growing.kept.upkeep(rollups=True).run_pass()
    assert growing.answers(12, 3)


def test_an_open_hour_whose_requests_are_all_its_own_leaves_the_rollups_of_others(growing: Growing) -> None:
    growing.publish(*(at(row, 0) for row in ROWS[:8]))
    growing.kept.clock.unix_ns = HOUR0 + 2 * HOUR_NS
    growing.kept.upkeep(rollups=True).run_pass()
    growing.publish(*(at(row, 1) for row in ROWS[8:]))
    growing.publish(*(at(row, 1, 2) for row in ROWS[8:]))
    assert growing.answers(12, 1)


def test_an_hour_near_a_damaged_later_version_gets_its_rollup_when_that_can_be_read(growing: Growing) -> None:
    growing.publish(*(at(row, 0) for row in ROWS))
    growing.publish(at(ROWS[0], 1, 2))
    later = growing.kept.files(Table.REQUESTS)[1]
    data = damage(growing.kept.root / later.path, DAMAGES["cut"])
    upkeep = growing.kept.upkeep(rollups=True)
    upkeep.run_pass()
    assert growing.kept.files(Table.ROLLUPS) == []
    (growing.kept.root / later.path).write_bytes(data)
    upkeep.run_pass()
    assert growing.answers(12, 2)
    assert upkeep.stats.failures == 0


def test_the_rollup_of_a_damaged_file_leaves_when_one_of_its_rows_may_be_replaced(growing: Growing) -> None:
    growing.publish(*(at(row, 0) for row in ROWS))
    upkeep = growing.kept.upkeep(rollups=True)
    upkeep.run_pass()
    (rolled,) = growing.kept.files(Table.ROLLUPS)
    path = growing.kept.root / growing.kept.files(Table.REQUESTS)[0].path
    data = damage(path, DAMAGES["cut"])
    growing.publish(at(ROWS[0], 1, 2))
    upkeep.run_pass()
    assert rolled not in growing.kept.files(Table.ROLLUPS)
    path.write_bytes(data)
    upkeep.run_pass()
    assert growing.answers(12, 2)


@pytest.mark.parametrize(
    ("seed", "publishes"), [pytest.param(0, 5), *(pytest.param(seed, 12, marks=pytest.mark.eval) for seed in range(4))]
)
def test_rollups_answer_as_rows_do_in_any_order_of_publishes(growing: Growing, seed: int, publishes: int) -> None:
    rng = random.Random(seed)
    versions = dict.fromkeys(range(len(ROWS)), 0)
    growing.kept.clock.unix_ns = HOUR0 + 2 * HOUR_NS
    upkeep = growing.kept.upkeep(rollups=True, grace_ns=0)
    for _ in range(publishes):
        rows = []
        for number in rng.sample(sorted(versions), 3):
            versions[number] += 1
            scope = MERGED if versions[number] > 1 and rng.random() < 0.2 else "edge"
            rows.append(at(ROWS[number], rng.randrange(4), versions[number], scope=scope))
        growing.publish(*rows)
        if rng.random() < 0.5:
            upkeep.run_pass()
            growing.kept.clock.unix_ns += HOUR_NS // 2
        assert disagreement(first_answer(growing.kept.reader, PERIOD), growing.exact()) == ""
    growing.kept.clock.unix_ns += DAY_NS
    upkeep.run_pass()
    first = first_answer(growing.kept.reader, PERIOD)
    assert first.rolled_hours == len(growing.kept.files(Table.REQUESTS)) > 1
    assert disagreement(first, exact_answer(growing.kept.reader, PERIOD)) == ""
    assert upkeep.stats.failures == 0
