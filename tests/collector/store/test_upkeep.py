"""Compaction, retention and the quota.

Nothing is lost or seen twice, whatever stops them and whatever reads meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from builders.store_rows import START_UNIX_NS, request_rows
from doubles.failing_disk import StoppedError, StoppingFiles
from handrail_collector.rows import MERGED, RequestRow
from handrail_collector.store.layout import DAY_NS, HOUR_NS
from handrail_collector.store.maintenance import ClockStepGuard, Upkeep, UpkeepSettings
from handrail_collector.store.manifest import MANIFEST, ManifestReader, files_of
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.recovery import Recovered
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.spans import MAX_ATTRIBUTE_COLUMNS
from harness.store import EVERYTHING, LATER, ROWS, SPANS, Clock, Kept, publish_all


def test_an_hour_that_is_over_becomes_one_file_a_table_named_by_the_range_it_covers(store: Kept) -> None:
    publish_all(store.publisher)
    upkeep = store.upkeep(closed_after_ns=15)
    store.clock.unix_ns = (START_UNIX_NS // HOUR_NS + 1) * HOUR_NS + 14
    upkeep.run_pass()
    assert len(store.files(Table.REQUESTS)) == 4
    store.clock.unix_ns += 1
    upkeep.run_pass()
    for table in (Table.REQUESTS, Table.SPANS):
        (file,) = store.files(table)
        assert Path(file.path).name == f"{table.value}-000-{0:020d}-{400:020d}-c000.parquet"
    assert store.reader.requests(EVERYTHING) == ROWS
    assert (upkeep.stats.files_folded, upkeep.stats.rows_folded, upkeep.stats.failures) == (8, 0, 0)
    upkeep.run_pass()
    assert upkeep.stats.files_folded == 8


@pytest.mark.parametrize("years", [-56, 73], ids=["1970", "2099"])
def test_an_hour_of_another_age_is_folded_when_nothing_comes_to_it_any_more(store: Kept, years: int) -> None:
    rows = [replace(row, started_unix_ns=START_UNIX_NS + years * 365 * DAY_NS) for row in ROWS[:3]]
    store.clock.unix_ns = START_UNIX_NS
    for number, row in enumerate(rows):
        store.publisher.publish(10 * number, 10 * number + 10, 0, [], [row])
    store.clock.unix_ns += 2 * HOUR_NS
    store.upkeep(closed_after_ns=15).run_pass()
    assert [file.rows for file in store.files(Table.REQUESTS)] == [3]


def test_a_row_that_comes_late_is_folded_into_the_hour_again(store: Kept) -> None:
    publish_all(store.publisher)
    store.upkeep().run_pass()
    late = replace(ROWS[0], version=2, outcome="http_error")
    store.publisher.publish(400, 500, 400, [], [late])
    store.upkeep().run_pass()
    (file,) = store.files(Table.REQUESTS)
    assert file.path.endswith(f"{500:020d}-c000.parquet")
    assert file.rows == 12
    assert store.reader.requests(EVERYTHING) == [late, *ROWS[1:]]


def test_versions_withdrawn_rows_and_repeated_spans_are_folded(store: Kept) -> None:
    withdrawn = replace(ROWS[1], version=2, scope=MERGED, span_ids=(), joins=())
    store.publisher.publish(0, 10, 0, [replace(span, offset=1) for span in SPANS[:4]], ROWS[:3])
    store.publisher.publish(10, 20, 0, [replace(SPANS[0], offset=11, status=2)], [withdrawn, replace(ROWS[2], version=2)])
    upkeep = store.upkeep()
    upkeep.run_pass()
    (requests,), (spans,) = store.files(Table.REQUESTS), store.files(Table.SPANS)
    assert (requests.rows, spans.rows, upkeep.stats.rows_folded) == (2, 4, 4)
    assert store.reader.requests(EVERYTHING) == [ROWS[0], replace(ROWS[2], version=2)]
    stored = pq.ParquetFile(store.root / spans.path).read().to_pylist()
    assert [s["offset"] for s in stored if s["span_id"].hex() == SPANS[0].span_id] == [11]


def test_a_withdrawal_stays_until_the_last_row_that_it_withdraws_is_gone(store: Kept) -> None:
    """The row is in another hour, which is not over when the first one is compacted."""
    early = replace(ROWS[0], version=2, scope=MERGED, span_ids=(), joins=(), started_unix_ns=START_UNIX_NS - HOUR_NS)
    store.publisher.publish(0, 10, 0, [], [ROWS[0], replace(ROWS[1], started_unix_ns=START_UNIX_NS - HOUR_NS)])
    store.publisher.publish(10, 20, 0, [], [early])
    store.clock.unix_ns = START_UNIX_NS // HOUR_NS * HOUR_NS
    store.upkeep(closed_after_ns=0).run_pass()
    assert len(store.files(Table.REQUESTS)) == 2
    assert ROWS[0].request_id not in [row.request_id for row in store.reader.requests(EVERYTHING)]


def test_an_hour_of_withdrawn_rows_leaves_nothing(store: Kept) -> None:
    store.publisher.publish(0, 10, 0, [], ROWS[:1])
    store.publisher.publish(10, 20, 0, [], [replace(ROWS[0], version=2, scope=MERGED, span_ids=(), joins=())])
    store.upkeep(grace_ns=0).run_pass()
    assert store.on_disk() == []
    assert store.reader.requests(EVERYTHING) == []
    store.publisher.close()
    assert store.publisher.open() == Recovered(end_offset=20, low_water_offset=0, evidence={})
    assert not (store.root / "requests" / "day=2026-11-30").exists()
    store.publisher.publish(20, 30, 0, [], ROWS[:1])
    assert store.reader.requests(EVERYTHING) == ROWS[:1]


def test_files_stay_for_the_grace_time_and_over_a_restart(store: Kept) -> None:
    publish_all(store.publisher)
    before = store.on_disk()
    upkeep = store.upkeep(grace_ns=100)
    upkeep.run_pass()
    store.publisher.close()
    store.publisher.open()
    store.clock.unix_ns += 99
    upkeep.run_pass()
    assert set(store.on_disk()) > set(before)
    store.clock.unix_ns += 1
    upkeep.run_pass()
    assert len(store.on_disk()) == 2
    assert (upkeep.stats.files_removed, store.publisher.retired()) == (8, ())


def test_the_offsets_and_the_evidence_of_recent_rows_outlive_compaction(store: Kept) -> None:
    publish_all(store.publisher)
    store.publisher.publish(400, 450, 400, [], [])
    store.upkeep().run_pass()
    store.publisher.close()
    recovered = store.publisher.open()
    assert (recovered.end_offset, recovered.low_water_offset) == (450, 400)
    assert recovered.evidence == {}
    with pytest.raises(ValueError, match="out of order"):
        store.publisher.publish(400, 500, 400, [], [])


def test_only_rows_that_a_replay_may_make_again_are_evidence(store: Kept) -> None:
    for index, (first, end) in enumerate(pairwise((0, 40, 80, 120))):
        store.publisher.publish(first, end, max(0, first - 10), [], ROWS[index * 4 : index * 4 + 4])
    store.publisher.close()
    before = store.publisher.open()
    store.upkeep().run_pass()
    store.publisher.close()
    after = store.publisher.open()
    recent = ROWS[7:]
    assert after.evidence == {s: (r.trace_id, r.request_id, r.version) for r in recent for s in r.span_ids}
    assert after == before


def test_a_request_that_took_another_in_keeps_the_evidence_in_whatever_order_their_hours_are_folded(store: Kept) -> None:
    part = replace(ROWS[0], span_ids=("a" * 16,), joins=())
    whole = replace(ROWS[1], span_ids=("a" * 16, "b" * 16), joins=(), started_unix_ns=START_UNIX_NS - HOUR_NS)
    withdrawn = replace(part, version=2, scope=MERGED, span_ids=(), joins=())
    store.publisher.publish(0, 10, 0, [], [replace(ROWS[2], started_unix_ns=START_UNIX_NS - HOUR_NS)])
    store.publisher.publish(10, 20, 0, [], [part, whole, withdrawn])
    store.clock.unix_ns = START_UNIX_NS // HOUR_NS * HOUR_NS
    for _ in range(2):
        store.upkeep(closed_after_ns=0).run_pass()
        store.publisher.close()
        evidence = store.publisher.open().evidence
        assert evidence["a" * 16] == evidence["b" * 16] == (whole.trace_id, whole.request_id, 1)
        store.clock.unix_ns += HOUR_NS


def test_publishes_of_an_empty_range_are_not_named_like_what_is_retired(store: Kept) -> None:
    for row in ROWS[:3]:
        store.publisher.publish(7, 7, 0, [], [row])
    store.upkeep().run_pass()
    for row in ROWS[3:5]:
        store.publisher.close()
        store.publisher.open()
        store.publisher.publish(7, 7, 0, [], [row])
    store.upkeep(grace_ns=0).run_pass()
    store.upkeep(grace_ns=0).run_pass()
    assert store.reader.requests(EVERYTHING) == ROWS[:5]


def test_spans_of_more_attributes_than_a_file_may_have_become_several_files(store: Kept) -> None:
    for index in range(4):
        attributes = {f"peer.{index}.{number}": number for number in range(MAX_ATTRIBUTE_COLUMNS // 2)}
        span = replace(SPANS[index], offset=index, attributes=attributes)
        store.publisher.publish(index, index + 1, 0, [span], [])
    store.upkeep().run_pass()
    files = store.files(Table.SPANS)
    assert [file.rows for file in files] == [2, 2]
    for file in files:
        names = pq.read_schema(store.root / file.path).names
        assert sum(name.startswith("a.") for name in names) == MAX_ATTRIBUTE_COLUMNS


# --- retention and quota ---------------------------------------------------------------------------------------------------


def on_days(store: Kept, *days: int) -> list[RequestRow]:
    """Publish one row a day; the clock stays in the last one."""
    rows = [replace(row, started_unix_ns=START_UNIX_NS + day * DAY_NS) for row, day in zip(ROWS, days, strict=False)]
    for index, row in enumerate(rows):
        store.clock.unix_ns = row.started_unix_ns
        store.publisher.publish(index * 10, index * 10 + 10, 0, [], [row])
    return rows


def test_days_older_than_the_retention_leave_and_their_folders_go(store: Kept) -> None:
    rows = on_days(store, 0, 1, 2, 3)
    upkeep = store.upkeep(retention_ns=DAY_NS, grace_ns=0)
    upkeep.run_pass()
    assert store.reader.requests(EVERYTHING) == rows[2:]
    assert upkeep.stats.files_expired == upkeep.stats.files_removed == 2
    assert len(list((store.root / "requests").iterdir())) == 2


def test_what_a_host_with_a_wrong_clock_sent_is_as_old_as_its_writing(store: Kept) -> None:
    rows = [replace(ROWS[0], started_unix_ns=1), replace(ROWS[1], started_unix_ns=START_UNIX_NS + 9000 * DAY_NS)]
    store.clock.unix_ns = START_UNIX_NS
    store.publisher.publish(0, 10, 0, [], rows)
    upkeep = store.upkeep(retention_ns=10 * DAY_NS)
    for days, left in ((9, 2), (11, 0)):
        store.clock.unix_ns = START_UNIX_NS + days * DAY_NS
        upkeep.run_pass()
        assert len(store.reader.requests(EVERYTHING)) == left


def test_beyond_the_quota_the_oldest_days_go_with_a_warning_and_never_the_open_one(
    store: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    rows = on_days(store, 0, 1, 2, 3)
    size = sum(file.bytes for file in store.files(Table.REQUESTS))
    upkeep = store.upkeep(max_bytes=size * 3 // 5, grace_ns=0)
    with caplog.at_level(logging.WARNING):
        upkeep.run_pass()
    assert store.reader.requests(EVERYTHING) == rows[2:]
    assert (upkeep.stats.quota_days, upkeep.stats.files_removed) == (2, 2)
    assert upkeep.stats.bytes + upkeep.stats.quota_bytes == size
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "2026-11-30, 2026-12-01 left it" in caplog.text
    tiny = store.upkeep(max_bytes=1)
    tiny.run_pass()
    tiny.run_pass()
    assert store.reader.requests(EVERYTHING) == rows[3:]
    assert caplog.text.count("the current day alone") == 1


def test_a_step_of_the_wall_clock_costs_nothing_within_an_hour(store: Kept, caplog: pytest.LogCaptureFixture) -> None:
    """Retention waits after a step of the wall clock.

    The clock is ten years ahead and back after a while. After more than an hour ahead, retention follows the clock.
    """
    publish_all(store.publisher)
    monotonic = Clock(0)
    steady = ClockStepGuard(monotonic)
    upkeep = Upkeep(store.publisher, UpkeepSettings(retention_ns=3000 * HOUR_NS), store.clock, steady)

    def after(seconds: int, step_ns: int = 0) -> int:
        monotonic.unix_ns += seconds * 10**9
        store.clock.unix_ns += seconds * 10**9 + step_ns
        upkeep.run_pass()
        return upkeep.stats.files_expired

    ten_years = 3653 * DAY_NS
    assert [after(300), after(300, ten_years), after(3000), after(300, -ten_years), after(7200)] == [0] * 5
    assert [after(300, ten_years), after(3599)] == [0, 0]
    assert after(2) > 0
    steps = [record.message for record in caplog.records if "stepped" in record.message]
    assert steps == [
        f"the wall clock stepped by {sign}315619200 s: retention by age pauses for an hour" for sign in ("", "-", "")
    ]


WAYS_TO_LEAVE: dict[str, dict[str, int | None]] = {"retention": {"retention_ns": DAY_NS}, "quota": {"max_bytes": 40_000}}


@pytest.mark.parametrize("limit", WAYS_TO_LEAVE.values(), ids=WAYS_TO_LEAVE)
@pytest.mark.parametrize("scope", ["edge", MERGED], ids=["replaced", "withdrawn"])
@pytest.mark.parametrize("folded", [False, True], ids=["as_published", "folded"])
def test_a_day_that_leaves_brings_back_nothing_that_it_replaced(
    store: Kept, limit: dict[str, int | None], scope: str, folded: bool
) -> None:
    """The later version lies on the day before: evidence by another clock opened it."""
    day = START_UNIX_NS // DAY_NS * DAY_NS + DAY_NS
    store.clock.unix_ns = day
    early = replace(ROWS[0], started_unix_ns=day + HOUR_NS)
    stays = [replace(row, started_unix_ns=day + HOUR_NS + index) for index, row in enumerate(ROWS[1:4])]
    later = replace(early, version=2, scope=scope, started_unix_ns=day - HOUR_NS, outcome="http_error")
    store.publisher.publish(0, 10, 0, [], [early, *stays])
    store.publisher.publish(10, 20, 0, [], [later, *(replace(row, started_unix_ns=day - HOUR_NS) for row in ROWS[4:6])])
    if folded:
        store.publisher.publish(20, 30, 0, [], [replace(ROWS[6], started_unix_ns=day - HOUR_NS)])
        store.clock.unix_ns = day + 1
        store.upkeep(closed_after_ns=0).run_pass()
    store.clock.unix_ns = day + DAY_NS + HOUR_NS
    if "max_bytes" in limit:
        limit = {"max_bytes": sum(file.bytes for file in store.files(Table.REQUESTS)) - 1}
    upkeep = store.upkeep(**limit)
    upkeep.run_pass()
    assert upkeep.stats.failures == 0
    assert store.reader.requests(EVERYTHING) == stays
    assert store.reader.count(EVERYTHING) == len(stays)
    assert store.reader.find(early.request_id) == []
    (file,) = store.files(Table.REQUESTS)
    assert file.rows == len(stays)


# --- stops -----------------------------------------------------------------------------------------------------------------


def stored(root: Path) -> tuple[list[str], int]:
    """Return the request ids in order and the number of spans.

    They come from the files that the manifest names.
    """
    publishes = ManifestReader(root).publishes()
    ids = [
        request_id.hex()
        for file in files_of(publishes, Table.REQUESTS)
        for request_id in pq.ParquetFile(root / file.path).read(["request_id"])["request_id"].to_pylist()
    ]
    return sorted(ids), sum(pq.read_metadata(root / file.path).num_rows for file in files_of(publishes, Table.SPANS))


ENDS = (5, 100, 200, 300)
OLD = [replace(row, started_unix_ns=row.started_unix_ns - 40 * DAY_NS) for row in request_rows(3, seed=8)]


def scenario(root: Path, files: StoppingFiles, done: list[int]) -> None:
    """Run the publisher and maintenance once through everything that they do.

    Publish, compact, publish into the compacted hour, compact again, expire an old day, remove. ``done`` gets each publish's
    end.
    """
    clock = Clock()
    publisher = StorePublisher(root, files=files, now_unix_ns=clock)
    try:
        end = publisher.open().end_offset
        clock.unix_ns = OLD[0].started_unix_ns
        if end < 5:
            publisher.publish(0, 5, 0, [], OLD)
            done.append(5)
        clock.unix_ns = START_UNIX_NS + 30 * HOUR_NS
        upkeep = Upkeep(publisher, UpkeepSettings(grace_ns=50), clock)
        for index, (first, last) in enumerate(pairwise(ENDS)):
            if last > end:
                spans = [replace(span, offset=first + 1) for span in SPANS[index * 3 : index * 3 + 3]] if index < 2 else []
                publisher.publish(first, last, first, spans, ROWS[index * 3 : index * 3 + 3])
                done.append(last)
            if index:
                upkeep.run_pass()
                clock.unix_ns += 50
        Upkeep(publisher, UpkeepSettings(grace_ns=50, retention_ns=30 * DAY_NS), clock).run_pass()
        clock.unix_ns += 50
        upkeep.run_pass()
    finally:
        publisher.close()


WAYS = {"killed": (False, False), "power_lost": (True, True), "power_lost_names_kept": (True, False)}


@pytest.mark.timeout(1200)  # makes and reads a store for every operation
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.eval)], ids=["some", "all"])
@pytest.mark.parametrize(("power", "names"), WAYS.values(), ids=WAYS)
def test_a_stop_at_any_operation_loses_nothing_and_shows_nothing_twice(
    tmp_path: Path, power: bool, names: bool, every: int, record_property: Callable[[str, object], None]
) -> None:
    counted = StoppingFiles()
    scenario(tmp_path / "counted", counted, [])
    for stop_at in range(0, counted.operations, every):
        root = tmp_path / f"at{stop_at}"
        files, done = StoppingFiles(stop_at), [0]
        with pytest.raises(StoppedError):
            scenario(root, files, done)
        if power:
            files.lose_power(names)
        _check_recovery(root, done[-1], f"stopped at operation {stop_at} of {counted.operations}")
    points = len(range(0, counted.operations, every))
    print(f"{points} points of publish, compaction, retention and removal")
    record_property("crash_points", points)


def _check_recovery(root: Path, acknowledged: int, where: str) -> None:
    publisher = StorePublisher(root)
    end = publisher.open().end_offset
    assert end >= acknowledged, where
    publishes = (0, *ENDS).index(end)
    ids, spans = stored(root)
    kept = sorted(row.request_id for row in ROWS[: max(publishes - 1, 0) * 3])
    old = sorted(row.request_id for row in OLD)
    assert ids in (kept, sorted([*kept, *old])), where
    assert ids != kept or publishes == 4 or not publishes, where  # only retention, which comes last, removes the old day
    assert spans == min(max(publishes - 1, 0), 2) * 3, where
    listed = {file.path for publish in publisher.publishes() for file in publish.files}
    on_disk = {path.relative_to(root).as_posix() for path in root.rglob("*.parquet*")}
    assert on_disk - {retired.path for retired in publisher.retired()} == listed, where
    assert not (root / f"{MANIFEST}.tmp").exists(), where
    publisher.close()
    scenario(root, StoppingFiles(), [])
    assert stored(root) == (sorted(row.request_id for row in ROWS[:9]), 6), where


class FullDisk(StoppingFiles):
    """A disk that fails once, as when it is full, and works after.

    It fails at the ``fails_in``-th operation from when that is set.
    """

    fails_in = 0

    def _step(self) -> None:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise OSError(28, "No space left on device")


def test_what_a_full_disk_stopped_is_done_at_the_next_pass_and_leaves_nothing_behind(tmp_path: Path) -> None:
    fails_in, failures = 0, 1
    while failures:
        fails_in += 1
        root, files, clock = tmp_path / f"full{fails_in}", FullDisk(), Clock()
        publisher = StorePublisher(root, files=files, now_unix_ns=clock)
        publisher.open()
        publish_all(publisher)
        upkeep = Upkeep(publisher, UpkeepSettings(grace_ns=0), clock)
        files.fails_in = fails_in
        upkeep.run_pass()
        files.fails_in = 0
        failures = upkeep.stats.failures
        publisher.publish(400, 500, 300, [], request_rows(1, seed=4))
        for _ in range(2):
            upkeep.run_pass()
        publisher.close()
        assert (len(stored(root)[0]), stored(root)[1]) == (13, 12)
        assert len(list(root.rglob("*.parquet*"))) == 2
    assert fails_in > 30


# --- readers ---------------------------------------------------------------------------------------------------------------


def test_readers_see_every_row_once_while_hours_are_folded_again_and_again(store: Kept) -> None:
    """Readers see every row once while hours are compacted again and again.

    Publishing, compaction and removal go on, with a new version of every row each round, while two readers ask.
    Time goes on when every reader has answered since the last step. So a file is removed only once each reader has begun again
    since the file was retired.
    """
    store.publisher.publish(0, 1, 0, SPANS, ROWS)
    expected = [row.request_id for row in ROWS]
    stopping = threading.Event()
    wrong: list[object] = []
    answers = [0, 0]

    def read(which: int) -> None:
        reader = StoreReader(store.root, threads=1)
        try:
            while not stopping.is_set():
                rows = reader.requests(EVERYTHING)
                if [row.request_id for row in rows] != expected or reader.count(EVERYTHING) != len(expected):
                    wrong.append([(row.request_id, row.version) for row in rows])
                answers[which] += 1
        except Exception as error:
            wrong.append(error)
        finally:
            reader.close()

    readers = [threading.Thread(target=read, args=(which,)) for which in range(2)]
    for reader in readers:
        reader.start()
    upkeep = store.upkeep(grace_ns=2)
    rounds, ticks, at_tick = 0, 0, [0, 0]
    while (rounds < 40 or min(answers) < 20 or upkeep.stats.files_removed < 20) and not wrong:
        rounds += 1
        store.publisher.publish(rounds, rounds + 1, 0, [], [replace(row, version=1 + rounds) for row in ROWS])
        if all(now > before for now, before in zip(answers, at_tick, strict=True)):
            ticks, at_tick = ticks + 1, list(answers)
        store.clock.unix_ns = LATER + ticks
        upkeep.run_pass()
    stopping.set()
    for reader in readers:
        reader.join()
    print(f"{rounds} rounds, {sum(answers)} answers, {upkeep.stats.files_removed} files removed meanwhile")
    assert wrong == []
    assert upkeep.stats.failures == 0
