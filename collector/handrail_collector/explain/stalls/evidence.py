"""Attribute a stall's time to what may have caused it.

Each part of the time goes to one cause only, measured evidence before inferred. The order:
1. time that the client held up, and pauses with a reason from the kernel;
2. the request's own preemption;
3. the cost of a slower GPU clock;
4. the work of long steps (recomputed tokens, other prompts' tokens): as much as so many tokens took in the engine's quick steps;
5. pauses without a reason, which a long step may itself have made by holding the interpreter's lock;
6. the work of long steps again, up to what so many tokens took in the engine's slow steps;
7. KV that landed, for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from handrail_collector.stitch.engine_activity import LEAST_TOKENS, READING_NS, EngineTimeline, GpuClockReadings, LongStep

LATE_NS: Final = 10_000_000
"""Most time between the end of a step and the moment its token is seen.

A KV landing may also lie this long before what it delays.
"""

SLOWED: Final = 0.9
"""Share of the usual clock below which a GPU is slow, if something throttles it."""

NO_REASON: Final = "held"
"""The plugin's reason for a pause that the kernel does not explain.

See plugin/pauses.py.
"""

PLAUSIBLE: Final = 2.0
"""Most that tokens may have taken here, as a multiple of other long steps.

It applies to quick and to slow steps alike.
"""

Interval = tuple[int, int]
"""(begin, end)."""


class StallCause(str, Enum):
    """Why a stream stalled."""

    PREFILL_COSCHEDULED = "prefill_coscheduled"  # a step also computed other prompts
    KV_LANDING = "kv_landing"  # the engine worked on another request's KV load
    PREEMPTION = "preemption"  # this request was preempted, or a step recomputed what a preemption had discarded
    GPU_THROTTLED = "gpu_throttled"
    HOST_PAUSE = "host_pause"  # a process on the path had no processor, or collected garbage
    CLIENT_BACKPRESSURE = "client_backpressure"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallWindow:
    """One stall and all evidence about its time.

    ``begin`` and ``end`` are wall clock of the engine's host.
    ``doings``: the engine's activity; None where it reported nothing, or where its own stream did not stall.
    ``observer``: the activity of another process that saw the stall; ``seen``: the stall's time on that process's clock.
    ``preempted``: when the request was preempted.
    ``held_ns``: how long nothing was read because the client took nothing.
    """

    begin: int
    end: int
    median_ns: int
    doings: EngineTimeline | None = None
    observer: EngineTimeline | None = None
    seen: Interval = (0, 0)
    preempted: tuple[Interval, ...] = ()
    held_ns: int = 0

    @property
    def excess_ns(self) -> int:
        """How much longer the gap is than the median."""
        return self.end - self.begin - self.median_ns

    @property
    def last_steps(self) -> Interval:
        """The time in which the last step of the stall ended, if steps caused it.

        A stream's token comes at the end of each step that includes the stream. So other work in a step delays the token that
        ended the stall, and none before it. That step may be an ordinary one after steps that computed prompts alone.
        """
        return self.end - max(LATE_NS + 2 * self.median_ns, (self.end - self.begin) // 4), self.end + LATE_NS


@dataclass(slots=True)
class Shares:
    """The time of a stall that each cause accounts for, in ns.

    ``words``: the strongest evidence of each cause, as text.
    """

    left_ns: int
    ns: dict[StallCause, int] = field(default_factory=dict)
    words: dict[StallCause, str] = field(default_factory=dict)
    most_ns: dict[StallCause, int] = field(default_factory=dict)  # largest single amount

    def give(self, cause: StallCause, ns: float, words: str) -> None:
        """Give a cause as much of ``ns`` as is left."""
        taken = min(self.left_ns, round(ns))
        if taken > 0:
            if taken > self.most_ns.get(cause, 0):
                self.most_ns[cause], self.words[cause] = taken, words
            self.ns[cause] = self.ns.get(cause, 0) + taken
            self.left_ns -= taken


def attribute_time(of: StallWindow) -> Shares:
    """Return how much of a stall each cause accounts for."""
    found = Shares(of.end - of.begin)
    found.give(StallCause.CLIENT_BACKPRESSURE, of.held_ns, f"the client read nothing for {ms(of.held_ns)}")
    if of.observer is not None:
        for reasoned in (True, False):
            _pauses(found, of.observer, *of.seen, reasoned=reasoned)
    doings, begin, end = of.doings, of.begin, of.end
    if doings is None:
        return found
    taken = _pauses(found, doings, begin, end, reasoned=True)
    own = _clipped(of.preempted, begin, end)
    apart = _length(_union([*own, *taken])) - _length(taken)
    found.give(StallCause.PREEMPTION, apart, f"the request was preempted for {ms(apart)}")
    taken = _union([*taken, *own])
    slowed_ns = _slowed(found, doings, begin, end)
    work = _work(doings, of, taken, slowed_ns)
    work.give(found, slow=False)
    _pauses(found, doings, begin, end, reasoned=False)
    work.give(found, slow=True)
    landed = {landing.request_id: landing.tokens for landing in doings.landings.during(begin - LATE_NS, end)}
    if landed:
        whose = f"of {len(landed)} requests" if len(landed) > 1 else "of a request"
        words = f"KV {whose} ({sum(landed.values()):,} tokens) was posted or completed then"
        found.give(StallCause.KV_LANDING, found.left_ns - of.median_ns, words)
    return found


def _pauses(found: Shares, doings: EngineTimeline, begin: int, end: int, *, reasoned: bool) -> list[Interval]:
    """Account for pauses of the engine's processes, with or without a reason.

    The text names the longest pause. Returns the union of the pauses.
    """
    pauses = [each for each in doings.pauses.during(begin, end) if (each.why != NO_REASON) is reasoned]
    if not pauses:
        return []
    union = _union(_clipped([(each.begin_unix_ns, each.end_unix_ns) for each in pauses], begin, end))
    longest = max(pauses, key=lambda each: min(each.end_unix_ns, end) - max(each.begin_unix_ns, begin))
    paused_ns = longest.end_unix_ns - longest.begin_unix_ns
    found.give(StallCause.HOST_PAUSE, _length(union), f"process {longest.process} paused for {ms(paused_ns)}: {longest.why}")
    return union


def _slowed(found: Shares, doings: EngineTimeline, begin: int, end: int) -> float:
    """Account for the slowest GPU's throttled clock; return the time that it cost."""
    worst, words = 0.0, ""
    for key, gpu in doings.gpus.items():
        lost, lowest, why = 0.0, 1.0, ""
        for first, last, share, reasons in slow_times(gpu, begin, end):
            common = min(last, end) - max(first, begin)
            if common > 0:
                lost += common * (1 - share)
                if share < lowest:
                    lowest, why = share, ", ".join(reasons)
        if lost > worst:
            worst, words = lost, f"GPU {key} ran at {lowest:.0%} of its usual clock: {why}"
    found.give(StallCause.GPU_THROTTLED, worst, words)
    return worst


