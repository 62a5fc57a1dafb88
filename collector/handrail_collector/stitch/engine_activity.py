"""Keep each engine's recent activity: the evidence that stall causes need.

Activity: steps, KV landings, pauses of processes, GPU clocks, and known stalls. ``stalls/cause.py`` compares a stall with it.
Times are wall clock of the engine's host; nothing here compares clocks of two hosts.
Memory is bounded by instance and by number: the engine without news for longest goes first, within an engine the oldest entry.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from handrail import conventions as names
from handrail.records import Iteration, KvFetch, ProcessEvent, ProcessEventKind
from handrail.records.devices import DeviceKind, DeviceRun
from handrail_collector.stitch.timeline import Timeline

REMEMBERED: Final = 4096
"""Most steps, seconds, landings, pauses, clock readings and stalls of one engine.

Each kind has this limit: an hour of seconds, minutes of long steps.
"""

CLOCK: Final = (names.GPU_CLOCK, "sm")
OWN_CHOICE: Final = frozenset({"application_clocks", "sync_boost"})
"""Reasons for a low clock that an operator has set; they are no throttling."""

READING_NS: Final = 1_000_000_000
"""How far from its time a clock reading is valid."""

LATELY: Final = 600
STEPS_LATELY: Final = 64
LEAST_STEPS: Final = 5
LEAST_TOKENS: Final = 32
"""Fewest prompt tokens that make a step long.

A request whose KV was loaded computes one.
"""

Activities = Iteration | KvFetch | ProcessEvent | DeviceRun


@dataclass(frozen=True, slots=True)
class LongStep:
    """One long step of an engine.

    ``usual_ns``: how long the engine's steps took at that time; 0 where unknown.
    """

    begin_unix_ns: int
    end_unix_ns: int
    usual_ns: int
    prefill_tokens: int
    resumed_tokens: int
    landed: bool


@dataclass(frozen=True, slots=True)
class Second:
    """The sum of all steps in about one second."""

    begin_unix_ns: int
    end_unix_ns: int
    decode_tokens: int
    prefill_tokens: int
    resumed_tokens: int


@dataclass(frozen=True, slots=True)
class Landing:
    """A moment at which the engine worked on a KV fetch.

    It posted the transfer, or noticed its end.
    ``tokens``: the tokens whose KV was loaded; 1 where unknown.
    """

    begin_unix_ns: int
    request_id: str
    tokens: int

    @property
    def end_unix_ns(self) -> int:
        return self.begin_unix_ns


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause of a process.

    ``process``: api, core, worker or sidecar, and its pid; ``why``: a reason from plugin/pauses.py.
    """

    begin_unix_ns: int
    end_unix_ns: int
    process: str
    why: str


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The clock of a GPU's multiprocessors, and the reasons that held it down."""

    begin_unix_ns: int
    hertz: float
    reasons: tuple[str, ...]

    @property
    def end_unix_ns(self) -> int:
        return self.begin_unix_ns


@dataclass(slots=True)
class GpuClockReadings:
    """The clock readings of one GPU."""

    readings: Timeline[ClockReading] = field(default_factory=lambda: Timeline(REMEMBERED))
    lately: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))
    _usual: tuple[int, float] = (0, 0.0)  # (number of readings when it was computed, value)
    _seen: int = 0

    def put(self, reading: ClockReading) -> None:
        """Add one reading."""
        self.readings.put(reading)
        self.lately.append(reading.hertz)
        self._seen += 1

    def usual_hertz(self) -> float:
        """Return the clock that the fastest tenth of the last minute's readings reach.

        There are ten readings a second.
        """
        worked_out, usual = self._usual
        if not usual or self._seen - worked_out >= LATELY // 10:
            usual = sorted(self.lately)[int(0.9 * (len(self.lately) - 1))]
            self._usual = self._seen, usual
        return usual


@dataclass(slots=True)
class BaseRateSample:
    """The stalls that began in one second, as one sample for the causes' base rates.

    Stalls of one second are not independent of each other.
    ``alone``: the number of stalls that one cause, and no other, can account for, by cause; '' counts those that no cause can.
    """

    begin_unix_ns: int
    stalls: int = 0
    alone: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamInterval:
    """A time in which a stream of this engine ran, or stalled."""

    begin_unix_ns: int
    end_unix_ns: int


