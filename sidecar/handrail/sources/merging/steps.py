"""Engine steps as rollups of about a second, and in full where one took far longer than the usual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from handrail.records import Iteration, Source
from handrail.sources.merging.bounds import MergeLimits
from handrail.sources.merging.engine import Engine

FAR_ABOVE: Final = 3  # times the usual step
LEAST_FULL_NS: Final = 20_000_000  # a shorter one is no stall of any stream
FULL_A_WINDOW: Final = 20
_WEIGHT: Final = 32  # steps over which the usual is averaged


@dataclass(slots=True)
class Window:
    """The steps of one process since the last rollup."""

    pid: int
    offset_ns: int  # wall clock minus monotonic
    usual_ns: float = 0.0
    seen: int = 0
    full: int = 0
    steps: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # end, fields


class Steps:
    """Windows by boot."""

    def __init__(self, engine: Engine, limits: MergeLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._windows: dict[str, Window] = {}

    def step(self, boot: str, pid: int, offset_ns: int, end_ns: int, said: Mapping[str, Any]) -> Iterator[Iteration]:
        window = self._windows.setdefault(boot, Window(pid, offset_ns))
        window.offset_ns = offset_ns
        if window.steps and end_ns - window.steps[0][1]["begin_ns"] >= self._limits.rollup_ns:
            yield self._rollup(window)
        window.steps.append((end_ns, said))
        took = max(0, end_ns - said["begin_ns"])
        unusual = window.seen >= _WEIGHT and took > FAR_ABOVE * window.usual_ns and took >= LEAST_FULL_NS
        if unusual and window.full < FULL_A_WINDOW:
            window.full += 1
            yield self._iteration(window, [(end_ns, said)], full=True)
        window.seen += 1
        # the plain mean of the first ones, then a moving one that no single step moves far
        weight = min(window.seen, _WEIGHT)
        window.usual_ns += (
            min(took, FAR_ABOVE * window.usual_ns) if window.seen > _WEIGHT else took
        ) / weight - window.usual_ns / weight

    def due(self, now_ns: int) -> Iterator[Iteration]:
        """Rollups of windows that are old enough, although no further step came."""
        for window in self._windows.values():
            if window.steps and now_ns - window.steps[0][1]["begin_ns"] >= self._limits.rollup_ns:
                yield self._rollup(window)

    def close_boot(self, boot: str) -> Iterator[Iteration]:
        window = self._windows.pop(boot, None)
        if window is not None and window.steps:
            yield self._rollup(window)

    def _rollup(self, window: Window) -> Iteration:
        steps, window.steps, window.full = window.steps, [], 0
        return self._iteration(window, steps, full=False)

    def _iteration(self, window: Window, steps: list[tuple[int, Mapping[str, Any]]], *, full: bool) -> Iteration:
        begin = steps[0][1]["begin_ns"]
        longest, longest_end = max((end - said["begin_ns"], end) for end, said in steps)
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
            busy_ns=sum(max(0, end - said["begin_ns"]) for end, said in steps),
            longest_ns=max(0, longest),
            longest_at_ns=max(0, longest_end - begin),
            requests=max(said["requests"] for _, said in steps),
            prefill_requests=sum(said["prefill_requests"] for _, said in steps),
            prefill_tokens=sum(said["prefill_tokens"] for _, said in steps),
            decode_tokens=sum(said["decode_tokens"] for _, said in steps),
            preemptions=sum(said["preemptions"] for _, said in steps),
            running=last["running"],
            waiting=last["waiting"],
            kv_landing_steps=sum(1 for _, said in steps if said["landed"]),
        )
