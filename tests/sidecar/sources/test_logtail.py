"""Follow a file: rotation, truncation, partial lines, positions."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.failing_files import KINDS, NAMES, failure
from handrail_sidecar.sources.log_tail import LONGEST_LINE, FileTail, LineSplitter, Position, TailSettings, TailStats

_FROM_START = TailSettings(from_start=True, idle_polls=2)


def drained(tail: FileTail, polls: int = 6) -> list[str]:
    return [line for _ in range(polls) for line in tail.poll()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_what_was_there_is_old_and_what_comes_is_read(path: Path) -> None:
    append(path, "old\nhalf of a")
    tail = FileTail(path, TailSettings())
    assert drained(tail) == []
    append(path, " line\nnew\npart")
    assert drained(tail) == ["new"], "the line that was begun before is not read in half"
    append(path, "ial\n")
    assert drained(tail) == ["partial"]


def test_a_file_that_comes_later_is_read_from_its_beginning(path: Path) -> None:
    tail = FileTail(path, TailSettings())
    assert drained(tail) == []
    append(path, "first\n")
    assert drained(tail) == ["first"]


def test_rename_and_create_loses_nothing(path: Path) -> None:
    tail = FileTail(path, _FROM_START)
    append(path, "a\n")
    assert drained(tail) == ["a"]
    append(path, "b\n")
    path.rename(path.with_suffix(".log.1"))
    append(path, "d\n")
    assert tail.poll() == ["b"]
    append(path.with_suffix(".log.1"), "c, by a writer that has not reopened yet\nlast")
    assert drained(tail) == ["c, by a writer that has not reopened yet", "last", "d"]
    assert tail.stats.rotations == 1


def test_renamed_and_not_there_again_yet(path: Path) -> None:
    tail = FileTail(path, _FROM_START)
    append(path, "a\n")
    drained(tail)
    path.rename(path.with_suffix(".1"))
    assert drained(tail) == []
    append(path, "b\n")
    assert drained(tail) == ["b"]


def test_copy_and_truncate(path: Path) -> None:
    tail = FileTail(path, _FROM_START)
    append(path, "a\nb\n")
    assert drained(tail) == ["a", "b"]
    os.truncate(path, 0)
    append(path, "c\n")
    assert drained(tail) == ["c"]
    assert tail.stats.truncations == 1


def test_truncated_and_already_longer_again(path: Path) -> None:
    tail = FileTail(path, _FROM_START)
    append(path, "a\n")
    assert drained(tail) == ["a"]
    os.truncate(path, 0)
    append(path, "longer than before\nb\n")
    assert drained(tail) == ["longer than before", "b"]


def test_a_writer_without_append_leaves_a_hole(path: Path) -> None:
    tail = FileTail(path, _FROM_START)
    with path.open("wb", buffering=0) as file:
        file.write(b"a\n")
        assert drained(tail) == ["a"]
        os.truncate(path, 0)
        assert drained(tail) == []
        file.write(b"b\n")  # at its old offset: two NULs come before
    assert drained(tail) == ["b"]


def test_position_goes_on_where_it_was(path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "positions" / "x.position"
    tail = FileTail(path, _FROM_START)
    append(path, "a\nb\nunfin")
    drained(tail)
    assert tail.position is not None
    tail.position.save(saved)
    tail.close()
    append(path, "ished\nc\n")
    assert drained(FileTail(path, TailSettings(), Position.load(saved))) == ["unfinished", "c"]


def test_position_in_a_file_that_was_renamed_meanwhile(path: Path) -> None:
    tail = FileTail(path, _FROM_START)
    append(path, "a\n")
    drained(tail)
    position = tail.position
    tail.close()
    append(path, "b\n")
    path.rename(path.with_name("engine.log.1"))
    append(path, "c\n")
    again = FileTail(path, TailSettings(idle_polls=2), position)
    assert drained(again) == ["b", "c"]


def test_position_of_a_file_that_is_gone_means_all_is_new(path: Path) -> None:
    append(path, "a\n")
    assert drained(FileTail(path, TailSettings(), Position(1, 2, 30, "0", 1))) == ["a"]


@pytest.mark.parametrize("text", ["", "{", '{"device": "x"}', "[]"], ids=["empty", "cut", "words", "list"])
def test_a_damaged_position_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_text(text)
    assert Position.load(tmp_path / "p") is None


def test_too_far_behind_the_middle_is_skipped(path: Path) -> None:
    append(path, "".join(f"line {number}\n" for number in range(1000)))
    tail = FileTail(path, TailSettings(from_start=True, most_bytes=100, most_behind_bytes=500))
    lines = drained(tail, 20)
    assert lines[-1] == "line 999"
    assert all(line.startswith("line ") for line in lines)
    assert tail.stats.skipped_bytes == path.stat().st_size - 100


def test_an_unreadable_file_is_counted_and_tried_again(path: Path, tmp_path: Path) -> None:
    path.mkdir()
    tail = FileTail(path, TailSettings())
    assert drained(tail, 2) == []
    assert tail.stats.errors == 2
    path.rmdir()
    append(path, "a\n")
    assert drained(tail) == ["a"]


def test_fifty_tails_leave_no_descriptor(path: Path) -> None:
    append(path, "a\n")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        tail = FileTail(path, _FROM_START)
        tail.poll()
        tail.close()
        tail.close()
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.lists(st.text(alphabet="ab\x00é", max_size=8), max_size=20), st.integers(1, 7))
def test_lines_do_not_depend_on_how_bytes_come(lines: list[str], step: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    splitter = LineSplitter(TailStats())
    found = [line for at in range(0, len(data), step) for line in splitter.feed(data[at : at + step])]
    assert found == [line.replace("\0", "") for line in lines]


def test_an_endless_line_is_cut_once_and_the_next_is_whole() -> None:
    stats = TailStats()
    splitter = LineSplitter(stats)
    found = [line for _ in range(40) for line in splitter.feed(b"x" * 10_000)]
    found += splitter.feed(b"\nnext\n")
    assert [len(line) for line in found] == [LONGEST_LINE, 4]
    assert (stats.long_lines, splitter.pending_bytes) == (1, 0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_failed_read_goes_on_where_it_was(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """One read fails, then openings fail: no descriptor is left for a while."""
    tail = FileTail(path, _FROM_START)
    append(path, "first\nbegun")
    assert drained(tail) == ["first"]
    append(path, " and ended\n")
    real = {name: getattr(os, name) for name in ("pread", "open")}

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in real:
        monkeypatch.setattr(os, name, fail)
    assert drained(tail) == []
    monkeypatch.setattr(os, "pread", real["pread"])
    assert drained(tail) == []
    monkeypatch.setattr(os, "open", real["open"])
    append(path, "new\n")
    assert drained(tail) == ["begun and ended", "new"]
    assert tail.stats.errors > 1
    tail.close()


def test_failed_first_opening_is_as_if_it_had_not_been_tried(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, "old\n")
    tail, real = FileTail(path, TailSettings()), os.open

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    assert drained(tail) == []
    monkeypatch.setattr(os, "open", real)
    assert drained(tail) == [], "what was there at start is not read"
    append(path, "new\n")
    assert drained(tail) == ["new"]
    tail.close()


@pytest.mark.parametrize("code", KINDS, ids=NAMES)
@pytest.mark.parametrize("call", ["open", "pread"])
@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept-position"])
def test_a_file_that_is_unreadable_for_a_while_continues_at_its_last_position(
    path: Path, call: str, code: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(path, "old\n" * 100)
    saved = None
    if kept:
        earlier = FileTail(path, TailSettings())
        assert drained(earlier) == []
        saved = earlier.position
        earlier.close()
    tail = FileTail(path, TailSettings(), saved)
    for number in range(3):
        if number:
            append(path, f"new {number}\n")
        with monkeypatch.context() as patched:
            patched.setattr(os, call, _raising(code))
            found = drained(tail, 3)
        if number == 0 and code == errno.ENOENT and call == "open" and not kept:
            return  # it counts as a file that comes later
        assert found + tail.poll() == ([f"new {number}"] if number else [])
    tail.close()
    assert tail.stats.rotations == tail.stats.truncations == 0


def _raising(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise failure(code)

    return fail
