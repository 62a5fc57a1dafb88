"""The recorded life, crashed before each operation in every way.

After each crash it is started again and compared with what was acknowledged.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from crash.life import Collector, Sent, requests_of
from crash.recorded import Point, Recorded
from crash.view import View, first_answer_of, listed_files, view_of
from doubles.power_disk import Disk, Operation, RecordingFiles
from handrail_collector.counters import CounterKey
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.manifest import MANIFEST
from harness.pipelines import Clock

EXPIRING = {"expires": "retention", "over-quota": "quota"}
"""Requests that leave the store, each with the action that removes it."""


START = "start after a crash"
FOLDED_OF = 5
"""The number of starts for each one whose store is also compacted.

That takes as long as all the rest.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a start after one crash: counts of what must not happen."""

    lost: int = 0
    twice: int = 0
    torn: int = 0
    wrong: int = 0  # rows that differ from what was sent, and counts that differ from what was stored
    message: str = ""


@dataclass(slots=True)
class Tally:
    """All crashes of one kind of operation."""

    points: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    twice: int = 0
    torn: int = 0
    wrong: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, way: str, outcome: Outcome, where: str) -> None:
        """Count one crash."""
        self.ways[way] += 1
        self.lost += outcome.lost
        self.twice += outcome.twice
        self.torn += outcome.torn
        self.wrong += outcome.wrong
        if outcome.message:
            self.messages.append(f"{where}, {way}: {outcome.message}")

    @property
    def crashes(self) -> int:
        """Crashes in all ways."""
        return sum(self.ways.values())


class Crashes:
    """Every crash point of a recorded life.

    ``every``: the test takes only one crash point in that many.
    ``again``: of the crashes, it also crashes the start of one in that many; 0 for none.
    """

    def __init__(self, recorded: Recorded, folder: Path, every: int = 1, again: int = 1) -> None:
        self.tallies: dict[str, Tally] = {}
        self.starts = 0  # starts that were run; all other crashes left a disk that an earlier start had
        self._recorded = recorded
        self._folder = folder
        self._every = every
        self._again = again
        self._roots = 0
        self._known: dict[tuple[bytes, int], Outcome] = {}  # a start depends only on the disk and on what was acknowledged
        self._crashed_starts: set[tuple[bytes, int]] = set()

    def run(self) -> None:
        """Crash at all chosen points."""
        disk = Disk()
        for number, point in enumerate(self._recorded.points):
            if number % self._every == 0 or point.coming is None:
                self._crash(number, point, disk)
            if point.coming is not None:
                disk.apply(point.coming)

    def _crash(self, number: int, point: Point, disk: Disk) -> None:
        tally = self.tallies.setdefault(point.name, Tally())
        tally.points += 1
        for which, (way, left) in enumerate(disk.left_by(point.coming)):
            where = f"point {number} (step {point.step})"
            tally.add(way, self._outcome(left, point), where)
            if self._again and (number + which) % self._again == 0:
                self._crash_the_start(left, point, where)

    def _crash_the_start(self, left: Disk, point: Point, where: str) -> None:
        """Crash a start at each of its operations, once for every disk that it may find."""
        known = (left.key(), point.step)
        if known in self._crashed_starts:
            return
        self._crashed_starts.add(known)
        tally = self.tallies.setdefault(START, Tally())
        disk = left.copy()
        for coming in (*self._operations_of_start(left, point), None):
            tally.points += 1
            for way, again in disk.left_by(coming):
                tally.add(way, self._outcome(again, point), f"{where}, then in its start")
            if coming is not None:
                disk.apply(coming)

    def _operations_of_start(self, left: Disk, point: Point) -> list[Operation]:
        root = self._root(left)
        files = RecordingFiles(root)
        collector = Collector.open(root, files, Clock.at(point.at_unix_ns))
        collector.journal._log.sync()
        collector.close_files()
        shutil.rmtree(root)
        return files.done

    def _root(self, left: Disk) -> Path:
        self._roots += 1
        root = self._folder / f"{self._roots}"
        left.write_to(root)
        return root

    # --- what came of it ------------------------------------------------------------------------------------------------------

    def _outcome(self, left: Disk, point: Point) -> Outcome:
        known = (left.looks(), point.step)
        if known not in self._known:
            self._known[known] = self._judged(left, point)
        return self._known[known]

    def _judged(self, left: Disk, point: Point) -> Outcome:
        torn = self._torn(left, point)
        return Outcome(torn=1, message=torn) if torn else self.after_start(left, point)

    def after_start(self, left: Disk, point: Point) -> Outcome:
        """Start a collector on the disk and return the outcome."""
        self.starts += 1
        root = self._root(left)
        outcome = asyncio.run(self._started(root, point))
        shutil.rmtree(root)
        return outcome

    def _torn(self, left: Disk, point: Point) -> str:
        """Return what is wrong for a reader before any start after the crash, or ''."""
        manifest = left.names.get(f"store/{MANIFEST}")
        data = b"" if manifest is None else manifest.now
        found: dict[str, bytes] = {}
        for path in listed_files(data):
            content = left.names.get(f"store/{path}")
            if content is None or content.now != self._recorded.contents.get(path):
                return f"{path} is listed and not whole"
            found[path] = content.now
        view = view_of(data, found)
        return "" if not view.twice and self._recorded.allows(point.step, view) else "neither the state before nor the one after"

    async def _started(self, root: Path, point: Point) -> Outcome:
        """Start a collector after the crash and compare the store at each stage.

        It publishes, sends again what was not acknowledged, lets time pass, and compacts.
        """
        clock = Clock.at(point.at_unix_ns)
        collector = Collector.open(root, RecordingFiles(root), clock)
        await collector.start()
        await collector.pipeline.flush()
        steps = self._recorded.steps
        acknowledged = [sent for step in steps[: point.step] for sent in step.sent]
        lost = self._expected_spans(acknowledged, point) - set(stored(root).spans)
        if lost:
            return Outcome(lost=len(lost), message=f"{len(lost)} acknowledged spans are not in the store after the start")
        if point.step < len(steps):
            await collector.send(steps[point.step].sent)
            acknowledged += steps[point.step].sent
        clock.now += 30 * SECOND
        await collector.act("decide")
        await collector.act("publish")
        outcome = self._compared(stored(root), acknowledged, point, collector)
        if outcome == Outcome() and self.starts % FOLDED_OF == 0:
            clock.now += 3 * HOUR_NS
            await collector.act("compaction")
            await collector.act("rollup")
            outcome = self._compared(stored(root), acknowledged, point, collector)
            if output := first_answer_of(root / "store"):
                outcome = replace(outcome, torn=outcome.torn + 1, message=output)
        await collector.kill()
        return outcome

    def _compared(self, view: View, sent: list[Sent], point: Point, collector: Collector) -> Outcome:
        expected = self._expected_spans(sent, point)
        allowed = {span_id for each in sent for span_id in each.spans if not self._is_gone(each.request, point)}
        requests = {evidence for evidence in requests_of(sent) if evidence & allowed}
        due = {evidence for evidence in requests if evidence <= expected}
        names = {frozenset(row.span_ids) for row in view.rows}
        counts = collector.pipeline.observed
        counted = {
            "spans": counts[CounterKey.SPANS] == counts[CounterKey.SPANS_STORED] == sum(len(each.spans) for each in sent),
            "requests of an edge": counts[CounterKey.EDGE_REQUESTS] == sum(each.edge for each in sent),
        }
        wrong = [f"{name} counted" for name, right in counted.items() if not right]
        if not due <= names <= requests:
            wrong.append(f"rows of {len(names)} requests, {len(due)} expected")
        if not set(view.spans) <= allowed:
            wrong.append("spans that had left the store")
        reported_events = {event for each in sent for event in each.events}
        lost = len(expected - set(view.spans)) + len(reported_events - set(view.events)) + view.loads_lost
        output = "; ".join([*([f"{lost} spans lost"] if lost else []), *([f"{view.twice} twice"] if view.twice else []), *wrong])
        return Outcome(lost=lost, twice=view.twice, wrong=len(wrong), message=output)

    def _expected_spans(self, sent: list[Sent], point: Point) -> set[str]:
        return {span_id for each in sent for span_id in each.spans if not self._may_be_gone(each.request, point)}

    def _left_at(self, request: str) -> int:
        """Return the step in which the request leaves the store."""
        action = EXPIRING.get(request)
        actions = [step.action for step in self._recorded.steps]
        return actions.index(action) if action else len(actions)

    def _may_be_gone(self, request: str, point: Point) -> bool:
        return point.step >= self._left_at(request)

    def _is_gone(self, request: str, point: Point) -> bool:
        return point.step > self._left_at(request)


def stored(root: Path) -> View:
    """Return what is in the store, read from the bytes of its files."""
    store = root / "store"
    data = (store / MANIFEST).read_bytes() if (store / MANIFEST).exists() else b""
    return view_of(data, {path: (store / path).read_bytes() for path in listed_files(data)})
