"""A start with files that no line of the manifest names.

Good data stays, whatever happened to the manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from builders.store_rows import request_rows, spans_of_requests
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.layout import files_below
from handrail_collector.store.manifest import MANIFEST, StoreDamagedError
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.recovery import UNLISTED

ROWS = request_rows(30)


def made(root: Path, publishes: int = 10) -> dict[str, bytes]:
    """Return a store of so many publishes of three rows each, and its data files."""
    publisher = StorePublisher(root)
    publisher.open()
    for number in range(publishes):
        at = 10 * number
        publisher.publish(at, at + 10, at + 10, [], ROWS[3 * number : 3 * number + 3])
    publisher.close()
    return contents(root)


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.parquet*")}


def _flipped(at: int) -> Callable[[bytes], bytes]:
    """Turn one bit in the middle of line ``at``."""

    def flip(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        line = bytearray(lines[at])
        line[len(line) // 2] ^= 1
        lines[at] = bytes(line)
        return b"".join(lines)

    return flip


def _without_lines(*gone: int) -> Callable[[bytes], bytes]:
    def cut(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        return b"".join(line for number, line in enumerate(lines) if number - len(lines) not in gone)

    return cut


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "garbage": lambda data: b"garbage\n",
    "garbage_without_newline": lambda data: b"garbage",
    "zeros": lambda data: bytes(len(data)),
    "first_line_cut": lambda data: data[:20],
    "first_line": _flipped(0),
    "middle_line": _flipped(5),
    "last_line": _flipped(-1),
    "last_two_lines_gone": _without_lines(-1, -2),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("publishes", [1, 10])
def test_a_damaged_manifest_removes_nothing_and_is_refused(tmp_path: Path, damage: str, publishes: int) -> None:
    if publishes == 1 and damage in ("middle_line", "last_two_lines_gone"):
        publishes = 6
    files = made(tmp_path, publishes)
    manifest = tmp_path / MANIFEST
    left = DAMAGES[damage](manifest.read_bytes())
    manifest.unlink() if left is None else manifest.write_bytes(left)
    for _ in range(2):
        with pytest.raises(StoreDamagedError, match=r"manifest\.jsonl.*restore .* from a copy.* Handrail removed nothing"):
            StorePublisher(tmp_path).open()
    assert contents(tmp_path) == files
    assert (manifest.read_bytes() if manifest.exists() else None) == left


@pytest.mark.parametrize("damage", [each for each in DAMAGES if each != "last_two_lines_gone"])
def test_readers_say_that_the_manifest_is_damaged_and_not_that_nothing_is_stored(tmp_path: Path, damage: str) -> None:
    made(tmp_path)
    manifest = tmp_path / MANIFEST
    left = DAMAGES[damage](manifest.read_bytes())
    manifest.unlink() if left is None else manifest.write_bytes(left)
    reader = StoreReader(tmp_path)
    output = (
        "10 data files"
        if damage in ("missing", "empty", "garbage_without_newline", "zeros", "first_line_cut")
        else "line at byte"
    )
    with pytest.raises(StoreDamagedError, match=output):
        reader.requests(RequestFilter())
    reader.close()


def test_a_line_that_names_files_in_the_middle_and_is_gone_sets_them_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = made(tmp_path)
    manifest = tmp_path / MANIFEST
    manifest.write_bytes(_without_lines(-4)(manifest.read_bytes()))
    publisher = StorePublisher(tmp_path)
    with caplog.at_level(logging.WARNING):
        publisher.open()
    publisher.close()
    left = contents(tmp_path)
    (aside,) = (path for path in left if path.endswith(UNLISTED))
    assert left[aside] == files[aside.removesuffix(UNLISTED)]
    assert len(left) == 10
    assert publisher.unlisted_set_aside == 1
    assert aside.rpartition("/")[2] in caplog.text
    assert len(files_below(tmp_path)) == 9
    publisher.open()
    publisher.close()
    assert (contents(tmp_path), publisher.unlisted_set_aside) == (left, 1)


def test_what_is_set_aside_takes_no_other_files_place(tmp_path: Path) -> None:
    made(tmp_path, 2)
    listed = tmp_path / files_below(tmp_path)[0]
    strange = listed.with_name("mine.parquet")
    for text in (b"one", b"two", b"three"):
        strange.write_bytes(text)
        publisher = StorePublisher(tmp_path)
        publisher.open()
        publisher.close()
    assert {path.read_bytes() for path in listed.parent.glob(f"*{UNLISTED}")} == {b"one", b"two", b"three"}


def test_a_copy_that_no_one_reads_is_left_alone(tmp_path: Path) -> None:
    made(tmp_path, 1)
    listed = tmp_path / files_below(tmp_path)[0]
    for suffix in (".bak", ".damaged", UNLISTED):
        listed.with_name(f"{listed.name}{suffix}").write_bytes(b"kept")
    before = contents(tmp_path)
    publisher = StorePublisher(tmp_path)
    publisher.open()
    publisher.close()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99], ids=["nothing", "half", "all_but_the_end"])
@pytest.mark.parametrize("zeros", [False, True], ids=["cut", "zeros_within"])
def test_a_publish_whose_line_is_torn_was_never_there_and_leaves_nothing(tmp_path: Path, kept: float, zeros: bool) -> None:
    """Blocks that a power loss kept from the disk read as zeros.

    They also appear in front of the newline of a longer line.
    """
    publisher = StorePublisher(tmp_path)
    publisher.open()
    publisher.publish(0, 10, 10, [], ROWS[:3])
    whole = (tmp_path / MANIFEST).read_bytes()
    publisher.publish(10, 20, 20, spans_of_requests(3), ROWS[3:6])
    publisher.close()
    line = (tmp_path / MANIFEST).read_bytes()[len(whole) :]
    torn = line[: int(len(line) * kept)]
    if zeros:
        torn = torn.ljust(len(line) - 1, b"\0") + b"\n"
    (tmp_path / MANIFEST).write_bytes(whole + torn)
    publisher.open()
    publisher.close()
    assert (tmp_path / MANIFEST).read_bytes() == whole
    assert len(contents(tmp_path)) == 1
    assert publisher.unlisted_set_aside == 0


def test_a_start_that_is_refused_leaves_a_torn_end_of_the_manifest_too(tmp_path: Path) -> None:
    """A refused start leaves the torn end of the manifest in place.

    Lines are missing in front of it. The rest of the last line may help a person to restore them.
    """
    files = made(tmp_path)
    manifest = tmp_path / MANIFEST
    left = _without_lines(-1, -2)(manifest.read_bytes()) + manifest.read_bytes()[-300:-1]
    manifest.write_bytes(left)
    with pytest.raises(StoreDamagedError, match="Handrail removed nothing"):
        StorePublisher(tmp_path).open()
    assert (manifest.read_bytes(), contents(tmp_path)) == (left, files)
