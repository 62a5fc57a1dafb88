"""Merge engine steps into rollups of about a second.

A step that took far longer than usual is recorded in full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Final

from handrail.records import Iteration, Source
from handrail_sidecar.plugin_merge.bounds import Bounded, MergeLimits
from handrail_sidecar.plugin_merge.engine import ObservedEngine

FAR_ABOVE: Final = 2.5  # times the usual step; less makes a stall (handrail/stalls.py), of which the step may be a part
LEAST_FULL_NS: Final = 15_000_000
FULL_A_WINDOW: Final = 20
_REMEMBERED: Final = 64  # steps whose median is the usual one; a mean would follow the long steps that are to be found
MOST_STEPS: Final = 4096  # in one rollup, however close together their reported times are
MOST_WINDOWS: Final = 1024
_RENEWED_EVERY: Final = 16  # steps: sorting so many takes 3 us


@dataclass(slots=True)
class StepWindow:
    """The steps of one process since the last rollup."""

    pid: int
    offset_ns: int  # wall clock minus monotonic
    usual_ns: int | None = None  # None: too few steps so far
    seen: int = 0
    lately: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    full: int = 0
    steps: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # end, fields

    def learn(self, took_ns: int) -> None:
        """Add one step."""
        self.lately.append(took_ns)
        self.seen += 1
        if self.seen >= _REMEMBERED // 2 and self.seen % _RENEWED_EVERY == 0:
            self.usual_ns = median_low(self.lately)


class Steps:
    """Windows by boot."""

    def __init__(self, engine: ObservedEngine, limits: MergeLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._windows: Bounded[StepWindow] = Bounded(MOST_WINDOWS)

    def step(self, boot: str, pid: int, offset_ns: int, end_ns: int, fields: Mapping[str, Any]) -> Iterator[Iteration]:
        window = self._windows.get(boot)
        if window is None:
            if len(self._windows) >= MOST_WINDOWS:
                yield from self.close_boot(next(iter(self._windows)))
            window = StepWindow(pid, offset_ns)
            self._windows.put(boot, window)
        window.offset_ns = offset_ns
        full = len(window.steps) >= MOST_STEPS
        if full or (window.steps and end_ns - window.steps[0][1]["begin_ns"] >= self._limits.rollup_ns):
            yield self._rollup(window)
        window.steps.append((end_ns, fields))
        took = max(0, end_ns - fields["begin_ns"])
        usual = window.usual_ns
        if usual is not None and took >= max(LEAST_FULL_NS, FAR_ABOVE * usual) and window.full < FULL_A_WINDOW:
            window.full += 1
            yield self._iteration(window, [(end_ns, fields)], full=True)
        window.learn(took)

    def due(self, now_ns: int) -> Iterator[Iteration]:
        """Rollups of windows that are old enough, although no further step came."""
        for window in self._windows.values():
            if window.steps and now_ns - window.steps[0][1]["begin_ns"] >= self._limits.rollup_ns:
                yield self._rollup(window)

    def close(self) -> Iterator[Iteration]:
        """Return all that waits, whatever its times."""
        for window in self._windows.values():
            if window.steps:
                yield self._rollup(window)

    def close_boot(self, boot: str) -> Iterator[Iteration]:
        window = self._windows.pop(boot, None)
        if window is not None and window.steps:
            yield self._rollup(window)

    def _rollup(self, window: StepWindow) -> Iteration:
        steps, window.steps, window.full = window.steps, [], 0
        return self._iteration(window, steps, full=False)

    def _iteration(self, window: StepWindow, steps: list[tuple[int, Mapping[str, Any]]], *, full: bool) -> Iteration:
        begin = steps[0][1]["begin_ns"]
        longest, longest_end = max((end - fields["begin_ns"], end) for end, fields in steps)
        last = steps[-1][1]
        return Iteration(
            process=self._engine.process,
            source=Source.PLUGIN,
            started_unix_ns=begin + window.offset_ns,
            duration_ns=max(0, steps[-1][0] - begin),
            steps=len(steps),
            full=full,
            engine_id=self._engine.engine_id,
            core=window.pid,
            busy_ns=sum(max(0, end - fields["begin_ns"]) for end, fields in steps),
            longest_ns=max(0, longest),
            longest_at_ns=max(0, longest_end - begin),
            requests=max(fields["requests"] for _, fields in steps),
            prefill_requests=sum(fields["prefill_requests"] for _, fields in steps),
            prefill_tokens=sum(fields["prefill_tokens"] for _, fields in steps),
            decode_tokens=sum(fields["decode_tokens"] for _, fields in steps),
            preemptions=sum(fields["preemptions"] for _, fields in steps),
            running=last["running"],
            waiting=last["waiting"],
            kv_landing_steps=sum(1 for _, fields in steps if fields["landed"]),
            resumed_tokens=sum(fields["resumed_tokens"] or 0 for _, fields in steps),
            usual_ns=(window.usual_ns or 0) if full else 0,
        )