def slow_times(gpu: GpuClockReadings, begin: int, end: int) -> Iterable[tuple[int, int, float, tuple[str, ...]]]:
    """Yield when a GPU ran slow around a time: (begin, end, share of clock, reasons).

    Each reading stands for the time half-way to its neighbours.
    """
    usual = gpu.usual_hertz()
    readings = list(gpu.readings.during(begin - READING_NS, end + READING_NS))
    for number, reading in enumerate(readings):
        if reading.reasons and reading.hertz < SLOWED * usual:
            at = reading.begin_unix_ns
            before = readings[number - 1].begin_unix_ns if number else at
            after = readings[number + 1].begin_unix_ns if number + 1 < len(readings) else at
            first, last = at - min(at - before, READING_NS) // 2, at + min(after - at, READING_NS) // 2
            yield first, last, reading.hertz / usual, reading.reasons


@dataclass(frozen=True, slots=True)
class _ForeignWork:
    """Long steps that computed tokens of other streams.

    ``more_ns``: how much longer than usual each step was, in time that is not attributed yet.
    ``a_token_ns``: as in ``EngineTimeline``.
    """

    steps: tuple[LongStep, ...] = ()
    more_ns: tuple[float, ...] = ()
    a_token_ns: tuple[float, float] | None = None

    def give(self, found: Shares, *, slow: bool) -> None:
        """Account for the time that so many tokens plausibly took in quick steps.

        ``slow``: account for what they took beyond that, as in the engine's slow steps.
        """
        tokens = [(step.resumed_tokens, step.prefill_tokens) for step in self.steps]
        words = [self._words([each[number] for each in tokens], what) for number, (_, what) in enumerate(_COMPUTED)]
        for step_tokens, more_ns in zip(tokens, self.more_ns, strict=True):
            whole = sum(step_tokens)
            if self.a_token_ns is None:
                given_ns = 0.0 if slow else more_ns
            else:
                quick_ns, slow_ns = (min(more_ns, PLAUSIBLE * each * whole) for each in self.a_token_ns)
                given_ns = slow_ns - quick_ns if slow else quick_ns
            for (cause, _), part, text in zip(_COMPUTED, step_tokens, words, strict=True):
                found.give(cause, given_ns * part / whole, text)

    def _words(self, tokens: Sequence[int], what: str) -> str:
        those = [(_took_ns(step), step.usual_ns, part) for step, part in zip(self.steps, tokens, strict=True) if part]
        if not those:
            return ""
        took_ns, usual_ns, _ = max(those)
        whole = sum(tokens)
        steps_of = f"{len(those)} steps of up to" if len(those) > 1 else "a step of"
        text = f"{steps_of} {ms(took_ns)}, usual are {ms(usual_ns)}, computed {whole:,} {what}"
        if self.a_token_ns is not None and sum(self.more_ns) > PLAUSIBLE * (quick_ns := self.a_token_ns[0] * whole):
            text += f" (its quicker steps took {ms(round(quick_ns))} for as many)"
        return text


