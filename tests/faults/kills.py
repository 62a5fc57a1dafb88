"""Send ``kill -9``, and SIGSTOP with SIGCONT, to each process under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from faults.evidence import loaded
from faults.processes import QUICK, collector, pause, standing_still
from faults.restartable import Restartable
from faults.traffic import Traffic, flowing
from faults.trial import Context, Got, Trial
from handrail_collector.store.read import StoreReader
from harness.acknowledged import row_keys, until
from harness.real_fleet import Shape, finish


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
            again_s = await going.goes_on()
            await going.goes_on(80 * 6)
            kept = await going.settle(context.folder / "data")
    return f"stood still {seconds:.0f} s, acknowledged again {again_s:.1f} s after; {kept.text()}", kept.whole


@dataclass(frozen=True, slots=True)
class _Member:
    """One process of the fleet."""

    name: str
    what: str


_MEMBERS = (
    _Member("edge", "the edge sidecar"),
    _Member("sidecar-p0", "P's sidecar"),
    _Member("sidecar-d0", "D's sidecar"),
    _Member("engine-p0", "P's engine"),
    _Member("engine-d0", "D's engine"),
    _Member("router", "the router"),
)
_FLUSHED_S = 1.5
"""Seconds until a sidecar has sent the evidence of a finished stream.

It is three times the flush interval.
"""


async def _of_fleet(context: Context, member: _Member) -> Got:
    """Stop and continue one member, then kill and restart it, while streams flow."""
    rounds, still_s = int(context.scale(1, 6)), context.scale(3.0, 10.0)
    shape = Shape(load=None, collector_flags=QUICK, beside_flags=("--gpu-sample", "off"))
    fleet = Restartable("faults", context.folder / "fleet", shape, seed=context.seed)
    try:
        finish(fleet.starting(), 120.0)
        traffic = Traffic(fleet.url, rate=4, timeout_s=90.0)
        killed: list[float] = []
        async with flowing(traffic) as task:
            await until(lambda: sum(a.whole for a in traffic.answers) >= 5, lambda: _fails(traffic), 60.0)
            for _ in range(rounds):
                await _stop(fleet, member, still_s)
                await _works(traffic)
                await pause(_FLUSHED_S)
                killed += [time.monotonic(), await _kill(fleet, member)]
                await _works(traffic)
            traffic.stopping = True
            await task
        others = [name for name in _names(fleet) if name != member.name and fleet[name].poll() is not None]
        rows = await _rows(fleet, context.folder / "fleet" / "data" / "store", len(traffic.answers))
    finally:
        fleet.end(8.0)
    return _judged(traffic, killed, rows, others, member, rounds)


async def _stop(fleet: Restartable, member: _Member, seconds: float) -> None:
    os.kill(fleet[member.name].pid, signal.SIGSTOP)
    try:
        await pause(seconds)
    finally:
        os.kill(fleet[member.name].pid, signal.SIGCONT)


async def _kill(fleet: Restartable, member: _Member) -> float:
    """Kill the member, start it again, and return when it is ready."""
    old = fleet[member.name]
    os.kill(old.pid, signal.SIGKILL)
    await until(lambda: old.poll() is not None, lambda: f"{member.name} does not end", 10.0)
    child = fleet.again(member.name)
    await until(child.read_ready, lambda: f"{member.name} is not ready again: {child.tail()}", 60.0)
    return time.monotonic()


async def _works(traffic: Traffic) -> None:
    """Wait until a new stream is answered whole."""
    began_s = time.monotonic()
    await until(lambda: any(a.whole and a.began_s > began_s for a in traffic.answers), lambda: _fails(traffic), 60.0)


def _fails(traffic: Traffic) -> str:
    last = traffic.answers[-1] if traffic.answers else None
    return f"no stream is whole; the last: {last.status} {last.error}" if last else "no stream ends"


def _names(fleet: Restartable) -> tuple[str, ...]:
    hosts = fleet.shape.hosts
    return ("collector", "edge", "router", *(f"{kind}-{host}" for kind in ("sidecar", "engine") for host in hosts))


async def _rows(fleet: Restartable, store: Path, count: int) -> Counter[str]:
    """Return how many rows each client id has.

    It waits until all are there or nothing more comes.
    """
    reader = StoreReader(store)
    rows: Counter[str] = Counter()
    with contextlib.suppress(TimeoutError):
        for _ in range(75):
            rows = Counter(await asyncio.to_thread(row_keys, reader))
            if len(rows) >= count:
                break
            await asyncio.sleep(0.2)
    fleet["collector"].terminate()
    await asyncio.to_thread(fleet["collector"].join, 60.0)
    return Counter(await asyncio.to_thread(row_keys, reader))


def _judged(traffic: Traffic, killed: list[float], rows: Counter[str], others: list[str], member: _Member, rounds: int) -> Got:
    """Judge the streams and rows.

    A stream may end early only if a kill falls into its time. A row may be missing only where the edge was killed by then.
    """
    spans = list(zip(killed[::2], killed[1::2], strict=True))

    def hit(began_s: float, ended_s: float) -> bool:
        return any(began_s <= until_s and ended_s >= from_s for from_s, until_s in spans)

    broken = [a for a in traffic.answers if not a.whole]
    wrong = [a for a in broken if not hit(a.began_s, a.ended_s)]
    whole = [a for a in traffic.answers if a.whole]
    gone = [a for a in whole if a.request_id not in rows]
    lost = [a for a in gone if member.name != "edge" or not hit(a.began_s, a.ended_s + _FLUSHED_S)]
    twice = sum(times > 1 for times in rows.values())
    got = f"{rounds} times each; {len(whole)} of {len(traffic.answers)} streams whole, {len(broken)} cut by the kill"
    got += f", {len(wrong)} otherwise; {len(lost)} finished streams without a row, {twice} rows twice"
    if wrong:
        got += f" (first: {wrong[0].status} {wrong[0].error})"
    if others:
        got += f"; ended too: {', '.join(others)}"
    return got, not wrong and not lost and not twice and not others


def _trial(member: _Member) -> Trial:
    cut = "streams go on after SIGCONT; after kill -9 only those open then are cut, the others and their rows whole, once"
    return Trial(
        name=f"kill.{member.name.replace('-', '_')}",
        group="kill",
        expected=f"{member.what}: {cut}",
        seconds=35,
        long_seconds=180,
        beside=True,
        run=partial(_of_fleet, member=member),
    )


TRIALS = (
    Trial(
        name="kill.collector",
        group="kill",
        expected="killed again and again under load: acknowledged spans 0 lost, 0 doubled, each request one row",
        seconds=20,
        long_seconds=150,
        run=_collector_killed,
    ),
    Trial(
        name="kill.collector_stopped",
        group="kill",
        expected="SIGSTOP under load, then SIGCONT: goes on by itself, 0 lost, 0 doubled",
        seconds=15,
        long_seconds=90,
        beside=True,
        run=_collector_stopped,
    ),
    *map(_trial, _MEMBERS),
)
