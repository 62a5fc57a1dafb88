"""Each error of the table in docs/reliability.md, provoked.

The process retries, degrades or stops, as the table says.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from builders.exchanges import PROCESS
from doubles.failing_files import KINDS, NAMES, FailingFiles, failure
from handrail.config.listeners import write_ready
from handrail.otlp.client import OtlpClient
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Retryable, Signal
from handrail.runtime import accepting
from handrail.runtime.accepting import Acceptor
from handrail.runtime.connections import own_gate
from handrail.security.file_reload import ReloadingFile
from handrail.wal.filesystem import OsFiles
from handrail.wal.log import LogLimits, SegmentLog
from handrail_collector.journal.journal import Journal
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.publish import StorePublisher
from handrail_sidecar.export.spool import READ_TRIES, Spool
from handrail_sidecar.gpu.processes import holds_a_gpu
from handrail_sidecar.links import sysfs
from handrail_sidecar.sources.engine_log import LogSettings, LogSource
from handrail_sidecar.sources.engine_metrics import MetricsSettings, NoPageError, fetch_once
from handrail_sidecar.sources.log_tail import FileTail, TailSettings
from handrail_sidecar.sources.plugin_socket import _receive
from harness.pipelines import Clock, proxies, running, send, taken
from harness.store import Clock as StoreClock
from harness.store import publish_all

RETRY, DEGRADE, STOP, NONE = "retry", "degrade", "stop", "–"
PAGE: Final = Path(__file__).parents[1] / "docs" / "reliability.md"
METRICS: Final = Path(__file__).parents[1] / "docs" / "metrics.md"
SMALL: Final = LogLimits(max_bytes=4000, segment_bytes=400, max_record_bytes=300)

Trial = Callable[[int, Path], Awaitable[str]]
"""A trial of one errno at a place, in an empty folder; returns the observed rule."""


def table() -> dict[str, list[str]]:
    """Return the cells of each row, by place."""
    rows = re.findall(r"^\| ([a-zA-Z][^|]*?) \|(.*)\|$", PAGE.read_text("utf-8"), re.M)
    found = {place: [cell.strip() for cell in rest.split("|")] for place, rest in rows}
    assert found.pop("place")[: len(NAMES)] == list(NAMES)
    return {place: cells for place, cells in found.items() if len(cells) == len(NAMES) + 2}


# --- journal and store ---------------------------------------------------------------------------------------------------------


def journal(operation: str) -> Trial:
    async def trial(code: int, folder: Path) -> str:
        files = FailingFiles()
        found = Journal(SegmentLog("journal", SMALL, files=files))
        await found.start()
        await found.consume(Signal.TRACES, b"kept" * 60)
        files.failing = {operation: code}
        with pytest.raises(Retryable):
            await found.consume(Signal.TRACES, b"next" * 60)
        files.failing = {}
        with contextlib.suppress(Retryable):
            await found.consume(Signal.TRACES, b"last" * 60)
        await found.shutdown()
        read = [record.payload[:4] for record in SegmentLog("journal", SMALL, files=files).read(0)]
        assert read[0] == b"kept"
        if found.healthy:
            assert read == [b"kept", b"last"]
        return RETRY if found.healthy else STOP

    return trial


async def journal_read(code: int, folder: Path) -> str:
    files = FailingFiles()
    found = Journal(SegmentLog("journal", SMALL, files=files))
    await found.consume(Signal.TRACES, b"lost" * 60)
    files.failing = {"open_read": code}
    await found.consume(Signal.TRACES, b"next" * 60)
    following = asyncio.ensure_future(anext(found.follow(0), None))
    while not files.failures and not following.done():  # noqa: ASYNC110 - it is read in a thread of the journal's
        await asyncio.sleep(0.001)
    files.failing = {}
    await found.consume(Signal.TRACES, b"last" * 60)
    try:
        entry = await following
    except OSError:
        return STOP
    finally:
        await found.shutdown()
    assert entry is not None
    return DEGRADE if entry.offset else RETRY


async def journal_release(code: int, folder: Path) -> str:
    files = FailingFiles()
    found = Journal(SegmentLog("journal", SMALL, files=files))
    for _ in range(4):
        await found.consume(Signal.TRACES, b"x" * 250)
    files.failing = {"unlink": code}
    found.release(600)
    await found.consume(Signal.TRACES, b"x")  # queued behind it in the writing thread
    files.failing = {}
    failures = found.stats.release_failures
    found.release(601)
    await found.consume(Signal.TRACES, b"x")
    assert found.begin > 0
    await found.shutdown()
    return RETRY if failures else NONE


def opening(make: Callable[[FailingFiles], object]) -> Trial:
    """Open a folder whose lock fails, then one whose first file fails."""

    async def trial(code: int, folder: Path) -> str:
        rules = set()
        for operation in ("lock_dir", "open_append"):
            files = FailingFiles(OsFiles())
            files.failing = {operation: code}
            try:
                make(files)
            except OSError:
                rules.add(STOP)
            else:
                rules.add(RETRY)
        (rule,) = rules
        return rule

    return trial


def opening_below(make: Callable[[Path, FailingFiles], object]) -> Trial:
    async def trial(code: int, folder: Path) -> str:
        return await opening(lambda files: make(folder / "opened", files))(code, folder)

    return trial


def publish(operation: str) -> Trial:
    async def trial(code: int, folder: Path) -> str:
        files = FailingFiles(OsFiles())
        async with running(folder, Clock(), files=files) as (found, pipeline):
            await send(found, proxies("req-a", "t1"))
            await taken(pipeline, found)
            files.failing = {operation: code}
            await pipeline.flush()
            assert (pipeline.stats.failing, pipeline.stats.publish_failures) == (1, 1)
            files.failing = {}
            await pipeline.flush()
            assert (pipeline.stats.failing, pipeline.stats.spans_stored, found.healthy) == (0, 3, True)
        return RETRY

    return trial


async def upkeep(code: int, folder: Path) -> str:
    files, clock = FailingFiles(OsFiles()), StoreClock()
    publisher = StorePublisher(folder / "store", files=files, now_unix_ns=clock)
    publisher.open()
    publish_all(publisher)
    found = Upkeep(publisher, UpkeepSettings(grace_ns=0), clock)
    files.failing = {"rename": code}
    found.run_pass()
    assert found.stats.failures > 0
    assert found.stats.files_folded == 0
    files.failing = {}
    found.run_pass()
    publisher.close()
    assert found.stats.files_folded > 0
    return RETRY


# --- spool ---------------------------------------------------------------------------------------------------------------------


def spool(operation: str) -> Trial:
    async def trial(code: int, folder: Path) -> str:
        files = FailingFiles()
        found = Spool("spool", 1 << 20, files=files)
        files.failing = {operation: code}
        delivered = []
        for number in range(5):
            found.put(Signal.TRACES, bytes([number]) * 100_000, number)  # a segment each
            batch = found.first()
            assert batch is not None
            found.acknowledge(batch.next_offset)
            delivered.append(batch.at_unix_ns)
        failed, trouble = found.errors, found.trouble
        files.failing = {}
        assert delivered == list(range(5))
        assert found.repair()
        assert found.trouble == ""
        return DEGRADE if failed and trouble else NONE

    return trial


async def spool_read(code: int, folder: Path) -> str:
    files = FailingFiles()
    found = Spool("spool", 1 << 20, files=files)
    found.put(Signal.TRACES, b"first" * 20_000, 0)
    found.put(Signal.TRACES, b"second" * 20_000, 1)
    files.failing = {"open_read": code}
    for _ in range(READ_TRIES):
        with contextlib.suppress(OSError):
            if found.first() is None:
                break
    files.failing = {}
    if found.damaged_bytes:
        return DEGRADE
    batch = found.first()
    assert batch is not None
    assert batch.at_unix_ns == 0
    return RETRY


# --- sources and what is read --------------------------------------------------------------------------------------------------


@contextmanager
def failing_calls(owner: Any, name: str, code: int) -> Iterator[None]:
    """Make every call of a function fail."""

    def fail(*_: object, **__: object) -> Any:
        raise failure(code)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, fail)
        yield


async def log_file(code: int, folder: Path) -> str:
    path = folder / "engine.log"
    path.write_text("first\n")
    tail = FileTail(path, TailSettings(from_start=True))
    for call, line in (("open", "first"), ("pread", "second")):
        with failing_calls(os, call, code):
            assert tail.poll() == []
        assert tail.poll() == [line]
        with path.open("a") as file:
            file.write("second\n")
    tail.close()
    return RETRY


async def kept_position(code: int, folder: Path) -> str:
    path = folder / "engine.log"
    path.write_text("old\n")
    source = LogSource(LogSettings(paths=(str(path),), positions=folder / "positions"), PROCESS, _take)
    source._tails = [FileTail(path, TailSettings())]
    source._tails[0].poll()
    with failing_calls(os, "replace", code):
        source._save()
    assert source._kept == {}
    source._save()
    assert len(source._kept) == 1
    source._tails[0].close()
    return DEGRADE


async def _take(_: object) -> bool:
    return True


async def ready_file(code: int, folder: Path) -> str:
    with failing_calls(os, "replace", code), pytest.raises(OSError, match=r"."):
        write_ready(folder / "ready.json", {})
    return STOP


async def certificate_at_start(code: int, folder: Path) -> str:
    (folder / "token").write_bytes(b"one")
    with failing_calls(os, "open", code), pytest.raises(OSError, match="cannot be read"):
        ReloadingFile("token", {"t": folder / "token"}, lambda contents: contents["t"])
    return STOP


async def certificate_later(code: int, folder: Path) -> str:
    (folder / "token").write_bytes(b"one")
    found = ReloadingFile("token", {"t": folder / "token"}, lambda contents: contents["t"])
    (folder / "token").write_bytes(b"two")
    with failing_calls(os, "open", code):
        assert not found.poll()
        assert not found.poll()
        assert (found.value, bool(found.refused)) == (b"one", True)
    assert found.poll()
    assert (found.value, found.refused) == (b"two", "")
    return DEGRADE


async def plugin_socket(code: int, folder: Path) -> str:
    class Bound:
        def recvmsg(self, *_: int) -> Any:
            raise failure(code)

    assert _receive(Bound()) is None  # type: ignore[arg-type]  # what the loop calls again when there is something
    return RETRY


async def scrape(code: int, folder: Path) -> str:
    with failing_calls(aiohttp.ClientSession, "get", code), pytest.raises(NoPageError, match=r"."):
        await fetch_once(MetricsSettings(url="http://127.0.0.1:9/metrics"))
    return RETRY


async def sending(code: int, folder: Path) -> str:
    client = OtlpClient(ClientSettings(endpoint="http://127.0.0.1:9"))
    try:
        with failing_calls(aiohttp.ClientSession, "post", code), pytest.raises(Retryable):
            await client.send(Signal.TRACES, b"")
    finally:
        await client.close()
    return RETRY


class RefusedOnce(socket.socket):
    """A listening socket whose first ``accept`` fails."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.failing: int | None = code

    def accept(self) -> tuple[socket.socket, Any]:
        code, self.failing = self.failing, None
        if code is not None:
            raise failure(code)
        return super().accept()


