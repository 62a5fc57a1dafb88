"""An engine's host for every driver, virtual or real.

It has the core, the costs of the core's steps, the prefix cache and the host's faults.
A driver has the clock, the events and the effects. The faults of a host are implemented only here.
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
