"""An engine's host for every driver, virtual or real.

It has the core, the costs of the core's steps, the prefix cache and the host's faults, which are implemented only here. A driver
has the clock, the events and the effects.
A hindrance is a time in which a host runs slowly or not at all. It comes once in each ``every_ns``, at a moment drawn for that
turn, so that it is in step with nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from zlib import crc32

from handrail_sim.emulator.core import Effect, EngineCore, EngineJob, FinishReason, Scheduling
from handrail_sim.emulator.costs import ForwardPass, StepCosts
from handrail_sim.emulator.faults import Active, Fault
from handrail_sim.emulator.kv import PrefixCache
from handrail_sim.emulator.noise import uniform
from handrail_sim.emulator.scenario import Scenario

THROTTLED_EVERY_NS, THROTTLED_NS = 6_000_000_000, 400_000_000
PAUSED_EVERY_NS = 4_000_000_000
WATCH_NS = 100_000_000  # the interval at which a plugin thread wakes up (handrail.plugin.pauses)
LATE_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Hindrance:
    """A recurring time of slow or no work.

    ``share``: the share of its usual speed that a host has meanwhile; 0: it stands still.
    """

    seed: int
    share: float
    every_ns: int
    lasts_ns: int
    from_ns: int
    to_ns: int | None

    def times(self, begin_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
        """Yield the times that overlap this interval, in order."""
        turn = max(0, (begin_ns - self.from_ns) // self.every_ns - 1)
        while (start := self.from_ns + turn * self.every_ns) < end_ns:
            first = start + round(uniform(self.seed, turn) * max(0, self.every_ns - self.lasts_ns))
            last = first + self.lasts_ns
            if last > begin_ns and first < end_ns and (self.to_ns is None or first < self.to_ns):
                yield first, last
            turn += 1


def hindrances(host: str, faults: Active) -> dict[str, list[Hindrance]]:
    """Return a host's hindrances by the fault that makes them."""
    found: dict[str, list[Hindrance]] = {}
    for name, every_ns in (("gpu_throttled", THROTTLED_EVERY_NS), ("host_pause", PAUSED_EVERY_NS)):
        for fault in faults.named(name):
            if fault.place in ("*", host):
                stands = name == "host_pause"
                lasts_ns = round(fault.size * 1e9) if stands else THROTTLED_NS
                share = 0.0 if stands else 1 / fault.size
                seed = crc32(f"{name} {host}".encode())
                found.setdefault(name, []).append(Hindrance(seed, share, every_ns, lasts_ns, fault.from_ns, fault.to_ns))
    for fault in faults.named("engine_hung"):
        if fault.place in ("*", host):  # once, from its beginning on
            lasts_ns = round(fault.size * 1e9)
            found.setdefault(fault.name, []).append(Hindrance(0, 0.0, lasts_ns, lasts_ns, fault.from_ns, fault.from_ns + 1))
    return found


