"""Values read from several files: replaced as a whole when the files change.

The old value stays when the new content is unusable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from doubles.otlp import until
from handrail.security.file_reload import MOST_BYTES, Contents, ReloadingFile, Watcher
from harness.certs import replace, turn_link


def pair(contents: Contents) -> tuple[bytes, bytes]:
    """Return two files; they match when their first bytes are equal."""
    one, two = contents["t.one"], contents["t.two"]
    if one[:1] != two[:1]:
        raise ValueError("t.one: does not belong to t.two")
    return one, two


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {"t.one": tmp_path / "one", "t.two": tmp_path / "two"}
    for path in found.values():
        replace(path, b"a1")
    return found


def watched(files: dict[str, Path], secrets: frozenset[str] = frozenset()) -> ReloadingFile[tuple[bytes, bytes]]:
    return ReloadingFile("pair", files, pair, secrets=secrets)


def test_nothing_changes_while_the_files_do_not(files: dict[str, Path]) -> None:
    found = watched(files)
    assert found.value == (b"a1", b"a1")
    replace(files["t.one"], b"a1")  # rewritten with the same content
    assert [found.poll() for _ in range(3)] == [False] * 3
    assert found.reloads == 0


def test_a_change_is_taken_over_whole(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    found = watched(files)
    replace(files["t.one"], b"b1")
    assert not found.poll()  # the two do not match: one of them will follow
    assert found.value == (b"a1", b"a1")
    replace(files["t.two"], b"b1")
    with caplog.at_level(logging.INFO):
        assert found.poll()
    assert found.value == (b"b1", b"b1")
    assert (found.reloads, found.refusals, found.refused) == (1, 0, "")
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_unusable_files_keep_the_former_value_and_are_logged_once(
    files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    found = watched(files)
    replace(files["t.one"], b"x")
    assert [found.poll() for _ in range(5)] == [False] * 5
    assert found.value == (b"a1", b"a1")
    assert (found.reloads, found.refusals) == (0, 1)
    assert "does not belong" in found.refused
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "the previous content stays in use: t.one: does not belong to t.two" in record.getMessage()
    replace(files["t.two"], b"x")
    assert found.poll()
    assert found.refused == ""


def test_going_back_ends_it(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    found = watched(files)
    replace(files["t.one"], b"x")
    found.poll(), found.poll()
    replace(files["t.one"], b"a1")
    with caplog.at_level(logging.INFO):
        assert not found.poll()
    assert found.refused == ""
    assert "is usable again" in caplog.text


def test_another_fault_is_logged_too(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    found = watched(files)
    replace(files["t.one"], b"x")
    found.poll(), found.poll()
    files["t.one"].unlink()
    found.poll(), found.poll()
    assert [record.getMessage().partition("use: ")[2] for record in caplog.records] == [
        "t.one: does not belong to t.two",
        f"t.one: {files['t.one']} cannot be read: No such file or directory",
    ]
    assert found.refusals == 2


def test_a_link_that_is_turned_to_another_folder(tmp_path: Path) -> None:
    for name, content in (("v1", b"a"), ("v2", b"b")):
        (tmp_path / name).mkdir()
        for file in ("one", "two"):
            (tmp_path / name / file).write_bytes(content)
    turn_link(tmp_path / "..data", tmp_path / "v1")
    for file in ("one", "two"):
        (tmp_path / file).symlink_to(f"..data/{file}")
    found = watched({"t.one": tmp_path / "one", "t.two": tmp_path / "two"})
    turn_link(tmp_path / "..data", tmp_path / "v2")
    assert found.poll()
    assert found.value == (b"b", b"b")


def test_files_that_change_while_they_are_used_are_looked_at_again(files: dict[str, Path]) -> None:
    following = {b"b": b"c"}

    def slow(contents: Contents) -> bytes:
        if contents["t.one"] in following:
            replace(files["t.one"], following[contents["t.one"]])
        return contents["t.one"]

    found = ReloadingFile("slow", {"t.one": files["t.one"]}, slow)
    replace(files["t.one"], b"b")
    assert not found.poll()  # "b" was replaced before it was in use
    assert found.value == b"a1"
    assert found.poll()
    assert found.value == b"c"


@pytest.mark.parametrize("what", ["absent", "folder", "pipe", "huge"])
def test_what_is_no_readable_file(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)  # the pipe has no writer: reading it would wait for ever
    elif what == "huge":
        with path.open("wb") as file:
            file.truncate(MOST_BYTES + 1)
    words = {"absent": "No such file", "folder": "is not a file", "pipe": "is not a file", "huge": "is larger than 4 MiB"}
    with pytest.raises((OSError, ValueError), match=words[what]) as caught:
        ReloadingFile("x", {"t.x": path}, lambda contents: contents["t.x"])
    assert str(caught.value).startswith(f"t.x: {path}")


READ = """
import sys
from pathlib import Path
from handrail.security.file_reload import ReloadingFile
try:
    ReloadingFile("x", {"t.x": Path(sys.argv[1])}, lambda contents: contents["t.x"])
except OSError as error:
    print(error)
"""
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")  # root reads any file, but for these


def test_a_file_that_this_user_may_not_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    path.chmod(0)
    command = (*(WITHOUT_RIGHTS if os.access(path, os.R_OK) else ()), sys.executable, "-c", READ, str(path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"t.x: {path} cannot be read: Permission denied\n"


def test_a_secret_that_everyone_can_read_is_warned_of_once(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    files["t.one"].chmod(0o644)
    files["t.two"].chmod(0o644)
    found = watched(files, frozenset({"t.two"}))
    found.poll()
    (record,) = caplog.records
    assert record.getMessage() == f"t.two: {files['t.two']} can be read by everyone on this host: chmod o-rwx {files['t.two']}"
    files["t.two"].chmod(0o640)
    found.poll()
    assert len(caplog.records) == 1


async def test_the_watcher_looks_until_it_is_stopped(files: dict[str, Path]) -> None:
    found = watched(files)
    watcher = Watcher([found], interval_s=0.01)
    await watcher.shutdown()
    watcher = Watcher([found], interval_s=0.01)
    await watcher.start()
    replace(files["t.one"], b"b")
    replace(files["t.two"], b"b")
    await until(lambda: found.value == (b"b", b"b"))
    await watcher.shutdown()
    await watcher.shutdown()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_failed_look_ends_no_later_one(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, looks = watched(files), []

    def look() -> bool:
        looks.append(1)
        if len(looks) <= 2:
            raise RuntimeError("can't start new thread")
        return False

    monkeypatch.setattr(found, "poll", look)
    watcher = Watcher([found], interval_s=0.01)
    await watcher.start()
    await until(lambda: len(looks) > 3)
    await watcher.shutdown()
    assert [record.levelname for record in caplog.records] == ["ERROR"], "logged once"
