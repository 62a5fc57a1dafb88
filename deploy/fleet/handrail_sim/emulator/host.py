"""An engine's host as every driver knows it, virtual or real: the core, what its steps cost, its prefix cache, and its faults.

A driver has the clock, the events and the effects; what a fault does to a host is here once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from handrail_sim.emulator.core import Effect, EngineCore, EngineJob, FinishReason, Scheduling
from handrail_sim.emulator.costs import StepCosts
from handrail_sim.emulator.faults import Active, Fault
from handrail_sim.emulator.model import ForwardPass
from handrail_sim.emulator.prefix import PrefixCache
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.slowdown import Hindrance, hindered_ns, hindrances

ADMISSION_P, ADMISSION_D, FETCH, REFUSED = 3, 4, 5, 6  # what a request's draw is for
_FOREIGN = "foreign-"


class Driver(Protocol):
    """What a host needs of whoever drives it. All times are of one monotonic clock, the one that the faults name."""

    def now_ns(self) -> int: ...

    def at(self, time_ns: int, act: Callable[[], None]) -> None:
        """Call ``act`` then; at once where that is past."""

    def kick(self, host: EmulatedHost) -> None:
        """Something was told to the core: advance it and carry out what comes of it."""

    def carry_out(self, host: EmulatedHost, effects: list[Effect]) -> None: ...


class Hindered:
    """What an engine's steps take, with what hinders its host."""

    def __init__(self, costs: StepCosts, by: list[Hindrance], now_ns: Callable[[], int]) -> None:
        self._costs = costs
        self._by = by
        self._now_ns = now_ns

    def step_ns(self, batch: ForwardPass) -> int:
        work_ns = self._costs.step_ns(batch)
        return hindered_ns(self._now_ns(), work_ns, self._by) if self._by else work_ns


class EmulatedHost:
    """``lease_ns``: how long P holds what nobody reads; the driver may end leases itself and give a very long one."""

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
        self.wake_ns: int | None = None  # the driver's: when it is to be woken
        self._scenario = scenario
        self._faults = faults
        self._driver = driver

    def begin_faults(self) -> None:
        """Schedule what happens by itself: others' prompts and preemptions. ``apply_faults`` is the driver's to call."""
        hosts = self._scenario.hosts()
        for fault in self._faults.named("prefill_queue"):
            if fault.size > 0 and self.name in hosts.prefill and fault.place in ("*", self.name):
                self._driver.at(fault.from_ns, partial(self._foreign, fault, 0))
        for fault in self._faults.named("preemption_storm"):
            if self.name in hosts.decode and fault.place in ("*", self.name):
                self._driver.at(fault.from_ns, partial(self._storm, fault))

    def apply_faults(self) -> None:
        """Set what holds from now on; called where a fault begins or ends."""
        scenario, faults, now_ns = self._scenario, self._faults, self._driver.now_ns()
        self.costs.prefill_factor = faults.factor("slow_prefill", self.name, now_ns)
        self.costs.step_factor = faults.factor("bad_host", self.name, now_ns)
        pressure = faults.find("kv_pressure", self.name, now_ns)
        self.core.withhold(round(pressure.size * scenario.kv_blocks) if pressure else 0)
        cap = faults.find("decode_queue", self.name, now_ns)
        self.core.limit(min(scenario.max_running, round(cap.size)) if cap else scenario.max_running)
        self._driver.kick(self)

    def admission_ns(self, drawn: float) -> int:
        """From a request's arrival until the scheduler knows of it; ``drawn`` is its number, 0 up to 1."""
        return round(self._scenario.admission_ns * (0.7 + 0.6 * drawn))

    def freed_after_ns(self) -> int | None:
        """When KV published now is freed although nobody has read it; None: no fault says so."""
        now_ns = self._driver.now_ns()
        for name in ("lease_expired", "stale_read"):
            fault = self._faults.find(name, self.name, now_ns)
            if fault is not None:
                return now_ns + round(fault.size * 1e9)
        return None

    def refuses(self, drawn: float) -> bool:
        """Whether a prompt is answered with an error instead of being queued; ``drawn`` is its number, 0 up to 1."""
        fault = self._faults.find("prefill_failed", self.name, self._driver.now_ns())
        return fault is not None and drawn < fault.size and self.name in self._scenario.hosts().prefill

    def _foreign(self, fault: Fault, number: int) -> None:
        """Somebody else's prompt, of the longest kind asked here, every so often."""
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