def late_wakes(by: Sequence[Hindrance], begin_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
    """Yield when a plugin thread's wake-ups were due and when they happened.

    Only those that were at least ``LATE_NS`` late and happened after ``begin_ns`` and by ``end_ns``.
    """
    for each in by:
        for first, last in each.times(begin_ns, end_ns + 1):
            due = -(-first // WATCH_NS) * WATCH_NS
            if begin_ns < last <= end_ns and last - due >= LATE_NS:
                yield due, last


def hindered_ns(begin_ns: int, work_ns: int, by: Sequence[Hindrance]) -> int:
    """Return how long work takes that begins at ``begin_ns``.

    It takes ``work_ns`` when nothing hinders it.
    """
    at, left = float(begin_ns), float(work_ns)
    while left > 0:
        ahead = at + left + max((each.lasts_ns for each in by), default=0)
        times = [(first, last, each.share) for each in by for first, last in each.times(int(at), int(ahead) + 1)]
        share = 1.0
        for first, last, slowed in times:
            if first <= at < last:
                share *= slowed
        changes = [edge for first, last, _ in times for edge in (first, last) if edge > at]
        until = min(changes, default=ahead)
        if share > 0 and left / share <= until - at:
            at, left = at + left / share, 0.0
        else:
            left -= (until - at) * share
            at = until
    return max(1, round(at) - begin_ns)


ADMISSION_P, ADMISSION_D, FETCH, REFUSED = 3, 4, 5, 6  # the purposes of a request's draws
_FOREIGN = "foreign-"


class Driver(Protocol):
    """The interface that a host needs from its driver.

    All times are on one monotonic clock, to which the faults' times refer.
    """

    def now_ns(self) -> int: ...

    def at(self, time_ns: int, act: Callable[[], None]) -> None:
        """Call ``act`` at ``time_ns``, or at once when that time has passed."""

    def kick(self, host: EmulatedHost) -> None:
        """Advance the core after an input and carry out the effects."""

    def carry_out(self, host: EmulatedHost, effects: list[Effect]) -> None: ...


class Hindered:
    """Step costs that include the hindrances of the host."""

    def __init__(self, costs: StepCosts, by: list[Hindrance], now_ns: Callable[[], int]) -> None:
        self._costs = costs
        self._by = by
        self._now_ns = now_ns

    def step_ns(self, batch: ForwardPass) -> int:
        work_ns = self._costs.step_ns(batch)
        return hindered_ns(self._now_ns(), work_ns, self._by) if self._by else work_ns


class EmulatedHost:
    """One engine's host.

    ``lease_ns``: how long P holds blocks that nobody reads. A driver that ends leases itself may give a very long one.
    """

    def __init__(
        self, name: str, scenario: Scenario, costs: StepCosts, faults: Active, driver: Driver, *, lease_ns: int = 1 << 62
    ) -> None:
        self.name = name
        self.costs = costs
        self.cache = PrefixCache(scenario.prefix_cache_blocks)
        self.hindrances = hindrances(name, faults)
        by = [each for some in self.hindrances.values() for each in some]
        self.core = EngineCore(
            Hindered(costs, by, driver.now_ns),
            max_running=scenario.max_running,
            blocks=scenario.kv_blocks,
            lease_ns=lease_ns,
            scheduling=Scheduling(
                batch_tokens=scenario.batch_tokens, chunked_prefill=scenario.chunked_prefill, reserve_answer=False
            ),
        )
        self.wake_ns: int | None = None  # for the driver: when it must wake this host
        self._scenario = scenario
        self._faults = faults
        self._driver = driver

    def begin_faults(self) -> None:
        """Schedule the faults that act by themselves: foreign prompts and preemptions.

        The driver calls ``apply_faults`` for the others.
        """
        hosts = self._scenario.hosts()
        for fault in self._faults.named("prefill_queue"):
            if fault.size > 0 and self.name in hosts.prefill and fault.place in ("*", self.name):
                self._driver.at(fault.from_ns, partial(self._foreign, fault, 0))
        for fault in self._faults.named("preemption_storm"):
            if self.name in hosts.decode and fault.place in ("*", self.name):
                self._driver.at(fault.from_ns, partial(self._storm, fault))

    def apply_faults(self) -> None:
        """Apply the faults that are active now; called where a fault begins or ends."""
        scenario, faults, now_ns = self._scenario, self._faults, self._driver.now_ns()
        self.costs.prefill_factor = faults.factor("slow_prefill", self.name, now_ns)
        self.costs.step_factor = faults.factor("bad_host", self.name, now_ns)
        pressure = faults.find("kv_pressure", self.name, now_ns)
        self.core.withhold(round(pressure.size * scenario.kv_blocks) if pressure else 0)
        cap = faults.find("decode_queue", self.name, now_ns)
        self.core.limit(min(scenario.max_running, round(cap.size)) if cap else scenario.max_running)
        self._driver.kick(self)

    def admission_ns(self, drawn: float) -> int:
        """Return the time from a request's arrival until the scheduler knows of it.

        ``drawn`` is the request's own number, from 0 up to 1.
        """
        return round(self._scenario.admission_ns * (0.7 + 0.6 * drawn))

    def freed_after_ns(self) -> int | None:
        """Return when KV published now is freed although nobody has read it.

        None: no fault frees it.
        """
        now_ns = self._driver.now_ns()
        for name in ("lease_expired", "stale_read"):
            fault = self._faults.find(name, self.name, now_ns)
            if fault is not None:
                return now_ns + round(fault.size * 1e9)
        return None

    def refuses(self, drawn: float) -> bool:
        """Test whether the host answers a prompt with an error instead of queueing it.

        ``drawn`` is the request's own number, from 0 up to 1.
        """
        fault = self._faults.find("prefill_failed", self.name, self._driver.now_ns())
        return fault is not None and drawn < fault.size and self.name in self._scenario.hosts().prefill

    def _foreign(self, fault: Fault, number: int) -> None:
        """Submit another client's prompt, again and again at a fixed interval.

        The prompt is of this scenario's longest kind.
        """
        now_ns = self._driver.now_ns()
        if not fault.at(self.name, now_ns):
            return
        tokens = self._scenario.prompt_tokens_max
        self.core.submit(EngineJob(f"{_FOREIGN}{fault.from_ns}-{number}", tokens, 1, FinishReason.LENGTH), now_ns)
        self._driver.kick(self)
        every_ns = round(self.costs.prefill_ns(tokens) / fault.size)
        self._driver.at(now_ns + every_ns, partial(self._foreign, fault, number + 1))

    def _storm(self, fault: Fault) -> None:
        now_ns = self._driver.now_ns()
        if not fault.at(self.name, now_ns):
            return
        self._driver.carry_out(self, self.core.preempt_last())
        self._driver.kick(self)
        self._driver.at(now_ns + round(1e9 / fault.size), partial(self._storm, fault))
