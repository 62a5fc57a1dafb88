"""A sample of ``python -m tests.crash``, and proof that it detects faults.

``python -m tests.crash`` prints how many crash points there are. The eval tests take a larger sample and more faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from crash import faults
from crash.crashes import START, Crashes, Tally
from crash.recorded import JOURNAL, STORE, Recorded, Recorder
from crash.view import first_answer_of
from doubles.power_disk import Content, Disk, Operation
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries import period
from harness.store import ROWS, kept_store


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorder(tmp_path_factory.mktemp("life") / "recorded").run()


def test_the_life_comes_past_every_operation_and_its_readers_see_no_torn_state(recorded: Recorded) -> None:
    assert {point.name for point in recorded.points} == {*JOURNAL, *STORE}
    assert len(recorded.inside) > 300
    assert recorded.torn_reads() == []
    assert recorded.rolled > 5
    assert [len(view.rows) for view in recorded.views][-1] == 7


def test_no_crash_of_a_small_sample_loses_or_doubles_anything(recorded: Recorded, tmp_path: Path) -> None:
    crashes = Crashes(recorded, tmp_path, every=61, again=0)
    crashes.run()
    summed = total(crashes)
    assert summed.points > 5
    assert summed.messages == []
    assert (summed.lost, summed.twice, summed.torn, summed.wrong) == (0, 0, 0, 0)


@pytest.mark.eval
def test_no_crash_and_no_crash_of_the_start_after_it_loses_or_doubles_anything(
    recorded: Recorded, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    crashes = Crashes(recorded, tmp_path, every=31, again=40)
    crashes.run()
    summed = total(crashes)
    assert summed.messages == []
    assert (summed.lost, summed.twice, summed.torn, summed.wrong) == (0, 0, 0, 0)
    assert crashes.tallies[START].points > 10
    assert len(summed.ways) == 7
    record_property("crash_points", summed.points)


BROKEN: dict[str, tuple[Callable[[Operation], bool], str]] = {
    "journal_not_synced": (lambda o: o.kind == "sync" and o.path.startswith("journal"), "lost"),
    "journal_names_not_synced": (lambda o: o.kind == "sync_folder" and o.path.startswith("journal"), "lost"),
    "files_not_synced": (lambda o: o.kind == "sync" and ".parquet" in o.path, "torn"),
    "names_not_synced": (lambda o: o.kind == "sync_folder" and "hour=" in o.path, "torn"),
    "manifest_not_synced": (lambda o: o.kind == "sync" and o.path.endswith("jsonl"), "torn"),
}


@pytest.mark.parametrize(
    ("forgotten", "seen", "every"),
    [
        pytest.param(*BROKEN["journal_not_synced"], 61, id="journal_not_synced of some"),
        *(pytest.param(*case, 25, id=name, marks=pytest.mark.eval) for name, case in BROKEN.items()),
    ],
)
def test_a_sync_that_is_forgotten_is_seen(
    recorded: Recorded, tmp_path: Path, forgotten: Callable[[Operation], bool], seen: str, every: int
) -> None:
    points = [point for point in recorded.points if point.coming is None or not forgotten(point.coming)]
    crashes = Crashes(replace(recorded, points=points), tmp_path, every=every, again=0)
    crashes.run()
    assert getattr(total(crashes), seen) > 0


@pytest.mark.eval
def test_a_start_that_forgets_published_evidence_is_seen(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = StorePublisher.open
    monkeypatch.setattr(StorePublisher, "open", lambda publisher: replace(opened(publisher), evidence={}))
    crashes = Crashes(recorded, tmp_path, every=20, again=0)
    crashes.run()
    assert total(crashes).twice > 0


@pytest.mark.eval
def test_counting_again_what_is_replayed_is_seen(recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = StorePublisher.open
    monkeypatch.setattr(StorePublisher, "open", lambda publisher: replace(opened(publisher), rows={}, observed={}))
    crashes = Crashes(recorded, tmp_path, every=20, again=0)
    crashes.run()
    assert total(crashes).wrong > 0


@pytest.mark.parametrize(
    ("kind", "every", "points"),
    [
        pytest.param(faults.FAILED_SYNC, 60, 1, id="a failed sync of some"),
        pytest.param(faults.FAILED_SYNC, 25, 2, id="a failed sync", marks=pytest.mark.eval),
        pytest.param(faults.FULL, 40, 2, id="a full disk", marks=pytest.mark.eval),
    ],
)
def test_a_disk_that_fails_once_loses_nothing(recorded: Recorded, tmp_path: Path, kind: str, every: int, points: int) -> None:
    tally = faults.run(recorded, Crashes(recorded, tmp_path, again=0), tmp_path, every, (kind,))[kind]
    assert tally.messages == []
    assert tally.points >= points
    assert (tally.lost, tally.twice, tally.torn, tally.wrong) == (0, 0, 0, 0)


def test_a_first_answer_that_the_rows_do_not_give_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = kept_store(tmp_path / "store")
    store.publisher.publish(0, 10, 0, [], ROWS)
    store.upkeep(rollups=True).run_pass()
    store.publisher.publish(10, 20, 0, [], [replace(ROWS[0], version=2, started_unix_ns=ROWS[0].started_unix_ns + 2 * HOUR_NS)])
    store.publisher.close()
    assert first_answer_of(tmp_path / "store") == ""
    monkeypatch.setattr(period, "_outdated", lambda *_: set())
    assert "first answer" in first_answer_of(tmp_path / "store")


def total(crashes: Crashes) -> Tally:
    summed = Tally()
    for tally in crashes.tallies.values():
        summed.points += tally.points
        summed.ways += tally.ways
        summed.messages += tally.messages
        for name in ("lost", "twice", "torn", "wrong"):
            setattr(summed, name, getattr(summed, name) + getattr(tally, name))
    return summed


def made(*operations: Operation) -> Disk:
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    return disk


def bytes_by_name(disk: Disk) -> dict[str, bytes]:
    return {path: content.now for path, content in disk.names.items() if content is not None}


def test_a_disk_without_power_keeps_what_was_synced() -> None:
    disk = made(
        Operation("folder", "a"),
        Operation("sync_folder", "."),
        Operation("create", "a/f"),
        Operation("write", "a/f", b"one"),
        Operation("sync", "a/f"),
        Operation("sync_folder", "a"),
        Operation("write", "a/f", b"two"),
        Operation("create", "a/g"),
        Operation("rename", "a/f", target="a/h"),
    )
    left = {way: bytes_by_name(disk) for way, disk in disk.left_by(Operation("write", "a/g", b"3456"))}
    assert left["killed"] == {"a/h": b"onetwo", "a/g": b""}
    assert left["killed, torn write"] == {"a/h": b"onetwo", "a/g": b"34"}
    assert left["power lost, names too"] == {"a/f": b"one"}
    assert left["power lost, names kept"] == {"a/h": b"one", "a/g": b""}
    assert left["power lost, one name kept"] == {"a/h": b"one"}
    assert left["power lost, half its bytes"] == {"a/h": b"onet", "a/g": b"3"}
    assert left["power lost, zeros for its bytes"] == {"a/h": b"one\0\0\0", "a/g": b"\0\0"}


def test_bytes_whose_sync_failed_are_not_made_good_by_the_next_one() -> None:
    disk = made(
        Operation("create", "f"),
        Operation("sync_folder", "."),
        Operation("write", "f", b"one"),
        Operation("sync", "f"),
        Operation("write", "f", b"two"),
        Operation("failed_sync", "f"),
        Operation("write", "f", b"six"),
        Operation("sync", "f"),
    )
    assert disk.names["f"] != Content()
    assert bytes_by_name(dict(disk.left_by(None))["power lost, names too"]) == {"f": b"one\0\0\0six"}
    disk.apply(Operation("truncate", "f", size=3))
    disk.apply(Operation("write", "f", b"ten"))
    disk.apply(Operation("sync", "f"))
    assert bytes_by_name(dict(disk.left_by(None))["power lost, names too"]) == {"f": b"oneten"}


def test_a_copy_of_a_disk_goes_its_own_way() -> None:
    disk = made(Operation("create", "f"), Operation("write", "f", b"one"))
    twin = disk.copy()
    assert twin.key() == disk.key()
    for operation in (Operation("sync_folder", "."), Operation("sync", "f"), Operation("write", "f", b"two")):
        twin.apply(operation)
    assert bytes_by_name(dict(twin.left_by(None))["power lost, names too"]) == {"f": b"one"}
    assert bytes_by_name(disk) == {"f": b"one"}
    assert bytes_by_name(dict(disk.left_by(None))["power lost, names too"]) == {}
