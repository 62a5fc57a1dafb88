"""The life of ``crash.life``, run once and recorded.

The record has each operation, and what readers see before it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from crash.life import Collector, Step, script
from crash.view import View, first_answer_of, listed_files, view_of
from doubles.power_disk import Operation, RecordingFiles
from handrail_collector.store.manifest import MANIFEST
from handrail_collector.store.schema import Table
from harness.pipelines import Clock

JOURNAL = ("journal start", "journal append", "journal roll", "journal seal", "journal release")
STORE = ("store start", "publish", "compaction", "rollup", "removal", "retention", "quota")


@dataclass(frozen=True, slots=True)
class Point:
    """The moment before one operation of the life, or its end (``coming`` is None)."""

    coming: Operation | None
    name: str  # one of JOURNAL or STORE
    step: int  # the script's step around it; earlier steps are done
    at_unix_ns: int


@dataclass(slots=True)
class Recorded:
    """One whole life as recorded."""

    steps: list[Step]
    points: list[Point] = field(default_factory=list)
    views: list[View] = field(default_factory=list)  # before each step, and twice after the last
    contents: dict[str, bytes] = field(default_factory=dict)  # of every file that was ever in the manifest
    inside: list[tuple[int, View]] = field(default_factory=list)  # step, and what a reader saw in it
    disagreeing: list[str] = field(default_factory=list)  # first answers that the rows did not give
    rolled: int = 0  # first answers that rested on a rollup
    missing: list[str] = field(default_factory=list)  # files that an earlier reader could not open any more

    def allows(self, step: int, view: View) -> bool:
        """Return whether ``view`` is the state before ``step`` or the one after it."""
        return view.described in [known.described for known in self.views[step : step + 2]]

    def torn_reads(self) -> list[str]:
        """Return what readers saw that was neither state."""
        return (
            self.missing
            + self.disagreeing
            + [f"step {at}" for at, view in self.inside if view.twice or not self.allows(at, view)]
        )


class Recorder:
    """Runs the life once and reads the store before every operation.

    It reads as any other process might.
    """

    def __init__(self, root: Path) -> None:
        self.recorded = Recorded(script())
        root.mkdir()
        self._root = root
        self._clock = Clock()
        self._files = RecordingFiles(root, self._before)
        self._step = 0
        self._action = "store start"
        self._manifest = b""
        self._view = View((), ())
        self._open: set[str] = set()  # files that a reader may still have open
        self._newest_segment = ""
        self._synced: set[frozenset[str]] = set()

    def run(self) -> Recorded:
        """Run the life to its end."""
        asyncio.run(self._live())
        self.recorded.points.append(Point(None, "removal", self._step, self._clock.now))
        return self.recorded

    async def _live(self) -> None:
        recorded, clock = self.recorded, self._clock
        clock.now = recorded.steps[0].at_unix_ns
        collector = Collector.open(self._root, self._files, clock)
        await collector.start()
        await collector.settled()
        for number, step in enumerate(recorded.steps):
            self._look()
            recorded.views.append(self._view)
            self._step, self._action, clock.now = number, step.action, step.at_unix_ns
            await collector.do(step)
        self._step = len(recorded.steps)
        self._look()
        recorded.views += [self._view] * 2
        await collector.kill()

    def _before(self, operation: Operation) -> None:
        self._look()
        if self._step < len(self.recorded.steps) and self.recorded.views:
            self.recorded.inside.append((self._step, self._view))
        self.recorded.points.append(Point(operation, self._named(operation), self._step, self._clock.now))

    def _named(self, operation: Operation) -> str:
        if not operation.path.startswith("journal"):
            return self._action
        if operation.kind == "unlink":
            return "journal release"
        if operation.kind == "create":
            first, self._newest_segment = not self._newest_segment, operation.path
            return "journal start" if first else "journal roll"
        if not self.recorded.views:
            return "journal start"
        return "journal seal" if operation.kind == "sync" and operation.path != self._newest_segment else "journal append"

    def _look(self) -> None:
        """Read the store as two readers do.

        One begins now. The other began before the last change of the manifest and still opens its files.
        """
        store = self._root / "store"
        data = (store / MANIFEST).read_bytes() if (store / MANIFEST).exists() else b""
        gone = {path for path in self._open if not (store / path).exists()}
        if self._action == "removal":
            self._open -= gone  # their grace time is over
        else:
            self.recorded.missing += sorted(gone)
        if data != self._manifest:
            self._manifest = data
            for path in listed_files(data):
                self._open.add(path)
                self.recorded.contents.setdefault(path, (store / path).read_bytes())
            self._view = view_of(data, self.recorded.contents)
            self._ask_first(store)

    def _ask_first(self, store: Path) -> None:
        """Compare the first answer, from rollups, with the rows of the same moment."""
        files = frozenset(listed_files(self._manifest))
        if files in self._synced or not any(path.startswith(f"{Table.ROLLUPS.value}/") for path in files):
            return  # the same files give the same answer; without rollups nothing is compared
        self._synced.add(files)
        self.recorded.rolled += 1
        if output := first_answer_of(store):
            self.recorded.disagreeing.append(f"step {self._step}: {output}")
