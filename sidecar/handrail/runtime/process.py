"""Common base of our long-running processes.

It has a fast loop, signals that stop the process, and components that start and end in order.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Protocol

from opentelemetry.trace import Tracer

from handrail import conventions as names
from handrail.printable import printable_lines
from handrail.telemetry.tracing import NO_TRACES, detached_span

log = logging.getLogger(__name__)


class Stop:
    """Stop flag, set by the first SIGTERM or Ctrl-C.

    A second signal ends the process at once, for a person who will not wait for a drain.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: int) -> None:
        if self._event.is_set():
            log.warning("second %s: exiting at once", signal.Signals(number).name)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        log.info("%s: stopping", signal.Signals(number).name)
        self._event.set()

    async def wait(self) -> None:
        """Return when the process received a signal to stop."""
        await self._event.wait()


class Component(Protocol):
    """A part of a process with a life of its own.

    1. Creation opens nothing and needs no event loop. Raises ``OSError`` or ``ValueError`` for settings that cannot work.
    2. ``start`` binds sockets, opens files, begins tasks, and returns once the component does its work. Raises ``OSError`` that
       names what is not available.
    3. It runs, in the loop that called ``start``.
    4. ``shutdown`` takes no new work, gives running work up to ``drain_seconds``, and passes on what waits. It works without
       ``start``, and twice.
    """

    async def start(self) -> None: ...

    async def shutdown(self, drain_seconds: float, /) -> None: ...


async def start(stack: AsyncExitStack, name: str, component: Component, drain_seconds: float, tracer: Tracer = NO_TRACES) -> None:
    """Start ``component``; ``stack`` shuts it down, in reverse order.

    ``tracer``: makes a span of the start and one of the end.
    Raises the exceptions of ``start``. A component that does not end cleanly is logged and keeps no other from ending.
    """
    with detached_span(tracer, names.OWN_PART_START, {names.OWN_PART: name}):
        await component.start()
    stack.push_async_callback(_shutdown, name, component, drain_seconds, tracer)


async def _shutdown(name: str, component: Component, drain_seconds: float, tracer: Tracer) -> None:
    try:
        with detached_span(tracer, names.OWN_PART_STOP, {names.OWN_PART: name}):
            await component.shutdown(drain_seconds)
    except Exception:
        log.exception("%s did not end cleanly", name)


def freeze_gc(young: int) -> None:
    """Exclude objects loaded at start from the garbage collector.

    It examines new objects only every ``young`` allocations. A full collection walks every object of every imported module: 14 ms
    measured for a sidecar, during which no byte is passed on. Objects that are alive at the call are never examined again; call
    it once everything has started.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, 20, 50)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run ``main`` on uvloop where it is available.

    An ``OSError`` or ``ValueError`` from it (a port taken, a folder not writable) is reported in one line, with exit code 1.
    """
    try:
        return _runner()(main)
    except (OSError, ValueError) as error:
        print(printable_lines(f"handrail: {error}"), file=sys.stderr)
        return 1


def _runner() -> Callable[[Coroutine[Any, Any, int]], int]:
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.run
    runner: Callable[[Coroutine[Any, Any, int]], int] = uvloop.run
    return runner