async def accepting_connections(code: int, folder: Path) -> str:
    def listening(host: str, port: int) -> list[socket.socket]:
        made = RefusedOnce(code)
        made.bind((host, port))
        made.listen()
        made.setblocking(False)
        return [made]

    gate = own_gate("http")
    accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accepting, "listening", listening)
        acceptor = Acceptor(gate, lambda connection, peer: accepted.put_nowait(connection))
        address = acceptor.start("127.0.0.1", 0)
    with socket.create_connection(address):
        (await accepted.get()).close()
    acceptor.close()
    return RETRY if gate.pauses else NONE


async def link_counter(code: int, folder: Path) -> str:
    (folder / "port_rcv_data").write_text("7\n")
    with failing_calls(os, "open", code), failing_calls(os, "listdir", code):
        assert isinstance(sysfs.count(str(folder / "port_rcv_data")), sysfs.Why)
        assert isinstance(sysfs.entries(str(folder)), sysfs.Why)
    assert sysfs.count(str(folder / "port_rcv_data")) == 7
    return DEGRADE


async def gpu_process(code: int, folder: Path) -> str:
    (folder / "1" / "fd").mkdir(parents=True)
    (folder / "1" / "fd" / "0").symlink_to("/dev/nvidia0")
    with failing_calls(os, "readlink", code):
        assert not holds_a_gpu(1, folder)
    assert holds_a_gpu(1, folder)
    return DEGRADE


