"""Break the disk under the collector's data and under the sidecar's spool.

The disk is full, slow, read-only, failing or deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from faults.disk import READ_ONLY, FaultyDisk, fill, remount, small_disk
from faults.evidence import bear, loaded
from faults.processes import collector, get, metrics, pause, sidecar, url
from faults.traffic import Traffic, completions, flowing, missing
from faults.trial import Context, Got, Trial
from harness.acknowledged import stored, until, until_stored

_EIO = {"write": errno.EIO, "sync": errno.EIO}


# --- under the collector's data ------------------------------------------------------------------------------------------------


async def _data_full(context: Context) -> Got:
    seconds = context.scale(8.0, 60.0)
    with small_disk(context.folder / "disk", "40m") as disk, collector(context.folder, data=disk / "data") as running:
        async with loaded(running, context) as going:
            pages: list[int] = []
            ballast = disk / "ballast"

            async def look() -> None:
                pages.append((await get(running.addresses["api"], "/readyz"))[0])

            borne = await bear(going, disk / "data", lambda: fill(disk), lambda: ballast.unlink(), seconds, look)
        refused = sum(going.load.refusals.values())
    got = f"{refused} refusals, /readyz {pages[0]}; {borne.text()}; {running.tracebacks()} tracebacks"
    return got, borne.kept.whole and borne.ended is None and refused > 0 and pages == [503]


async def _data_faulty(context: Context, faults: dict[str, int], wait_ms: int = 0, *, slow: bool = False) -> Got:
    """Fail the calls on the data's folder; with ``slow`` they only wait."""
    seconds, data = context.scale(6.0, 60.0), context.folder / "data"
    disk = FaultyDisk(context.folder, data)
    with collector(context.folder, env=disk.environment) as running:
        async with loaded(running, context) as going:
            ready: list[int] = []

            async def unhealthy() -> bool:
                status, _ = await get(running.addresses["api"], "/readyz")
                ready.append(status)
                return status == 503

            borne = await bear(going, data, lambda: disk.fail(faults, wait_ms), disk.mend, seconds, restart=unhealthy)
        worst = max(going.load.latencies_s)
    output = "started again because /readyz asked for it" if running.starts > 1 and borne.ended is None else "not started again"
    got = f"{output}; slowest acknowledgement {worst:.1f} s; {borne.text()}; {running.tracebacks()} tracebacks"
    # a journal that cannot be read ends the process with the traceback of the pipeline
    ok = borne.kept.whole and running.tracebacks() <= (borne.ended is not None)
    return got, ok and (borne.during > 0 and running.starts == 1 if slow else borne.ended != 0)


async def _starts_read_only(context: Context) -> Got:
    with small_disk(context.folder / "disk", "8m") as disk, collector(context.folder, data=disk / "data") as running:
        remount(disk, "ro")
        running.launch()
        status = await running.ended()
        lines = [line for line in running.log().splitlines() if line.strip()]
    return f"status {status}, {len(lines)} lines, the last: {running.last_line()!r}", status != 0 and running.tracebacks() == 0


async def _data_gone(context: Context, replaced: bool) -> Got:
    """Remove the data folder, or replace it by an empty one, under load."""
    data, away = context.folder / "data", context.folder / "away"
    with collector(context.folder) as running:
        async with loaded(running, context) as going:
            if replaced:
                data.rename(away)
                data.mkdir()
            else:
                await asyncio.to_thread(shutil.rmtree, data, ignore_errors=True)
            before = len(going.load.acknowledged)
            try:
                status: int | None = await running.ended(20.0)
            except TimeoutError:
                status = None
            after = len(going.load.acknowledged) - before
            going.load.stopping = True
    got = (
        f"status {status}, {after} spans acknowledged after it"
        if status is not None
        else f"runs on, {after} acknowledged after it"
    )
    ok = status not in (None, 0) and running.tracebacks() <= 1
    if not replaced:
        return f"{got}: {running.last_line()!r}", ok and after <= 3 * 80
    with collector(context.folder / "again", data=away) as again:
        await again.start()
        with contextlib.suppress(TimeoutError):
            await until_stored(away / "store", going.load.requests, 15.0)
        await again.finish()
    kept = await asyncio.to_thread(stored, away / "store", going.load)
    return f"{got}; in the folder moved away: {kept.text()}", ok and not kept.lost and not kept.doubled


# --- under the sidecar's spool -------------------------------------------------------------------------------------------------


