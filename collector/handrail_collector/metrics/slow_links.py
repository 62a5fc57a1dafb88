"""Find the slow links once a minute, so that an alert can use them.

The analysis is that of ``handrail links``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from handrail_collector.links.findings import SLOW, LinkFindingKind
from handrail_collector.links.report import LinkLine
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.read import StoreReader

SECOND: Final = 10**9
WINDOW_NS: Final = 600 * SECOND
EVERY_S: Final = 60.0
MOST_PAIRS: Final = 50
MOST_HAND_OFFS: Final = 5_000
"""Most hand-offs of a window that are analysed; the last ones count."""

LEAST_TIMED: Final = 5
"""Fewest timed hand-offs for an alert about a link's rate.

``handrail links`` shows links with fewer.
"""

_BY_RATE: Final = frozenset({LinkFindingKind.SLOW_PATH, LinkFindingKind.FAR_BELOW_LINE})

log = logging.getLogger(__name__)

Slow = dict[tuple[str, ...], float]
"""Value 1 by source (producer), target (consumer) and finding."""


def slow(lines: Iterable[LinkLine]) -> Slow:
    """Select the slow links with the most bytes moved, at most ``MOST_PAIRS``.

    ``lines``: links with the most bytes first.
    """
    found: Slow = {}
    pairs: set[tuple[str, str]] = set()
    for line in lines:
        pair = line.figures.link.producer, line.figures.link.consumer
        for kind in sorted({finding.kind for finding in line.findings} & SLOW):
            if kind in _BY_RATE and line.figures.timed < LEAST_TIMED:
                continue
            pairs.add(pair)
            if len(pairs) > MOST_PAIRS:
                return found
            found[pair[0], pair[1], kind.value] = 1.0
    return found


class SlowLinks:
    """Find slow links periodically between ``start`` and ``shutdown``.

    A failed pass drops the result of the last one, because the current state is not known.
    """

    def __init__(self, reader: StoreReader, *, every_s: float = EVERY_S, now_unix_ns: Callable[[], int] = time.time_ns) -> None:
        self.found: Slow = {}
        self.looks = 0
        self.failures = 0
        self.spent_ns = 0
        self._reader = reader
        self._every_s = every_s
        self._now_unix_ns = now_unix_ns
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the periodic passes."""
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Stop after the current pass. Idempotent; works without ``start``."""
        self._ending.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    def look(self) -> None:
        """Run one pass in the calling thread."""
        from handrail_collector.links.answer import period  # slow the first time

        began_ns = time.perf_counter_ns()
        now = self._now_unix_ns()
        self.looks += 1
        try:
            lines = period(self._reader, now - WINDOW_NS, now, most=MOST_HAND_OFFS, most_links=MOST_PAIRS).lines
            self.found = slow(lines)
        except (OSError, StoreDamagedError) as error:
            self._failed(error)
        except Exception:
            self._failed(None)
        self.spent_ns += time.perf_counter_ns() - began_ns

    def _failed(self, error: Exception | None) -> None:
        self.failures += 1
        self.found = {}
        if error is not None:
            log.warning("checking the links failed: %s", error)
        elif self.failures == 1:
            log.exception("checking the links failed")

    async def _run(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._every_s)
            if not self._ending.is_set():
                await asyncio.to_thread(self.look)
