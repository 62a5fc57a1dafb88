"""Make the store unwritable, or the collector absent, for ten minutes (scaled)."""

from __future__ import annotations

import asyncio
import contextlib
import errno

from faults.disk import FaultyDisk
from faults.evidence import loaded
from faults.processes import collector, get, metrics, pause, sidecar, url
from faults.traffic import Traffic, completions, flowing, missing
from faults.trial import Context, Got, Trial
from harness.acknowledged import until, until_stored


async def _store_down(context: Context) -> Got:
    """Fail every call that writes below the store; the journal works."""
    seconds, data = context.scale(20.0, 600.0), context.folder / "data"
    disk = FaultyDisk(context.folder, data / "store")
    with collector(context.folder, env=disk.environment) as running:
        async with loaded(running, context, pause_s=0.2) as going:
            disk.fail({"open": errno.EROFS, "write": errno.EIO, "sync": errno.EIO, "name": errno.EIO})
            during = await going.acknowledged_during(seconds)
            page = await metrics(running.addresses["api"])
            ready, reason = await get(running.addresses["api"], "/readyz")
            disk.mend()
            alive = running.alive
            kept = await going.settle(data)
            status = running.status
    failures = page.get("handrail_collector_publish_failures_total", 0.0)
    got = (
        f"{seconds:.0f} s, {failures:.0f} publishes failed, {during} spans acknowledged meanwhile, /readyz {ready}; {kept.text()}"
    )
    ok = alive and kept.whole and during > 0 and failures > 0 and ready == 503 and status == 0
    return f"{got}; {reason.strip()!r}", ok


async def _collector_away(context: Context, *flags: str) -> Got:
    seconds, data = context.scale(15.0, 600.0), context.folder / "data"
    with collector(context.folder) as store:
        await store.start()
        async with completions() as upstream:
            with sidecar(context.folder, "edge", upstream, url(store), *flags) as running:
                await running.start()
                traffic = Traffic(f"http://{running.addresses['proxy']}", rate=10)
                async with flowing(traffic) as task:
                    await until(lambda: len(traffic.answers) > 10, lambda: "no stream ends", 60.0)
                    store.kill()
                    await store.ended()
                    await pause(seconds)
                    waiting = (await metrics(running.addresses["admin"])).get("handrail_sidecar_spool_bytes", 0.0)
                    await store.start()
                    await pause(2.0)
                    traffic.stopping = True
                    await task
                whole = sum(answer.whole for answer in traffic.answers)
                with contextlib.suppress(TimeoutError):
                    await until_stored(data / "store", whole, min(60.0, context.left_s()))
                await running.finish()
        await store.finish()
    lost, twice = await asyncio.to_thread(missing, data / "store", traffic.answers)
    got = f"{seconds:.0f} s, {waiting / 1024:.0f} KiB waited; {whole} of {len(traffic.answers)} streams whole; "
    return f"{got}{len(lost)} without a row, {twice} twice", whole == len(
        traffic.answers
    ) and not lost and not twice and waiting > 0


async def _away_with_spool(context: Context) -> Got:
    return await _collector_away(context, "--spool-dir", str(context.folder / "spool"))


_ALL = "every stream whole; when it is back every request has its row, once"

TRIALS = (
    Trial(
        name="store.down",
        group="store",
        expected="ten minutes (short: 20 s) without a store: acknowledges into the journal, /readyz 503; all stored after",
        seconds=35,
        long_seconds=700,
        beside=True,
        run=_store_down,
    ),
    Trial(
        name="store.collector_away",
        group="store",
        expected=f"the collector away for ten minutes (short: 15 s), spool in memory: {_ALL}",
        seconds=30,
        long_seconds=660,
        beside=True,
        run=_collector_away,
    ),
    Trial(
        name="store.collector_away_spool",
        group="store",
        expected=f"the same with spool.dir: {_ALL}",
        seconds=30,
        long_seconds=660,
        beside=True,
        run=_away_with_spool,
    ),
)
