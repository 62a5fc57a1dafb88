"""Damage chosen bytes of the journal, the store and the spool, then start again.

The store means its files and its manifest; the spool is the sidecar's.
What is damaged may be lost, counted and reported. Everything else is kept, once, and no process ends with a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from doubles.damaged_parquet import DAMAGES, damage
from faults.disk import FaultyDisk
from faults.evidence import Loaded, loaded
from faults.processes import Running, collector, get, metrics, pause, sidecar, url
from faults.traffic import Traffic, completions, flowing, missing
from faults.trial import Context, Got, Trial
from handrail.wal.segment_file import HEADER_BYTES
from harness.acknowledged import Stored, stored, until, until_stored
from harness.ports import refusing_port

Spoil = Callable[[bytes], bytes]


def _flip(data: bytes, at: int, count: int = 1) -> bytes:
    at = at if at >= 0 else len(data) + at
    return data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + count]) + data[at + count :]


SEGMENT: Final[Mapping[str, Spoil]] = {
    "first_magic": lambda data: _flip(data, 0),
    "first_kind": lambda data: _flip(data, 4),
    "first_length": lambda data: _flip(data, 8, 4),
    "first_time": lambda data: _flip(data, 12, 8),
    "first_payload_sum": lambda data: _flip(data, 20, 4),
    "first_header_sum": lambda data: _flip(data, 24, 4),
    "first_payload": lambda data: _flip(data, HEADER_BYTES),
    "middle": lambda data: _flip(data, len(data) // 2),
    "middle_4_kib": lambda data: _flip(data, len(data) // 2, 4096),
    "last_byte": lambda data: _flip(data, -1),
    "tail_zero": lambda data: data[:-4096] + bytes(min(4096, len(data))),
    "tail_cut": lambda data: data[:-1],
    "tail_garbage": lambda data: data + b"HRJ1" + bytes(range(256)),
}
"""Ways in which a segment of the journal or the spool goes bad."""

MANIFEST: Final[Mapping[str, Spoil]] = {
    "first_byte": lambda data: _flip(data, 0),
    "middle": lambda data: _flip(data, len(data) // 2),
    "line_gone": lambda data: b"".join(line for at, line in enumerate(data.splitlines(True)) if at != 1),
    "tail_cut": lambda data: data[:-20],
    "tail_garbage": lambda data: data + b'{"half a line',
    "empty": lambda data: b"",
}


def _spoil(path: Path, how: Spoil) -> None:
    path.write_bytes(how(path.read_bytes()))


async def _journal(context: Context) -> Got:
    """Damage the journal while it holds everything.

    The store cannot be written. The collector is killed, its journal damaged, and started again.
    """
    worst: list[str] = []
    lost_most = 0
    first = context.folder / "first"
    disk = FaultyDisk(context.folder, first / "data" / "store")
    with collector(first, env=disk.environment) as running:
        async with loaded(running, context, batch=40) as going:
            disk.fail({"open": errno.EROFS, "write": errno.EROFS, "name": errno.EROFS})
            await going.goes_on(40 * 12)
            going.load.stopping = True
            await going.sending
            running.kill(signal.SIGKILL)
            await running.ended()
    for name, how in SEGMENT.items():
        data = context.folder / name / "data"
        shutil.copytree(first / "data", data)
        _spoil(max((data / "journal").glob("*.seg")), how)
        with collector(context.folder / name) as again:
            lost_most = max(lost_most, await _again(again, going, data, name, worst))
    got = f"{len(SEGMENT)} damages, at most {lost_most} spans lost by one"
    return f"{got}; {'; '.join(worst) or 'all counted, all else kept once'}", not worst


async def _again(running: Running, going: Loaded, data: Path, name: str, worst: list[str]) -> int:
    """Start after the damage and compare; return how many spans are lost.

    What is not as promised goes into ``worst``.
    """
    try:
        await running.start()
    except RuntimeError as error:
        worst.append(f"{name}: {error}")
        return 0
    with contextlib.suppress(TimeoutError):
        await until_stored(data / "store", going.load.requests, 4.0)
    page = await metrics(running.addresses["api"])
    status = await running.finish()
    kept: Stored = await asyncio.to_thread(stored, data / "store", going.load)
    reported = (
        page.get("handrail_collector_journal_damaged_bytes_total", 0.0) > 0
        or "damaged" in running.log()
        or "torn" in running.log()
    )
    records = 40 * 6  # a damage of 4 KiB touches a few records of 40 spans each
    if status != 0 or running.tracebacks():
        worst.append(f"{name}: status {status}, {running.tracebacks()} tracebacks")
    if kept.doubled or kept.rows_twice or len(kept.lost) > records:
        worst.append(f"{name}: {kept.text()}")
    if kept.lost and not reported:
        worst.append(f"{name}: {len(kept.lost)} lost and nobody says so")
    return len(kept.lost)


async def _filled(context: Context, folder: Path) -> Loaded:
    """Return a folder with a store of some publishes, whose collector has ended."""
    with collector(folder) as running:
        async with loaded(running, context, batch=40) as going:
            await going.goes_on(40 * 30)
            kept = await going.settle(folder / "data")
    if not kept.whole:
        raise RuntimeError(f"before the damage: {kept.text()}")
    return going


async def _parquet(context: Context) -> Got:
    """Damage one file of requests and one of spans, in every way for Parquet."""
    wrong: list[str] = []
    await _filled(context, context.folder / "first")
    for table in ("requests", "spans"):
        for name, how in DAMAGES.items():
            folder = context.folder / f"{table}-{name}"
            shutil.copytree(context.folder / "first" / "data", folder / "data")
            paths = sorted((folder / "data" / "store" / table).rglob("*.parquet"))
            damage(paths[-1], how)
            with collector(folder, data=folder / "data") as running:
                try:
                    await running.start()
                except RuntimeError as error:
                    wrong.append(f"{table} {name}: {error}")
                    continue
                status, text = await get(running.addresses["api"], "/api/v1/requests?limit=10")
                if status not in (200, 500, 503) or "Traceback" in text:
                    wrong.append(f"{table} {name}: the API answers {status}")
                ended = await running.finish()
                if ended != 0 or running.tracebacks():
                    wrong.append(f"{table} {name}: status {ended}, {running.tracebacks()} tracebacks")
    return f"{2 * len(DAMAGES)} damages; {'; '.join(wrong) or 'each start works, the API answers'}", not wrong


async def _manifest(context: Context) -> Got:
    """Damage the manifest in every way.

    A start then keeps every span, or ends with a status and says what is damaged.
    """
    wrong: list[str] = []
    started = refused = 0
    going = await _filled(context, context.folder / "first")
    for name, how in MANIFEST.items():
        folder = context.folder / name
        shutil.copytree(context.folder / "first" / "data", folder / "data")
        path = folder / "data" / "store" / "manifest.jsonl"
        original = path.read_bytes()
        _spoil(path, how)
        with collector(folder, data=folder / "data") as running:
            try:
                await running.start()
            except RuntimeError:
                refused += 1
                if running.status in (None, 0) or running.tracebacks() or "manifest" not in running.log():
                    wrong.append(f"{name}: {running.last_line()}")
                path.write_bytes(original)
                await running.start()
            else:
                started += 1
            ended = await running.finish()
        kept = await asyncio.to_thread(stored, folder / "data" / "store", going.load)
        aside = "no line of the manifest names it" in running.log()  # files without a manifest line are kept
        if ended != 0 or running.tracebacks() or not (kept.whole or aside):
            wrong.append(f"{name}: status {ended}, {kept.text()}")
    return f"{started} started, {refused} refused by name; {'; '.join(wrong) or 'nothing lost, nothing doubled'}", not wrong


async def _spool(context: Context) -> Got:
    """Kill the sidecar while the collector is away, damage its spool, start both."""
    wrong: list[str] = []
    lost_most = 0
    async with completions(gap_s=0.001) as upstream:
        traffic = await _spooled(context.folder / "first", upstream)
        for name, how in SEGMENT.items():
            folder = context.folder / name
            shutil.copytree(context.folder / "first" / "spool", folder / "spool")
            _spoil(max((folder / "spool").glob("*.seg")), how)
            with collector(folder) as store:
                await store.start()
                with sidecar(folder, "edge", upstream, url(store), "--spool-dir", str(folder / "spool")) as running:
                    await running.start()
                    lost = await _sent(running, folder, traffic)
                    page = await metrics(running.addresses["admin"])
                    status = await running.finish()
                await store.finish()
            reported = page.get("handrail_sidecar_spool_lost_bytes_total", 0.0) > 0 or "spool damaged" in running.log()
            lost_most = max(lost_most, lost)
            if status != 0 or running.tracebacks():
                wrong.append(f"{name}: status {status}, {running.tracebacks()} tracebacks")
            if lost and not reported:
                wrong.append(f"{name}: {lost} lost and nobody says so")
            if lost > len(traffic.answers) * 0.8:
                wrong.append(f"{name}: {lost} of {len(traffic.answers)} lost")
    return f"{len(SEGMENT)} damages, at most {lost_most} spans lost by one; {'; '.join(wrong) or 'all counted'}", not wrong


async def _spooled(folder: Path, upstream: str) -> Traffic:
    """Fill a spool while the collector is away, and kill its sidecar.

    Returns the traffic.
    """
    with refusing_port() as nobody:
        away = f"http://127.0.0.1:{nobody}"
        with sidecar(folder, "edge", upstream, away, "--spool-dir", str(folder / "spool")) as running:
            await running.start()
            traffic = Traffic(f"http://{running.addresses['proxy']}", rate=40)
            async with flowing(traffic) as task:
                await until(lambda: len(traffic.answers) >= 90, lambda: "no stream ends", 60.0)
                traffic.stopping = True
                await task
            await pause(1.5)  # three times the flush interval: every span is in the spool
            running.kill(signal.SIGKILL)
            await running.ended()
    return traffic


async def _sent(running: Running, folder: Path, traffic: Traffic) -> int:
    """Wait until the sidecar has sent what it can read; count requests without a row."""
    address = running.addresses["admin"]
    for _ in range(100):
        page = await metrics(address)
        if page.get("handrail_sidecar_spool_bytes", 1.0) == 0.0:
            break
        await asyncio.sleep(0.1)
    with contextlib.suppress(TimeoutError):
        await until_stored(folder / "data" / "store", len(traffic.answers), 4.0)
    lost, _ = await asyncio.to_thread(missing, folder / "data" / "store", traffic.answers)
    return len(lost)


def _trial(name: str, expected: str, run: Callable[[Context], Awaitable[Got]], seconds: float) -> Trial:
    return Trial(name=f"damage.{name}", group="damage", expected=expected, seconds=seconds, beside=True, run=run)


TRIALS: tuple[Trial, ...] = (
    _trial(
        "journal_chosen", "every damage: starts, loses no more than the damaged records, says so, nothing twice", _journal, 50
    ),
    _trial("parquet_chosen", "every damage: starts, the API answers, ends with status 0", _parquet, 45),
    _trial(
        "manifest_chosen", "every damage: starts with everything, or ends with a status and names the manifest", _manifest, 30
    ),
    _trial("spool_chosen", "every damage: starts, sends all else, counts what it lost", _spool, 55),
)
