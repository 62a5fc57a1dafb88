"""``kill -9`` and SIGSTOP with SIGCONT of each process under load."""

from __future__ import annotations

import signal
import time

from faults.evidence import loaded
from faults.processes import collector, pause, standing_still
from faults.trial import Context, Got, Trial


async def _collector_killed(context: Context) -> Got:
    kills, random = int(context.scale(4, 20)), context.random()
    with collector(context.folder) as running:
        async with loaded(running, context) as going:
            for _ in range(kills):
                await pause(random.uniform(0.0, 1.2))
                running.kill(signal.SIGKILL)
                await running.ended()
                await running.start()
                await going.goes_on()
            kept = await going.settle(context.folder / "data")
    return f"{kills} kills, {going.load.retries} retries; {kept.text()}", kept.whole


async def _collector_stopped(context: Context) -> Got:
    seconds = context.scale(8.0, 60.0)
    with collector(context.folder) as running:
        async with loaded(running, context) as going:
            async with standing_still(running):
                await pause(seconds)
            began_s = time.monotonic()
            await going.goes_on()
            again_s = time.monotonic() - began_s
            kept = await going.settle(context.folder / "data")
    return f"stood still {seconds:.0f} s, acknowledged again {again_s:.1f} s after; {kept.text()}", kept.whole


TRIALS = (
    Trial(
        name="kill.collector",
        group="kill",
        expected="killed again and again under load: acknowledged spans 0 lost, 0 doubled, each request one row",
        seconds=30,
        long_seconds=150,
        run=_collector_killed,
    ),
    Trial(
        name="kill.collector_stopped",
        group="kill",
        expected="SIGSTOP under load, then SIGCONT: goes on by itself, 0 lost, 0 doubled",
        seconds=25,
        long_seconds=90,
        beside=True,
        run=_collector_stopped,
    ),
)