TRIALS: Final[dict[str, Trial]] = {
    "journal: write": journal("write"),
    "journal: sync": journal("fdatasync"),
    "journal: next segment": journal("open_append"),
    "journal: sync of a new name": journal("fsync_dir"),
    "journal: read": journal_read,
    "journal: release": journal_release,
    "journal: open": opening_below(lambda folder, files: SegmentLog(folder, files=files)),
    "store: publish": publish("rename"),
    "store: manifest, counts and low-water mark": publish("fdatasync"),
    "store: upkeep": upkeep,
    "store: open": opening_below(lambda folder, files: StorePublisher(folder, files=files).open()),
    "spool: write": spool("write"),
    "spool: next segment": spool("open_append"),
    "spool: acknowledgement": spool("rename"),
    "spool: removal of a segment": spool("unlink"),
    "spool: read": spool_read,
    "spool: open": opening_below(lambda folder, files: Spool(folder, 1 << 20, files=files)),
    "log file: open and read": log_file,
    "log file: kept position": kept_position,
    "ready file": ready_file,
    "certificates and tokens: at start": certificate_at_start,
    "certificates and tokens: later": certificate_later,
    "plugin's socket: read": plugin_socket,
    "listeners: accept": accepting_connections,
    "metrics scrape": scrape,
    "collector and forward sinks: send": sending,
    "counters of links (sysfs)": link_counter,
    "GPU processes (/proc)": gpu_process,
}


CASES: Final = [(place, code) for place in TRIALS for code in KINDS]


@pytest.mark.parametrize(("place", "code"), CASES, ids=[f"{place}-{errno.errorcode[code]}" for place, code in CASES])
async def test_what_the_table_says_is_what_happens(place: str, code: int, tmp_path: Path) -> None:
    seen = await asyncio.wait_for(TRIALS[place](code, tmp_path), 60)
    assert seen == table()[place][KINDS.index(code)]


def test_every_row_is_tried_and_every_trial_has_its_row() -> None:
    assert set(table()) == set(TRIALS)


def test_the_table_speaks_of_metrics_that_there_are() -> None:
    known = METRICS.read_text("utf-8")
    named = {name for cells in table().values() for cell in cells for name in re.findall(r"`(handrail_\w+)`", cell)}
    assert named
    assert [name for name in sorted(named) if f"`{name}`" not in known] == []
