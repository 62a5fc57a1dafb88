"""File modes of what Handrail creates: the same under every umask.

Existing files keep their own modes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders.store_rows import request_rows
from handrail.config.listeners import write_ready
from handrail.wal.filesystem import OsFiles, create, make_folder, replace_file
from handrail_collector.journal.journal import JournalSettings
from handrail_collector.store.publish import StorePublisher
from handrail_sidecar.export.spool import Spool
from handrail_sidecar.sources.log_tail import Position
from handrail_sidecar.sources.plugin_socket import bind


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def modes(root: Path) -> dict[str, int]:
    return {path.relative_to(root).as_posix(): stat.S_IMODE(path.lstat().st_mode) for path in sorted(root.rglob("*"))}


def assert_ours(root: Path, at_least: int) -> None:
    found = modes(root)
    assert {name for name in found if (root / name).is_file()}
    assert len(found) >= at_least
    assert {name: oct(mode) for name, mode in found.items() if mode != (0o750 if (root / name).is_dir() else 0o640)} == {}


def test_the_store(tmp_path: Path, umask: int) -> None:
    publisher = StorePublisher(tmp_path / "data" / "store")
    publisher.open()
    publisher.publish(0, 10, 0, [], request_rows(3))
    publisher.retire({publisher.publishes()[0].files[0].path})  # a new manifest in the old one's place
    publisher.close()
    assert_ours(tmp_path, 6)


def test_the_journal(tmp_path: Path, umask: int) -> None:
    log = JournalSettings(folder=tmp_path / "data" / "journal").open_log()
    log.append(1, b"entry", 1)
    log.close()
    assert_ours(tmp_path, 3)


def test_the_spool(tmp_path: Path, umask: int) -> None:
    from handrail.otlp.signals import Signal

    spool = Spool(tmp_path / "spool" / "p", 1 << 20)
    spool.put(Signal.TRACES, b"batch", 1)
    spool.close()
    assert_ours(tmp_path, 3)


def test_positions_of_logs(tmp_path: Path, umask: int) -> None:
    for offset in (5, 6):
        Position(1, 2, offset, "", 0).save(tmp_path / "positions" / "a.position")
    assert_ours(tmp_path, 2)


def test_the_ready_file_is_for_everybody(tmp_path: Path, umask: int) -> None:
    write_ready(tmp_path / "run" / "ready.json", {"http": "127.0.0.1:1"})
    assert modes(tmp_path) == {"run": 0o755, "run/ready.json": 0o644}


@pytest.mark.parametrize("shared", [False, True])
def test_the_plugins_socket(tmp_path: Path, umask: int, shared: bool) -> None:
    folder = tmp_path / "s"
    if shared:
        make_folder(folder)
        folder.chmod(0o2770)
    bound = bind(folder / "engine.sock")
    try:
        assert modes(tmp_path) == {"s": 0o2770 if shared else 0o750, "s/engine.sock": 0o660 if shared else 0o600}
    finally:
        bound.close()


def test_what_stands_there_keeps_its_mode(tmp_path: Path, umask: int) -> None:
    tmp_path.joinpath("d").mkdir()
    tmp_path.joinpath("d").chmod(0o700)
    tmp_path.joinpath("d/f").touch()
    tmp_path.joinpath("d/f").chmod(0o600)
    OsFiles().make_dir(str(tmp_path / "d"))
    os.close(create(tmp_path / "d/f", os.O_WRONLY))
    assert modes(tmp_path) == {"d": 0o700, "d/f": 0o600}


def test_a_file_left_by_a_process_of_our_number_is_no_obstacle(tmp_path: Path) -> None:
    tmp_path.joinpath(f".ready.{os.getpid()}").write_bytes(b"left")
    replace_file(tmp_path / "ready", b"new")
    assert tmp_path.joinpath("ready").read_bytes() == b"new"
    assert modes(tmp_path) == {"ready": 0o640}


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    tmp_path.joinpath("f").touch()
    with pytest.raises(OSError, match="f"):
        make_folder(tmp_path / "f" / "g")
