"""The plugin source's socket: who may bind and send, and what a restart leaves."""

# ruff: noqa: ASYNC240 - a few calls on files of the test's own, nobody else on the loop

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from builders.exchanges import PROCESS
from handrail.plugin import events as words
from handrail.plugin.recorder import Recorder
from handrail.records import EngineTimes, Observation, ProcessEvent, ProcessEventKind
from handrail_sidecar.sources.plugin_socket import PluginSource, bind, process_exists

S = 1_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "engine.sock"


async def test_what_a_guest_says_becomes_records(path: Path) -> None:
    records: list[Observation] = []
    ended = asyncio.Event()

    def take(record: Observation) -> None:
        records.append(record)
        if isinstance(record, EngineTimes):
            ended.set()

    source = PluginSource(path, PROCESS, take)
    await source.start()
    recorder = Recorder(str(path))
    recorder.record((words.QUEUED, 1, "r", None, 5, None))
    recorder.record((words.FINISHED, 9, "r", "FINISHED_STOPPED", 3))
    assert recorder.flush()
    await ended.wait()
    await source.shutdown(60.0)
    recorder.stop()
    assert source.stats.datagrams == 1
    assert [p.host_pid for p in source.merge.processes.alive.values()] == [os.getpid()]
    assert not path.exists()


async def test_a_pause_of_the_sidecar_that_lost_datagrams_is_no_hang_of_the_engine(path: Path) -> None:
    """A pause of the sidecar in which it lost events is no hang of the engine.

    An engine that goes on sends within seconds; one that then sends nothing either is reported as silent.
    """
    records: list[Observation] = []
    now = [time.monotonic_ns()]
    source = PluginSource(path, PROCESS, records.append, clock=lambda: now[0])
    await source.start()
    recorder = Recorder(str(path))
    recorder.record((words.QUEUED, now[0], "r", None, 5, None))
    assert recorder.flush()
    recorder.stop()
    source.look()
    now[0] += 45 * S  # stopped; what was sent since then has filled the socket and is lost
    hung = []
    for _ in range(16):
        source.look()
        hung.append(source.merge.processes.hung)
        now[0] += S // 2
    assert hung == [False] * 10 + [True] * 6
    now[0] += 45 * S  # stopped again: silence is no evidence that the engine goes on
    source.look()
    assert source.merge.processes.hung
    await source.shutdown(0.0)
    kinds = [record.kind for record in records if isinstance(record, ProcessEvent)]
    assert kinds == [ProcessEventKind.STARTED, ProcessEventKind.HUNG]


async def test_only_the_owner_may_write_and_a_group_where_the_folder_says_so(path: Path) -> None:
    with bind(path) as _:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    path.parent.chmod(0o2770)
    with bind(path) as _:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


async def test_a_socket_that_nobody_listens_on_is_replaced(path: Path) -> None:
    bind(path).close()
    assert path.exists()
    source = PluginSource(path, PROCESS, lambda _: None)
    await source.start()
    await source.shutdown(0.0)


async def test_another_sidecars_socket_is_left_alone(path: Path) -> None:
    with bind(path), pytest.raises(FileExistsError, match="another sidecar"):
        await PluginSource(path, PROCESS, lambda _: None).start()
    assert path.exists()


async def test_what_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("not ours")
    with pytest.raises(FileExistsError, match="is not a socket"):
        await PluginSource(path, PROCESS, lambda _: None).start()
    assert path.read_text() == "not ours"


async def test_garbage_is_counted_and_nothing_else_happens(path: Path) -> None:
    records: list[Observation] = []
    source = PluginSource(path, PROCESS, records.append)
    await source.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"", b"\0" * 100, b"[" * 5000, b"x" * 40_000):
            sender.sendto(data, str(path))
    await source.shutdown(60.0)
    assert (source.stats.datagrams, source.stats.bad_datagrams, records) == (4, 4, [])


async def test_shutdown_reads_what_is_there_works_twice_and_without_start(path: Path) -> None:
    records: list[Observation] = []
    source = PluginSource(path, PROCESS, records.append)
    await source.shutdown(60.0)
    await source.start()
    recorder = Recorder(str(path))
    recorder.record((words.QUEUED, 1, "r", None, 5, None))
    recorder.record((words.FINISHED, 9, "r", "FINISHED_STOPPED", 3))
    assert recorder.flush()
    await source.shutdown(60.0)
    await source.shutdown(60.0)
    recorder.stop()
    assert [type(record) for record in records if isinstance(record, EngineTimes)] == [EngineTimes]


async def test_a_successors_socket_is_not_removed(path: Path) -> None:
    source = PluginSource(path, PROCESS, lambda _: None)
    await source.start()
    path.unlink()
    with bind(path):
        await source.shutdown(0.0)
        assert path.exists()


async def test_fifty_starts_leave_no_descriptor(path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        source = PluginSource(path, PROCESS, lambda _: None)
        await source.start()
        await source.shutdown(0.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_process_that_is_there_and_one_that_is_not() -> None:
    assert process_exists(os.getpid()) is True
    child = os.fork()
    if child == 0:
        os._exit(0)
    while process_exists(child) is not False:  # a zombie counts as no process
        pass
    os.waitpid(child, 0)
    assert process_exists(child) is False
