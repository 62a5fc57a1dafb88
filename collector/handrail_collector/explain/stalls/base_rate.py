"""Measure how often a cause's evidence is present when no stream stalls.

The comparison uses windows as long as the stall, of the same process.
Windows come from the time in which streams of the process ran, less the time in which they stalled. Where stalls fill much of
the time (a processor quota, a long prompt in chunks), windows from all of it would show the cause as often as the stalls do,
and no cause could ever be named.
Evidence that is merely frequent is frequent in these windows too: that is why they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from handrail_collector.explain.stalls.cumulative import CumulativeTotal, Stretches, curve_of, stretches
from handrail_collector.explain.stalls.evidence import LATE_NS, StallCause, StallWindow, slow_times
from handrail_collector.stitch.engine_activity import EngineTimeline, LongStep, Second

AROUND_NS: Final = 120_000_000_000
"""How far from a stall windows are drawn."""

WINDOWS: Final = 256
ENOUGH: Final = 0.7
"""Share of the stall's evidence that a window needs to count as a hit."""

Amount = tuple[float, float, float]
"""Evidence in an interval: (begin, end, amount)."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Base:
    """An engine's evidence around some time, and the ordinary time to compare with.

    ``curves``: the running total of each cause's evidence.
    """

    origin_ns: int
    curves: dict[StallCause, CumulativeTotal]
    ordinary: Stretches

    def chance(self, cause: StallCause, of: StallWindow, doings: EngineTimeline) -> float:
        """Return the share of windows without a stall that hold as much of ``cause``.

        A window counts if it holds at least ``ENOUGH`` of what ``doings`` had during the stall.
        Windows are as long as the stall; for a step's work, as long as the time in which the stall's last step must have ended.
        The share is never 0, because little time proves little: a Beta prior of a half each, over as many windows as do not
        overlap.
        It is 1 where nothing can be compared.
        """
        begin, end = of.last_steps if cause in OF_STEPS else (of.begin - LATE_NS, of.end)
        length = float(end - begin)
        total = self.ordinary.total_ns
        here = curve_of(_amounts(cause, doings, begin, end), begin).within(0, end - begin)
        if total < length or here <= 0:
            return 1.0
        found = 0
        if (curve := self.curves.get(cause)) is not None:
            starts: Floats = (np.arange(WINDOWS, dtype=np.float64) + 0.5) * ((total - length) / WINDOWS)
            found = np.count_nonzero(self.ordinary.amounts(curve, starts, length) >= ENOUGH * here)
        share, apart = found / WINDOWS, total / length
        return (share * apart + 0.5) / (apart + 1)


def base_of(doings: EngineTimeline, at_unix_ns: int) -> Base:
    """Return the comparison data of an engine around a time, from all reports so far."""
    first, last = at_unix_ns - AROUND_NS, at_unix_ns + AROUND_NS
    ran = [(max(first, s.begin_unix_ns), min(last, s.end_unix_ns)) for s in doings.streams.during(first, last)]
    stalled = [(s.begin_unix_ns - LATE_NS, s.end_unix_ns + LATE_NS) for s in doings.stalls.during(first, last)]
    curves = ((cause, _amounts(cause, doings, first, last)) for cause in _INFERRED)
    return Base(
        origin_ns=first,
        curves={cause: curve_of(amounts, first) for cause, amounts in curves if amounts},
        ordinary=stretches(ran, stalled, first),
    )


OF_STEPS: Final = frozenset({StallCause.PREFILL_COSCHEDULED, StallCause.PREEMPTION})
"""Causes that are work of a step beside the stream's own tokens.

Their evidence appears at the end of that step.
"""

_INFERRED: Final = (
    StallCause.PREFILL_COSCHEDULED,
    StallCause.PREEMPTION,
    StallCause.KV_LANDING,
    StallCause.HOST_PAUSE,
    StallCause.GPU_THROTTLED,
)


def _amounts(cause: StallCause, doings: EngineTimeline, first: int, last: int) -> list[Amount]:
    """Return the evidence of a cause: how much of it there was, and when."""
    if cause is StallCause.PREFILL_COSCHEDULED:
        return _tokens(doings, first, last, lambda each: each.prefill_tokens)
    if cause is StallCause.PREEMPTION:
        return _tokens(doings, first, last, lambda each: each.resumed_tokens)
    if cause is StallCause.KV_LANDING:
        return [(x.begin_unix_ns, x.begin_unix_ns, float(x.tokens)) for x in doings.landings.during(first, last)]
    if cause is StallCause.HOST_PAUSE:
        return [(p.begin_unix_ns, p.end_unix_ns, p.end_unix_ns - p.begin_unix_ns) for p in doings.pauses.during(first, last)]
    return list(_lost(doings, first, last)) if cause is StallCause.GPU_THROTTLED else []


def _tokens(doings: EngineTimeline, first: int, last: int, tokens: Callable[[LongStep | Second], int]) -> list[Amount]:
    """Return the tokens of steps as evidence over time.

    A long step's tokens count at its end; those of other steps are spread over their second.
    """
    seconds = list(doings.seconds.during(first, last))
    if seconds:
        first, last = min(first, seconds[0].begin_unix_ns), max(last, seconds[-1].end_unix_ns)
    steps = list(doings.steps.during(first, last))
    found = [(float(s.end_unix_ns), float(s.end_unix_ns), float(tokens(s))) for s in steps if tokens(s)]
    place = 0
    for second in seconds:
        rest = tokens(second)
        while place < len(steps) and steps[place].begin_unix_ns < second.begin_unix_ns:
            place += 1
        at = place
        while at < len(steps) and steps[at].end_unix_ns <= second.end_unix_ns:
            rest -= tokens(steps[at])
            at += 1
        if rest > 0:
            found.append((float(second.begin_unix_ns), float(second.end_unix_ns), float(rest)))
    return found


def _lost(doings: EngineTimeline, first: int, last: int) -> Iterator[Amount]:
    for gpu in doings.gpus.values():
        for begin, end, share, _ in slow_times(gpu, first, last):
            yield begin, end, (end - begin) * (1 - share)
