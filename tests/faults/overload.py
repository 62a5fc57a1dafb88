"""Three times as much OTLP as the collector can work off, for as long as its journal has room and longer."""

from __future__ import annotations

import asyncio
import time

from acknowledged import Load, loading, stored, until_stored
from faults.processes import collector, metrics
from faults.trial import Context, Got, Trial

_SENDERS = 6


async def _overload(context: Context) -> Got:
    """Many senders without a pause against a small journal: what comes in beyond the pipeline's pace fills it."""
    seconds = context.scale(20.0, 240.0)
    with collector(context.folder, "--journal-max-bytes", "16MiB") as running:
        await running.start()
        loads = [
            Load(f"http://{running.addresses['otlp_http']}", batch=160, timeout_s=10.0, name=f"{at}-") for at in range(_SENDERS)
        ]
        began_s, biggest = time.monotonic(), 0
        data = context.folder / "data"
        sending = [asyncio.create_task(load.run()) for load in loads]
        try:
            while time.monotonic() < began_s + seconds:
                await asyncio.sleep(0.5)
                biggest = max(biggest, running.resident_bytes())
                for task in sending:
                    if task.done():
                        task.result()
            page = await metrics(running.addresses["api"])
            taken = sum(len(load.acknowledged) for load in loads)
            tried = taken + sum(load.refused_spans for load in loads)
            for load in loads:
                load.stopping = True
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
            for load in loads:
                await load.client.close()
        alive = running.alive
        await until_stored(data / "store", sum(load.requests for load in loads), min(90.0, context.left_s()))
        after = Load("http://" + running.addresses["otlp_http"], name="after-", pause_s=0.01)
        async with loading(after) as task:
            await asyncio.sleep(3.0)
            after.stopping = True
            await task
        quiet = after.retries
        await until_stored(data / "store", sum(load.requests for load in (*loads, after)), min(60.0, context.left_s()))
        status = await running.finish()
    kept = await asyncio.to_thread(stored, data / "store", *loads, after)
    delays = [delay for load in loads for delay in load.delays_s]
    refused = page.get("handrail_collector_refused_requests_total", 0.0)
    got = f"offered {tried / max(1, taken):.1f} times what it took ({taken / seconds:.0f} spans/s), {len(delays)} refusals, "
    got += (
        f"{sum(d > 0 for d in delays)} with a delay, counted {refused:.0f}, at most {biggest >> 20} MiB resident; {kept.text()}; "
    )
    got += f"after it {quiet} refusals"
    ok = (
        alive
        and kept.whole
        and len(delays) > 0
        and all(d > 0 for d in delays)
        and tried >= 3 * taken
        and not quiet
        and status == 0
    )
    return got, ok and biggest < 1 << 30


TRIALS = (
    Trial(
        name="overload.otlp",
        group="overload",
        expected="3 times what it takes: refusals with a delay, bounded memory, 0 acknowledged spans lost, 0 doubled",
        seconds=75,
        long_seconds=400,
        run=_overload,
    ),
)
