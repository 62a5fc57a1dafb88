"""Send three times as much OTLP as the collector can process.

The load lasts until the journal is full and longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from faults.processes import collector, metrics, pause
from faults.trial import Context, Got, Trial
from harness.acknowledged import Load, loading, stored, until_stored

_SENDERS = 12


async def _overload(context: Context) -> Got:
    """Send prepared batches as fast as the collector takes them.

    The small journal fills.
    """
    seconds, batches, data = context.scale(12.0, 120.0), int(context.scale(10, 80)), context.folder / "data"
    with collector(context.folder, "--journal-max-bytes", "16MiB") as running:
        await running.start()
        address = f"http://{running.addresses['otlp_http']}"
        loads = [Load(address, timeout_s=10.0, name=f"{at}-", compression="none") for at in range(_SENDERS)]
        for load in loads:
            await asyncio.to_thread(load.prepare, batches)
        began_s = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            sending = [await stack.enter_async_context(loading(load)) for load in loads]
            biggest, page = 0, {}
            while time.monotonic() < began_s + seconds and running.alive:
                await asyncio.sleep(0.5)
                biggest = max(biggest, running.resident_bytes())
            page = await metrics(running.addresses["api"])
            worked_off = page.get("handrail_collector_spans_total", 0.0)
            offered = sum(len(load.acknowledged) + load.refused_spans for load in loads)
            for load in loads:
                load.stopping = True
            await asyncio.gather(*sending)
        await until_stored(data / "store", sum(load.requests for load in loads), min(120.0, context.left_s()))
        after = Load(address, name="after-", pause_s=0.05)
        async with loading(after) as task:
            await pause(2.0)
            after.stopping = True
            await task
        await until_stored(data / "store", sum(load.requests for load in (*loads, after)), min(60.0, context.left_s()))
        status = await running.finish()
    kept = await asyncio.to_thread(stored, data / "store", *loads, after)
    delays = [delay for load in loads for delay in load.delays_s]
    times = offered / max(1.0, worked_off)
    got = f"offered {offered / seconds:.0f} spans/s, {times:.1f} times what was worked off; {len(delays)} refusals, "
    got += f"{sum(delay > 0 for delay in delays)} with a delay; at most {biggest >> 20} MiB resident; {kept.text()}; "
    got += f"after it {after.retries} refusals; status {status}"
    ok = kept.whole and delays and all(delay > 0 for delay in delays) and times >= 3 and not after.retries and status == 0
    return got, bool(ok and biggest < 1 << 30)


TRIALS = (
    Trial(
        name="overload.otlp",
        group="overload",
        expected="3 times what it takes: refusals with a delay, bounded memory, 0 acknowledged spans lost, 0 doubled",
        seconds=45,
        long_seconds=300,
        run=_overload,
    ),
)
