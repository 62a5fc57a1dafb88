"""Pauses of the sidecar itself, reported as what they were.

The test sets the clock and the lateness of the loop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable

from prometheus_client import generate_latest

from builders.records import EPOCH, MS, process
from handrail.metrics.registry import Registry
from handrail.plugin.pauses import GC, HELD, LATE_NS, QUEUED, SLEEP_S
from handrail.records import ProcessEvent, ProcessEventKind, Role, Source
from handrail_sidecar.sources.self_pauses import OwnPauses, pause_rows

DUE_NS = round(SLEEP_S * 1e9)


class Loop:
    """The event loop, its clock, and the reported events.

    ``wake`` ends the sleep late by that much.
    """

    def __init__(self) -> None:
        self.now_ns = 5_000 * MS
        self.events: list[ProcessEvent] = []
        self.waiting: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self.own = OwnPauses(process(Role.DECODE), self._take, clock=lambda: self.now_ns, wall=lambda: EPOCH + self.now_ns)

    def _take(self, event: object) -> None:
        assert isinstance(event, ProcessEvent)
        self.events.append(event)

    def wake(self, late_ns: int = 0) -> None:
        self.now_ns += DUE_NS + late_ns
        assert self.own._timer is not None
        call, given = self.own._timer._callback, self.own._timer._args  # type: ignore[attr-defined]
        self.own._timer.cancel()
        call(*given)


async def test_a_late_turn_of_the_loop_is_a_pause_of_this_process() -> None:
    loop = Loop()
    await loop.own.start()
    gc.callbacks.remove(loop.own._watch._collected)  # the test run's own collections do not count here
    loop.wake()
    loop.wake(LATE_NS - 1)
    assert loop.events == []
    began_ns = loop.now_ns + DUE_NS
    loop.wake(300 * MS)
    loop.wake()
    await loop.own.shutdown()
    (event,) = loop.events
    assert (event.kind, event.source, event.pid, event.process_kind) == (
        ProcessEventKind.PAUSED,
        Source.PROXY,
        os.getpid(),
        "sidecar",
    )
    assert (event.at_unix_ns, event.duration_ns, event.at_bound_ns) == (EPOCH + began_ns, 300 * MS, DUE_NS)
    assert event.detail in (HELD, QUEUED)
    page = generate_latest(Registry(pause_rows(loop.own)).registry).decode()
    assert "handrail_sidecar_pauses_total 1" in page
    assert "handrail_sidecar_pause_seconds_total 0.3" in page


async def test_a_long_collection_of_garbage_is_one() -> None:
    loop = Loop()
    await loop.own.start()
    gc.callbacks.remove(loop.own._watch._collected)
    loop.own._watch._collected("start", {"generation": 2})
    loop.now_ns += 80 * MS
    loop.own._watch._collected("stop", {"generation": 2})
    await loop.own.shutdown()
    assert [(event.detail, event.duration_ns) for event in loop.events] == [(GC, 80 * MS)]


async def test_nothing_is_emitted_after_the_end_and_the_end_may_come_twice() -> None:
    loop = Loop()
    await loop.own.shutdown()  # never begun
    before = list(gc.callbacks)
    await loop.own.start()
    timer = loop.own._timer
    await loop.own.shutdown()
    await loop.own.shutdown()
    assert timer is not None
    assert timer.cancelled()
    assert gc.callbacks == before
    await asyncio.sleep(0)
    assert loop.events == []


async def test_a_real_loop_that_stands_is_noticed() -> None:
    process_events: list[ProcessEvent] = []
    noticed = asyncio.Event()

    def take(event: object) -> None:
        assert isinstance(event, ProcessEvent)
        process_events.append(event)
        if event.detail != GC and event.duration_ns >= 200 * MS:
            noticed.set()

    own = OwnPauses(process(Role.DECODE), take)
    await own.start()
    try:
        time.sleep(0.3)  # noqa: ASYNC251 (this is what stands)
        await asyncio.wait_for(noticed.wait(), 60)
    finally:
        await own.shutdown()
    assert process_events
