"""The log tap on real files and pipes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import pytest

from builders.records import process
from handrail.records import LineClock, LogFact, LogKind, Role
from handrail_sidecar.engine_logs.aggregate import FoldSettings
from handrail_sidecar.sources.engine_log import LogSettings, LogSource
from handrail_sidecar.sources.log_tail import TailSettings

S = 10**9
_NOW = int(datetime(2026, 11, 29, 10, 0, 5, tzinfo=timezone.utc).timestamp()) * S
_EXPIRED = (
    "(EngineCore pid=1) WARNING 11-29 {at} [b.py:1] Releasing expired KV blocks for request {rid} which were retrieved by 0 "
    "remote worker(s) before lease expired.\n"
)


def expired(rid: str, at: str = "10:00:00") -> str:
    return _EXPIRED.format(rid=rid, at=at)


@dataclass
class Taker:
    """A consumer that takes facts, or refuses while ``full``."""

    facts: list[LogFact] = field(default_factory=list)
    full: bool = False
    called: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, facts: Sequence[LogFact]) -> bool:
        self.called.set()
        if self.full:
            return False
        self.facts += facts
        return True

    async def until(self, met: Callable[[], bool]) -> None:
        await asyncio.wait_for(self._until(met), 60)

    async def _until(self, met: Callable[[], bool]) -> None:
        while not met():
            self.called.clear()
            await self.called.wait()

    @property
    def requests(self) -> list[str | None]:
        return [fact.request_id for fact in self.facts if not fact.revision]


def source(taker: Taker, *paths: Path | str, positions: Path | None = None, from_start: bool = False) -> LogSource:
    return LogSource(
        LogSettings(
            paths=tuple(map(str, paths)),
            tail=TailSettings(from_start=from_start, idle_polls=2),
            fold=FoldSettings(),
            positions=positions,
            interval_s=0.005,
            zone=timezone.utc,
        ),
        process(Role.PREFILL),
        taker,
        now_unix_ns=lambda: _NOW,
    )


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


async def test_lines_become_facts_and_the_rest_is_nothing(tmp_path: Path) -> None:
    path, taker = tmp_path / "log", Taker()
    append(path, expired("old"))
    tap = source(taker, path)
    await tap.start()
    append(path, "INFO 11-29 10:00:00 [x.py:1] hello\n" + expired("a") + expired("b"))
    await taker.until(lambda: len(taker.facts) == 2)
    await tap.shutdown(30)
    await tap.shutdown(30)
    assert taker.requests == ["a", "b"]
    assert {fact.clock for fact in taker.facts} == {LineClock.LINE}
    assert tap.tail_stats[0][1].lines == 3


async def test_a_time_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    path, taker = tmp_path / "log", Taker()
    tap = source(taker, path)
    await tap.start()
    append(path, expired("a", at="09:00:00"))  # an hour off: another time zone
    await taker.until(lambda: len(taker.facts) == 1)
    await tap.shutdown(30)
    assert (taker.facts[0].clock, taker.facts[0].at_unix_ns) == (LineClock.RECEIPT, _NOW)
    assert tap.stats.clocks_disagree == 1


@pytest.mark.parametrize("year", ["1970-01-01", "2099-12-31"])
@pytest.mark.parametrize("written_ns", [_NOW - 3600 * S, _NOW + 73 * 365 * 86_400 * S], ids=["an hour ago", "ahead"])
async def test_a_time_of_another_age_is_not_believed_of_what_lay_there_either(tmp_path: Path, year: str, written_ns: int) -> None:
    path, taker = tmp_path / "log", Taker()
    append(path, f"{year}T10:00:00Z WARN a.b: Sync batch data transfer timeout\n" + expired("a", at="07:00:00"))
    os.utime(path, ns=(written_ns, written_ns))
    tap = source(taker, path, from_start=True)
    await tap.start()
    await tap.shutdown(30)
    assert [fact.clock for fact in taker.facts] == [LineClock.RECEIPT, LineClock.LINE]
    assert [fact.at_unix_ns for fact in taker.facts] == [min(written_ns, _NOW), _NOW - 5 * S - 3 * 3600 * S]
    assert tap.stats.clocks_disagree == 1


async def test_what_lay_there_keeps_its_own_time(tmp_path: Path) -> None:
    path, taker = tmp_path / "log", Taker()
    append(path, expired("a", at="07:00:00"))
    tap = source(taker, path, from_start=True)
    await tap.start()
    await tap.shutdown(30)
    assert taker.facts[0].clock is LineClock.LINE


async def test_a_restart_neither_repeats_nor_loses(tmp_path: Path) -> None:
    path, first, second = tmp_path / "log", Taker(), Taker()
    tap = source(first, path, positions=tmp_path / "positions", from_start=True)
    append(path, expired("a"))
    await tap.start()
    await tap.shutdown(30)
    append(path, expired("b"))
    path.rename(tmp_path / "log.1")
    append(path, expired("c"))
    tap = source(second, path, positions=tmp_path / "positions", from_start=True)
    await tap.start()
    await second.until(lambda: len(second.facts) == 2)
    await tap.shutdown(30)
    assert (first.requests, second.requests) == (["a"], ["b", "c"])


async def test_what_was_not_taken_over_is_read_again_under_the_same_id(tmp_path: Path) -> None:
    path, full, later = tmp_path / "log", Taker(full=True), Taker()
    append(path, expired("a"))
    tap = source(full, path, positions=tmp_path / "positions", from_start=True)
    await tap.start()
    await full.until(lambda: True)
    await tap.shutdown(1)
    tap = source(later, path, positions=tmp_path / "positions", from_start=True)
    await tap.start()
    await tap.shutdown(30)
    assert later.requests == ["a"]


async def test_facts_wait_while_they_are_not_taken(tmp_path: Path) -> None:
    path, taker = tmp_path / "log", Taker(full=True)
    append(path, expired("a"))
    tap = source(taker, path, from_start=True)
    await tap.start()
    taker.full = False
    await taker.until(lambda: len(taker.facts) == 1)
    await tap.shutdown(30)
    assert taker.requests == ["a"]


async def test_a_named_pipe_outlives_its_writers(tmp_path: Path) -> None:
    path, taker = tmp_path / "pipe", Taker()
    os.mkfifo(path)
    tap = source(taker, path)
    await tap.start()
    append(path, expired("a"))
    await taker.until(lambda: len(taker.facts) == 1)
    append(path, expired("b") + expired("c").rstrip("\n"))
    await taker.until(lambda: len(taker.facts) == 2)
    await tap.shutdown(30)
    assert taker.requests == ["a", "b", "c"]


async def test_a_pipe_whose_facts_are_not_taken_stops_being_read(tmp_path: Path) -> None:
    path, taker = tmp_path / "pipe", Taker()
    os.mkfifo(path)
    tap = source(taker, path)
    await tap.start()
    noise = "INFO 11-29 10:00:00 [x.py:1] nothing to see\n" * 20_000
    await asyncio.to_thread(append, path, noise + expired("a"))
    await taker.until(lambda: len(taker.facts) == 1)
    await tap.shutdown(30)
    assert tap.tail_stats[0][1].lines == 20_001


@pytest.mark.parametrize("redirected", [False, True], ids=["pipe", "file"])
async def test_standard_input(redirected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Taker()
    text = expired("a") + expired("b").rstrip("\n")
    if redirected:
        append(tmp_path / "given", text)
        end = os.open(tmp_path / "given", os.O_RDONLY)
    else:
        end, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
    with os.fdopen(end) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        tap = source(taker, "-")
        await tap.start()
        await taker.until(lambda: len(taker.facts) == 1)
        await tap.shutdown(30)
    assert taker.requests == ["a", "b"]


async def test_facts_of_two_files_of_one_engine_are_one(tmp_path: Path) -> None:
    taker = Taker()
    tap = source(taker, tmp_path / "rank0", tmp_path / "rank1", from_start=True)
    for name in ("rank0", "rank1"):
        append(tmp_path / name, expired("a"))
    await tap.start()
    await tap.shutdown(30)
    assert [(fact.kind, fact.lines) for fact in taker.facts] == [(LogKind.EXPIRED, 2)]


async def test_fifty_starts_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, expired("a"))
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        tap = source(Taker(), path, tmp_path / "pipe")
        await tap.start()
        await tap.shutdown(30)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("text", ["\x00\xff{", '{"message": 5}', "(" * 5000, "[" * 5000, '{"log":"' + "{" * 3000], ids=range(5))
async def test_no_line_ends_the_reading(text: str, tmp_path: Path) -> None:
    path, taker = tmp_path / "log", Taker()
    path.write_bytes(text.encode("latin-1") + b"\n")
    append(path, expired("a"))
    tap = source(taker, path, from_start=True)
    await tap.start()
    await tap.shutdown(30)
    assert (taker.requests, tap.stats.faults) == (["a"], 0)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, working_folder(path.parent):
        made.bind(path.name)  # a path below /tmp/pytest-of-... may be too long for a socket


@contextlib.contextmanager
def working_folder(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("become", [_pipe, _endless_device, _folder, _socket])
@pytest.mark.parametrize("first", [True, False], ids=["at first", "later"])
async def test_a_log_that_is_no_file_holds_nothing(
    tmp_path: Path, become: Callable[[Path], None], first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A log that is no file blocks neither the loop nor the shutdown.

    Other logs are still read, and so is a file that takes its name.
    """
    caplog.set_level(logging.INFO)
    path, other, taker = tmp_path / "log", tmp_path / "other", Taker()
    append(path, expired("a"))
    append(other, "")
    tap = source(taker, path, other, from_start=True)
    if first:
        path.unlink()
        become(path)
    await tap.start()
    if not first:
        await taker.until(lambda: len(taker.facts) == 1)
        path.rename(tmp_path / "log.1")
        become(path)
    await until(lambda: any("does not read it" in record.getMessage() for record in caplog.records))
    append(other, expired("b"))
    await taker.until(lambda: "b" in taker.requests)
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()
    append(path, expired("c"))
    await taker.until(lambda: "c" in taker.requests)
    await tap.shutdown(30)
    assert taker.requests == (["b", "c"] if first else ["a", "b", "c"])
    assert tap.tail_stats[0][1].errors >= 1


async def test_the_end_does_not_wait_for_a_log_that_became_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, expired("a"))
    tap = source(Taker(), path, positions=tmp_path / "positions")
    await tap.start()
    path.unlink()
    os.mkfifo(path)
    await tap.shutdown(30)
    again = source(Taker(), path, positions=tmp_path / "positions")
    await again.start()
    await again.shutdown(30)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
async def test_standard_input_may_be_a_device(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager gives ``/dev/null``, on which no event loop can wait."""
    taker, path = Taker(), tmp_path / "log"
    with os.fdopen(os.open(device, os.O_RDONLY)) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        tap = source(taker, "-", path, from_start=True)
        await tap.start()
        append(path, expired("a"))
        await taker.until(lambda: taker.requests == ["a"])
        await tap.shutdown(30)


async def test_a_named_pipe_that_was_replaced_before_the_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    tap = source(Taker(), path)
    path.unlink()
    path.symlink_to("/dev/zero")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no longer a named pipe"):
        await tap.start()
    assert len(os.listdir("/proc/self/fd")) == before


async def until(met: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not met():  # noqa: ASYNC110 - a log line has no event to wait for
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 60)
