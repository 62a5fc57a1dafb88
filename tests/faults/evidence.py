"""Run the common part of most trials: a collector under load, and a fault.

At the end it compares the load with what is in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from faults.processes import Running, pause
from faults.trial import Context
from harness.acknowledged import Load, Stored, loading, stored, until, until_stored

_BATCH: Final = 80
_PAUSE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Loaded:
    """A running collector, its load, and the task that sends it."""

    collector: Running
    load: Load
    sending: asyncio.Task[None]
    context: Context

    async def goes_on(self, spans: int = 1, timeout_s: float = 60.0) -> float:
        """Return the seconds until ``spans`` more spans are acknowledged.

        Raises ``TimeoutError``, or what ended the load.
        """
        began_s, before = time.monotonic(), len(self.load.acknowledged)

        def more() -> bool:
            if self.sending.done():
                self.sending.result()
            return len(self.load.acknowledged) >= before + spans

        await until(
            more, lambda: f"nothing more acknowledged; {self.collector.last_line()}", min(timeout_s, self.context.left_s())
        )
        return time.monotonic() - began_s

    async def acknowledged_during(self, seconds: float) -> int:
        """Return how many spans are acknowledged in the given seconds."""
        before = len(self.load.acknowledged)
        await pause(seconds)
        return len(self.load.acknowledged) - before

    async def settle(self, data: Path) -> Stored:
        """End the load, wait until all of it is stored, end the collector, and compare."""
        self.load.stopping = True
        await asyncio.wait_for(self.sending, self.context.left_s())
        with contextlib.suppress(TimeoutError):
            await until_stored(data / "store", self.load.requests, min(90.0, self.context.left_s()))
        await self.collector.finish()
        return await asyncio.to_thread(stored, data / "store", self.load)


@contextlib.asynccontextmanager
async def loaded(
    collector: Running, context: Context, *, batch: int = _BATCH, pause_s: float = _PAUSE_S
) -> AsyncIterator[Loaded]:
    """Start a collector and a load; both work when the context is entered."""
    await collector.start()
    load = Load(f"http://{collector.addresses['otlp_http']}", batch=batch, pause_s=pause_s, timeout_s=3.0)
    async with loading(load) as sending:
        going = Loaded(collector, load, sending, context)
        await going.goes_on(batch * 6)
        yield going


@dataclass(frozen=True, slots=True)
class Borne:
    """How a collector withstood a fault."""

    during: int  # spans acknowledged during the fault
    again_s: float  # seconds from its end to the next acknowledged span
    ended: int | None  # exit status, if the collector ended by itself
    kept: Stored

    def text(self) -> str:
        end = "alive" if self.ended is None else f"ended with status {self.ended}, started again"
        return f"{end}; {self.during} spans acknowledged meanwhile, again {self.again_s:.1f} s after; {self.kept.text()}"


async def bear(
    going: Loaded,
    data: Path,
    begin: Callable[[], object],
    mend: Callable[[], object],
    seconds: float,
    look: Callable[[], Awaitable[None]] | None = None,
    restart: Callable[[], Awaitable[bool]] | None = None,
) -> Borne:
    """Let a fault begin and end.

    ``look`` runs towards its end. ``restart`` tells whether a collector that still runs needs a restart.
    """
    begin()
    try:
        during = await going.acknowledged_during(seconds)
        if look is not None:
            await look()
    finally:
        mend()
    ended = going.collector.status
    again = ended is not None
    if restart is not None and not again and await restart():
        await going.collector.finish()
        again = True
    began_s = time.monotonic()
    if again:
        going.collector.end()
        await going.collector.start()
    await going.goes_on()
    again_s = time.monotonic() - began_s
    await going.goes_on(_BATCH * 6)
    return Borne(during, again_s, ended, await going.settle(data))