_COMPUTED: Final = (
    (StallCause.PREEMPTION, "tokens again after a preemption"),
    (StallCause.PREFILL_COSCHEDULED, "prompt tokens"),
)


def _work(doings: EngineTimeline, of: StallWindow, taken: Sequence[Interval], slowed_ns: float) -> _ForeignWork:
    """Return the long steps that may have delayed the stream.

    ``taken`` and ``slowed_ns`` are attributed already.
    """
    begin, end = of.begin - LATE_NS, of.end
    earliest, latest = of.last_steps
    heavy = [
        step
        for step in doings.steps.during(begin, end)
        if of.begin < step.end_unix_ns <= latest  # a step that ended earlier produced the previous token
        and step.prefill_tokens + step.resumed_tokens >= LEAST_TOKENS
        and _took_ns(step) > 0
    ]
    if not any(step.end_unix_ns >= earliest for step in heavy):
        return _ForeignWork()
    heavy.sort(key=lambda step: step.begin_unix_ns - step.end_unix_ns)
    more = []
    for step in heavy:
        here = _clipped([(step.begin_unix_ns, step.end_unix_ns)], begin, end)
        free_ns = _length(_union([*here, *taken])) - _length(taken)
        more.append(max(0.0, free_ns * (1 - step.usual_ns / _took_ns(step)) - slowed_ns))
        slowed_ns = max(0.0, slowed_ns - free_ns)
    return _ForeignWork(tuple(heavy), tuple(more), doings.a_token_ns())


def _took_ns(step: LongStep) -> int:
    return step.end_unix_ns - step.begin_unix_ns


def _clipped(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    return [(max(first, begin), min(last, end)) for first, last in intervals if first < end and last > begin]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for first, last in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined


def _length(intervals: Iterable[Interval]) -> int:
    return sum(last - first for first, last in intervals)


def ms(ns: int) -> str:
    """Format nanoseconds as milliseconds."""
    return f"{ns / 1e6:,.0f} ms"
