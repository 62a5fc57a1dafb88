"""Record pauses of the sidecar itself.

Its stamps are late then, and a gap that it saw may come from itself (case B12).
A pause shows as a call that the event loop runs late: no processor, garbage collection, or long work of the sidecar.
It is a pause of this process, as the plugin reports those of the engine's, and is on /metrics.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from handrail import conventions as names
from handrail.metrics.registry import MetricDef
from handrail.plugin.events import PAUSED
from handrail.plugin.pauses import SLEEP_S, PauseWatch
from handrail.records import Process, ProcessEvent, ProcessEventKind, Sink, Source

SIDECAR = "sidecar"


class OwnPauses:
    """Watches the event loop that calls ``start``.

    ``count`` and ``paused_ns``: of all pauses since then.
    """

    def __init__(
        self,
        process: Process,
        sink: Sink,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self.count = 0
        self.paused_ns = 0
        self._process = process
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._watch = PauseWatch(self._paused, clock)
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._watch.begin()
        self._watch.watch_collector()
        self._sleep()

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Stop; works without ``start`` and twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watch.unwatch_collector()
        self._watch.end()

    def _sleep(self) -> None:
        due_ns = self._clock() + round(SLEEP_S * 1e9)
        self._timer = asyncio.get_running_loop().call_later(SLEEP_S, self._wake, due_ns)

    def _wake(self, due_ns: int) -> None:
        self._watch.woke(due_ns)
        self._sleep()

    def _paused(self, event: tuple[Any, ...]) -> None:
        name, end_ns, begin_ns, reason, bound_ns = event
        assert name == PAUSED
        lasted_ns = end_ns - begin_ns
        self.count += 1
        self.paused_ns += lasted_ns
        self._sink(
            ProcessEvent(
                process=self._process,
                source=Source.PROXY,
                at_unix_ns=begin_ns + self._wall() - self._clock(),
                kind=ProcessEventKind.PAUSED,
                pid=os.getpid(),
                process_kind=SIDECAR,
                detail=reason,
                at_bound_ns=bound_ns,
                duration_ns=lasted_ns,
            )
        )


def pause_rows(own: OwnPauses) -> list[MetricDef]:
    """Rows of /metrics."""
    prefix, what = f"{names.METRIC_SIDECAR}_pause", "pauses of this process's event loop of 20 ms or more"
    return [
        MetricDef(f"{prefix}s", "counter", f"Number of {what}; its timestamps are late then", lambda: own.count),
        MetricDef(f"{prefix}_seconds", "counter", f"Time in {what}", lambda: own.paused_ns / 1e9),
    ]
