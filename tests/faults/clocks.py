"""Step the wall clock while a process runs.

libfaketime intercepts its calls; the monotonic clock runs on unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from faults.evidence import loaded
from faults.processes import collector, pause, sidecar, url
from faults.traffic import CHUNKS, GAP_S, Traffic, completions, flowing, missing
from faults.trial import Context, Got, NotRunError, Trial
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.read import StoreReader
from harness.acknowledged import until, until_stored

STEPS: Final = {"hour_on": ("+1 h", 3600), "hour_back": ("-1 h", -3600), "ten_years_on": ("+10 years", 315_360_000)}
_LIBRARIES: Final = "/usr/lib/*/faketime/libfaketimeMT.so.1"


@dataclass(frozen=True, slots=True)
class _Clock:
    """The wall clock of processes with ``environment``."""

    file: Path

    @property
    def environment(self) -> Mapping[str, str]:
        libraries = glob.glob(_LIBRARIES)
        if not libraries:
            raise NotRunError("no libfaketime: apt-get install faketime")
        return {
            "LD_PRELOAD": libraries[0],
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
            "NO_FAKE_STAT": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def step(self, seconds: int) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n", encoding="ascii")
        new.replace(self.file)


def _clock(context: Context) -> _Clock:
    clock = _Clock(context.folder / "wall")
    clock.step(0)
    return clock


async def _of_collector(context: Context, seconds: int) -> Got:
    clock, long_s = _clock(context), context.scale(4.0, 60.0)
    with collector(context.folder, env=clock.environment) as running:
        async with loaded(running, context) as going:
            await pause(1.0)
            clock.step(seconds)
            during = await going.acknowledged_during(long_s)
            clock.step(0)
            back = await going.acknowledged_during(long_s)
            alive = running.alive
            kept = await going.settle(context.folder / "data")
    got = (
        f"{'alive' if alive else 'ended'}; {during} spans acknowledged after the step, {back} after the step back; {kept.text()}"
    )
    return (
        f"{got}; {running.tracebacks()} tracebacks",
        kept.whole and alive and during > 0 and back > 0 and not running.tracebacks(),
    )


async def _of_sidecar(context: Context, seconds: int) -> Got:
    clock, long_s, data = _clock(context), context.scale(3.0, 60.0), context.folder / "data"
    with collector(context.folder) as store:
        await store.start()
        async with completions() as upstream:
            spool = ("--spool-dir", str(context.folder / "spool"))
            with sidecar(context.folder, "edge", upstream, url(store), *spool, env=clock.environment) as running:
                await running.start()
                traffic = Traffic(f"http://{running.addresses['proxy']}")
                async with flowing(traffic) as task:
                    await until(lambda: len(traffic.answers) > 20, lambda: "no stream ends", 60.0)
                    for step in (seconds, 0):
                        clock.step(step)
                        await pause(long_s)
                    alive = running.alive
                    traffic.stopping = True
                    await task
                status = await running.finish()
        whole = sum(answer.whole for answer in traffic.answers)
        with contextlib.suppress(TimeoutError):
            await until_stored(data / "store", whole, 20.0)
        await store.finish()
    lost, twice = await asyncio.to_thread(missing, data / "store", traffic.answers)
    wrong, middle_s, apart_s = await asyncio.to_thread(_durations, data / "store", traffic)
    got = f"{whole} of {len(traffic.answers)} streams whole; {len(lost)} without a row, {twice} twice; status {status}; "
    got += f"{wrong} durations wrong, median {middle_s:.3f} s; {running.tracebacks()} tracebacks; starts {apart_s:.0f} s apart"
    ok = (
        apart_s > 0.9 * abs(seconds)
        and whole == len(traffic.answers)
        and not lost
        and not twice
        and not wrong
        and alive
        and status == 0
    )
    return got, ok and not running.tracebacks()


def _durations(store: Path, traffic: Traffic) -> tuple[int, float, float]:
    """Return how many rows have a duration that their client cannot have seen.

    Also returns the median duration and the spread of the starts, in s.
    """
    seen = {answer.request_id: answer.seconds for answer in traffic.answers}
    rows = StoreReader(store).requests(RequestFilter(limit=10_000))
    durations = [(row.duration_ns / 1e9, seen.get(row.client_request_id or "", 0.0)) for row in rows]
    wrong = sum(not CHUNKS * GAP_S * 0.9 <= duration <= client + 0.05 for duration, client in durations)
    starts = [row.started_unix_ns for row in rows] or [0]
    return wrong, statistics.median([duration for duration, _ in durations] or [0.0]), (max(starts) - min(starts)) / 1e9


def _trials() -> list[Trial]:
    found = []
    for name, (words, seconds) in STEPS.items():
        of_collector = f"{words} under load and back: alive, acknowledges on; 0 acknowledged spans lost, 0 doubled"
        of_sidecar = f"{words} amid streams and back: every stream whole, every request a row, durations as clients saw them"
        found += [
            _trial(f"clock.collector_{name}", of_collector, partial(_of_collector, seconds=seconds)),
            _trial(f"clock.sidecar_{name}", of_sidecar, partial(_of_sidecar, seconds=seconds)),
        ]
    return found


def _trial(name: str, expected: str, run: Callable[[Context], Awaitable[Got]]) -> Trial:
    return Trial(name=name, group="clock", expected=expected, seconds=15, long_seconds=150, beside=True, run=run)


TRIALS: tuple[Trial, ...] = tuple(_trials())
