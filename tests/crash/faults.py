"""The life of ``crash.life`` on a failing disk.

The disk is full from some operation on until there is room again, or one sync fails.
Senders send again what was refused. A collector whose journal's disk failed is started again. Maintenance that failed is due
again.
In the end everything is there once, also when the power goes then.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from crash.crashes import Crashes, Outcome, Tally, stored
from crash.life import Collector, Step, UpkeepFailedError
from crash.recorded import Point, Recorded
from doubles.power_disk import Disk, Operation, RecordingFiles
from handrail.otlp.signals import Retryable
from harness.pipelines import Clock, taken

T = TypeVar("T")

FULL, FAILED_SYNC = "disk full", "failed sync"
GROWING = frozenset({"folder", "create", "write", "sync", "sync_folder", "rename"})
TRIES = 3


class Fault:
    """Makes operations fail, counted from 0, until it is ``relieved``."""

    def __init__(self, kind: str, at: int) -> None:
        self.struck = False
        self.files: RecordingFiles | None = None
        self._kind = kind
        self._left = at
        self._relieved = False

    def __call__(self, operation: Operation) -> None:
        """Fail where the fault strikes; called before each operation."""
        if self._relieved or operation.kind not in (GROWING if self._kind == FULL else ("sync",)):
            return
        self._left -= 1
        if self._left >= 0:
            return
        self.struck = True
        if self._kind == FULL:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert self.files is not None
        self.files.done.append(Operation("failed_sync", operation.path))
        self._relieved = True
        raise OSError(errno.EIO, "Input/output error")

    def relieve(self) -> None:
        """Make room again."""
        self._relieved = self._relieved or self.struck


class FaultyLife:
    """One life on a failing disk."""

    def __init__(self, root: Path, recorded: Recorded, fault: Fault) -> None:
        root.mkdir()
        self.root = root
        self.files = RecordingFiles(root, fault)
        fault.files = self.files
        self._recorded = recorded
        self._fault = fault
        self._clock = Clock.at(recorded.steps[0].at_unix_ns)

    async def run(self) -> str:
        """Live to the end; return what is wrong then, or ''."""
        collector = await self._started()
        for step in self._recorded.steps:
            self._clock.now = step.at_unix_ns
            if step.sent:
                collector = await self._send(collector, step)
            else:
                await self._tried(partial(self._act, collector, step.action))
        await collector.kill()
        view, wanted = stored(self.root), self._recorded.views[-1]
        names = [{frozenset(row.span_ids) for row in each.rows} for each in (view, wanted)]
        if view.twice:
            return f"{view.twice} twice"
        return "" if names[0] == names[1] and set(view.spans) == set(wanted.spans) else "another store than without the fault"

    async def _started(self) -> Collector:
        async def start() -> Collector:
            collector = Collector.open(self.root, self.files, self._clock)
            try:
                await collector.start()
            except BaseException:
                await collector.kill()
                raise
            return collector

        return await self._tried(start)

    async def _send(self, collector: Collector, step: Step) -> Collector:
        waiting = list(step.sent)
        for _ in range(TRIES):
            answers = await asyncio.gather(
                *(collector.journal.consume(each.signal, each.payload) for each in waiting), return_exceptions=True
            )
            waiting = [each for each, answer in zip(waiting, answers, strict=True) if isinstance(answer, Retryable)]
            if not waiting:
                await taken(collector.pipeline, collector.journal)
                return collector
            self._fault.relieve()
            if not collector.journal.healthy:
                await collector.kill()
                collector = await self._started()
        raise AssertionError("refused again and again")

    async def _act(self, collector: Collector, action: str) -> None:
        await collector.act(action)
        if collector.pipeline.stats.failing:
            raise OSError("the publish failed")

    async def _tried(self, act: Callable[[], Awaitable[T]]) -> T:
        try:
            return await act()
        except (OSError, UpkeepFailedError):
            self._fault.relieve()
            return await act()


def run(
    recorded: Recorded, crashes: Crashes, folder: Path, every: int, kinds: Sequence[str] = (FULL, FAILED_SYNC)
) -> dict[str, Tally]:
    """Run one life for each ``every``-th operation that a fault of a kind can strike.

    The power goes after each life.
    """
    tallies = {kind: Tally() for kind in kinds}
    end = recorded.points[-1]
    for kind, tally in tallies.items():
        at, struck = 0, True
        while struck:
            fault = Fault(kind, at)
            life = FaultyLife(folder / "faulty", recorded, fault)
            output = asyncio.run(life.run())
            struck = fault.struck
            if struck:
                tally.points += 1
                tally.add(kind, Outcome(wrong=bool(output), message=output), f"operation {at}")
                tally.add(f"{kind}, power lost in the end", _without_power(life, crashes, end), f"operation {at}")
            shutil.rmtree(life.root)
            at += every
    return tallies


def _without_power(life: FaultyLife, crashes: Crashes, end: Point) -> Outcome:
    disk = Disk()
    for operation in life.files.done:
        disk.apply(operation)
    left = dict(disk.left_by(None))["power lost, names too"]
    return crashes.after_start(left, end)