@dataclass(slots=True)
class EngineTimeline:
    """The activity of one engine, or of an edge.

    An edge has only the pauses of its sidecar.
    """

    steps: Timeline[LongStep] = field(default_factory=lambda: Timeline(REMEMBERED))
    seconds: Timeline[Second] = field(default_factory=lambda: Timeline(REMEMBERED))
    landings: Timeline[Landing] = field(default_factory=lambda: Timeline(REMEMBERED))
    pauses: Timeline[Pause] = field(default_factory=lambda: Timeline(REMEMBERED))
    gpus: dict[str, GpuClockReadings] = field(default_factory=dict)
    token_costs: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=STEPS_LATELY))  # (ns per token, tokens)
    streams: Timeline[StreamInterval] = field(default_factory=lambda: Timeline(REMEMBERED))
    stalls: Timeline[StreamInterval] = field(default_factory=lambda: Timeline(4 * REMEMBERED))
    trials: OrderedDict[int, BaseRateSample] = field(default_factory=OrderedDict)  # by second
    newest_unix_ns: int = 0

    def see(self, at_unix_ns: int) -> None:
        """Note that a record of this time has arrived."""
        self.newest_unix_ns = max(self.newest_unix_ns, at_unix_ns)

    def a_token_ns(self) -> tuple[float, float] | None:
        """Return what one prompt token takes in long steps: two quartiles, in ns.

        The lower and the upper quartile of the tokens of the last long steps. None where there are fewer than ``LEAST_STEPS``
        steps.
        Lower quartile, because other things may have delayed some steps; upper, because all steps may be slow for a while.
        The quartiles are by tokens, because a delayed step with few tokens says little about the time of many.
        """
        if len(self.token_costs) < LEAST_STEPS:
            return None
        costs = sorted(self.token_costs)
        totals = list(accumulate(tokens for _, tokens in costs))
        return costs[bisect_right(totals, totals[-1] / 4)][0], costs[bisect_left(totals, totals[-1] * 3 / 4)][0]

    def trial(self, at_unix_ns: int) -> BaseRateSample:
        """Return the sample for stalls of this second; create it where there is none."""
        second = at_unix_ns // 1_000_000_000
        found = self.trials.get(second)
        if found is None:
            found = self.trials[second] = BaseRateSample(at_unix_ns)
            if len(self.trials) > MAX_TRIALS:
                self.trials.popitem(last=False)
        return found


MAX_TRIALS: Final = 256
MAX_GPUS: Final = 64


@dataclass(slots=True)
class Activity:
    """The recent activity of each engine, by instance (host:port)."""

    max_engines: int = 1024
    _engines: OrderedDict[str, EngineTimeline] = field(default_factory=OrderedDict)

    def take(self, record: Activities) -> None:
        """Learn from one record; a repeated record counts once."""
        instance = (record.device.engine if isinstance(record, DeviceRun) else "") or record.process.instance
        if not instance:
            return
        doings = self.at(instance)
        if isinstance(record, Iteration):
            _take_iteration(doings, record)
        elif isinstance(record, KvFetch):
            _take_fetch(doings, record)
        elif isinstance(record, ProcessEvent):
            _take_pause(doings, record)
        elif record.device.kind is DeviceKind.GPU:
            _take_run(doings, record)

    def of(self, instance: str) -> EngineTimeline | None:
        """Return the activity of ``instance``; None where nothing was reported."""
        return self._engines.get(instance)

    def at(self, instance: str) -> EngineTimeline:
        """Return the activity of ``instance``; start to remember it where it is new."""
        doings = self._engines.get(instance)
        if doings is None:
            doings = self._engines[instance] = EngineTimeline()
            if len(self._engines) > self.max_engines:
                self._engines.popitem(last=False)
        else:
            self._engines.move_to_end(instance)
        return doings


def _take_iteration(doings: EngineTimeline, iteration: Iteration) -> None:
    begin, end = iteration.started_unix_ns, iteration.started_unix_ns + iteration.duration_ns
    doings.see(end)
    if iteration.full:
        step = LongStep(
            begin, end, iteration.usual_ns, iteration.prefill_tokens, iteration.resumed_tokens, iteration.kv_landing_steps > 0
        )
        if step not in doings.steps:
            doings.steps.put(step)
            tokens = step.prefill_tokens + step.resumed_tokens
            if tokens >= LEAST_TOKENS:
                doings.token_costs.append(((end - begin - step.usual_ns) / tokens, tokens))
    else:
        second = Second(begin, end, iteration.decode_tokens, iteration.prefill_tokens, iteration.resumed_tokens)
        if second not in doings.seconds:
            doings.seconds.put(second)


def _take_fetch(doings: EngineTimeline, fetch: KvFetch) -> None:
    ended = fetch.noticed_ns if fetch.noticed_ns is not None else fetch.done_ns
    for offset in (fetch.posted_ns, ended):
        if offset is not None:
            landing = Landing(fetch.known_unix_ns + offset, fetch.request_id, fetch.tokens_wanted or 1)
            if landing not in doings.landings:
                doings.landings.put(landing)
                doings.see(landing.begin_unix_ns)


def _take_pause(doings: EngineTimeline, event: ProcessEvent) -> None:
    if event.kind is not ProcessEventKind.PAUSED:
        return
    # the pause began within at_bound_ns before: half of that has the smallest error
    begin, end = event.at_unix_ns - event.at_bound_ns // 2, event.at_unix_ns + event.duration_ns
    pause = Pause(begin, end, f"{event.process_kind or 'process'} {event.pid or ''}".rstrip(), event.detail)
    if pause not in doings.pauses:
        doings.pauses.put(pause)
        doings.see(end)


def _take_run(doings: EngineTimeline, run: DeviceRun) -> None:
    hertz: Sequence[float | None] = next((each.values for each in run.series if (each.name, each.label) == CLOCK), ())
    held = [each for each in run.series if each.name == names.GPU_THROTTLED and each.label not in OWN_CHOICE]
    for place, (at, value) in enumerate(zip(run.at, hertz, strict=False)):
        if value is None or value <= 0:
            continue
        gpu = doings.gpus.get(run.device.key)
        if gpu is None:
            if len(doings.gpus) >= MAX_GPUS:
                return
            gpu = doings.gpus[run.device.key] = GpuClockReadings()
        reading = ClockReading(at, value, tuple(each.label for each in held if each.values[place]))
        if reading not in gpu.readings:
            gpu.put(reading)
            doings.see(at)