async def _spool(
    context: Context,
    spool: Path,
    begin: Callable[[], object],
    mend: Callable[[], object],
    env: dict[str, str] | None = None,
    *,
    slow: bool = False,
    recovers: bool = False,
) -> Got:
    """Break the spool while streams run before, during and after the fault.

    Every stream is whole, every request has a row, and the fault is on /metrics.
    ``slow``: nothing fails.
    ``recovers``: the sidecar recovers while the fault lasts, so /readyz need not show it any more.
    """
    seconds, data = context.scale(6.0, 60.0), context.folder / "data"
    with collector(context.folder) as store:
        await store.start()
        async with completions() as upstream:
            with sidecar(context.folder, "edge", upstream, url(store), "--spool-dir", str(spool), env=env) as running:
                await running.start()
                traffic = Traffic(f"http://{running.addresses['proxy']}")
                async with flowing(traffic) as task:
                    await until(lambda: len(traffic.answers) > 20, lambda: "no stream ends", 60.0)
                    began = len(traffic.answers)
                    begin()
                    try:
                        await pause(seconds)
                        page = await metrics(running.addresses["admin"])
                        _, ready = await get(running.addresses["admin"], "/readyz")
                    finally:
                        mend()
                    during = len(traffic.answers) - began
                    await pause(3.0)
                    _, healed = await get(running.addresses["admin"], "/readyz")
                    traffic.stopping = True
                    await task
                whole = sum(answer.whole for answer in traffic.answers)
                with contextlib.suppress(TimeoutError):
                    await until_stored(data / "store", whole, 20.0)
                after = await metrics(running.addresses["admin"])
                status = await running.finish() if running.alive else running.status
        await store.finish()
    lost, twice = await asyncio.to_thread(missing, data / "store", traffic.answers)
    errors = sum(value for name, value in {**page, **after}.items() if "spool_error" in name and "{" not in name)
    dropped = after.get("handrail_sidecar_spans_dropped_total", 0.0)
    streams = f"{whole} of {len(traffic.answers)} streams whole ({during} during it)"
    reported_output = (
        f"spool errors {errors:.0f}, dropped {dropped:.0f}, /readyz {_reported(ready)} during, {_reported(healed)} after"
    )
    rows = f"{len(lost)} without a row, {twice} twice"
    got = f"{streams}; {rows}; {reported_output}; status {status}, {running.tracebacks()} tracebacks"
    ok = whole == len(traffic.answers) and not lost and not twice and running.tracebacks() == 0 and status == 0
    return got, ok and (slow or (errors > 0 and (recovers or _reported(ready) == "degraded") and _reported(healed) == "ok"))


def _reported(readiness: str) -> str:
    return "degraded" if "degraded" in readiness else "ok" if readiness.startswith("ok") else "not ready"


async def _spool_full(context: Context, size: str) -> Got:
    with small_disk(context.folder / "disk", size) as disk:
        ballast = disk / "ballast"
        return await _spool(context, disk / "spool", lambda: fill(disk), ballast.unlink, recovers=True)


async def _spool_faulty(context: Context, faults: dict[str, int], wait_ms: int = 0, *, slow: bool = False) -> Got:
    disk = FaultyDisk(context.folder, context.folder / "spool")
    begin = lambda: disk.fail(faults, wait_ms)  # noqa: E731 - one call with its arguments
    return await _spool(context, context.folder / "spool", begin, disk.mend, dict(disk.environment), slow=slow)


async def _spool_deleted(context: Context) -> Got:
    spool = context.folder / "spool"
    return await _spool(context, spool, lambda: shutil.rmtree(spool), lambda: None, recovers=True)


_ONCE = "0 acknowledged spans lost, 0 doubled"
_EVIDENCE = "every stream whole, every request a row (from memory), the fault on /metrics and /readyz, gone when mended"

_RECOVERS = "every stream whole, every request a row; the spool recovers by itself, the fault is counted"


def _of_data(name: str, expected: str, run: Callable[[Context], Awaitable[Got]], seconds: float = 15) -> Trial:
    return Trial(
        name=f"disk.data_{name}", group="disk", expected=expected, seconds=seconds, long_seconds=90, beside=True, run=run
    )


def _of_spool(name: str, expected: str, run: Callable[[Context], Awaitable[Got]]) -> Trial:
    return Trial(name=f"disk.spool_{name}", group="disk", expected=expected, seconds=16, long_seconds=90, beside=True, run=run)


TRIALS: tuple[Trial, ...] = (
    _of_data("full", f"refuses with a delay, /readyz 503, goes on by itself when there is room; {_ONCE}", _data_full),
    _of_data(
        "read_only",
        f"nothing acknowledged meanwhile; ends with a status or says on /readyz that it wants a restart; {_ONCE}",
        lambda c: _data_faulty(c, READ_ONLY),
    ),
    _of_data("start_read_only", "a start on a read-only disk ends with a status and one line", _starts_read_only, 5),
    _of_data(
        "slow", f"each sync takes 0.5 s: acknowledges on, alive; {_ONCE}", lambda c: _data_faulty(c, {"sync": 0}, 500, slow=True)
    ),
    _of_data(
        "io_error",
        f"EIO on writes and syncs: ends with a status or asks for a restart; {_ONCE}",
        lambda c: _data_faulty(c, _EIO),
    ),
    _of_data(
        "read_error",
        f"EIO on reads: retries, ends with a status or asks for a restart; {_ONCE}",
        lambda c: _data_faulty(c, {"read": errno.EIO}),
    ),
    _of_data("deleted", "ends with a status, nothing acknowledged after it was noticed", lambda c: _data_gone(c, False)),
    _of_data("replaced", f"ends with a status; in the folder that was moved away {_ONCE}", lambda c: _data_gone(c, True)),
    _of_spool("full", _RECOVERS, lambda c: _spool_full(c, "16m")),
    _of_spool("full_tiny", f"a disk smaller than a segment: {_RECOVERS}", lambda c: _spool_full(c, "256k")),
    _of_spool("read_only", _EVIDENCE, lambda c: _spool_faulty(c, READ_ONLY)),
    _of_spool("io_error", _EVIDENCE, lambda c: _spool_faulty(c, {**_EIO, "open": errno.EIO, "name": errno.EIO})),
    _of_spool(
        "slow",
        "each write takes 50 ms: every stream whole, every request a row",
        lambda c: _spool_faulty(c, {"write": 0}, 50, slow=True),
    ),
    _of_spool("deleted", _RECOVERS, _spool_deleted),
)
