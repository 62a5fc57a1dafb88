"""The engine core under a virtual clock.

The tests cover batching, queues, loads and leases, and check that no block is ever lost.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.running import FAST
from handrail_sim.emulator.core import (
    Effect,
    Ended,
    EngineCore,
    EngineJob,
    FinishReason,
    LeaseExpired,
    LoadStarts,
    Preempted,
    Scheduling,
    StepEnded,
    TokenMade,
)
from handrail_sim.emulator.profile import LatencyModel

MS = 1_000_000
LEASE_NS = 30_000 * MS


class Simulation:
    """A core and a clock that jumps.

    Loads take what the model says, unless they are to fail.
    """

    def __init__(self, *, max_running: int = 4, blocks: int = 100, scheduling: Scheduling | None = None) -> None:
        self.model = LatencyModel(FAST, seed=0)
        self.core = EngineCore(self.model, max_running=max_running, blocks=blocks, lease_ns=LEASE_NS, scheduling=scheduling)
        self.now_ns = 0
        self.effects: list[tuple[int, Effect]] = []
        self.loads: dict[str, int] = {}
        self.fail: set[str] = set()

    def submit(self, name: str, *, prompt: int = 16, answer: int = 3, load: bool = False, publish: bool = False) -> None:
        self.core.submit(EngineJob(name, prompt, answer, FinishReason.LENGTH, load, publish), self.now_ns)

    def run(self, until_ns: int = 10**12) -> None:
        """Run until nothing is left to do, or until ``until_ns``."""
        self._keep(self.core.advance(self.now_ns))
        while True:
            wake = [time for time in (self.core.wake_ns(), *self.loads.values()) if time is not None]
            if not wake or min(wake) > until_ns:
                return
            self.now_ns = max(self.now_ns, min(wake))
            for name in [name for name, done_ns in self.loads.items() if done_ns <= self.now_ns]:
                del self.loads[name]
                self._keep(self.core.load_done(name, name not in self.fail))
            self._keep(self.core.advance(self.now_ns))

    def _keep(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.effects.append((self.now_ns, effect))
            if isinstance(effect, LoadStarts):
                self.loads[effect.id] = self.now_ns + self.model.transfer_ns(effect.tokens)

    def tokens(self, name: str) -> list[int]:
        return [time for time, effect in self.effects if isinstance(effect, TokenMade) and effect.id == name]

    def end(self, name: str) -> Ended:
        return next(effect for _, effect in self.effects if isinstance(effect, Ended) and effect.id == name)


def test_one_request_prefills_then_decodes_a_token_a_step() -> None:
    simulation = Simulation()
    simulation.submit("a", prompt=100, answer=4)
    simulation.run()
    assert simulation.tokens("a") == [2 * MS, 3 * MS, 4 * MS, 5 * MS]
    times = simulation.end("a").times
    assert (times.queued_ns, times.scheduled_ns, times.first_token_ns, times.last_token_ns) == (0, 0, 2 * MS, 5 * MS)
    assert simulation.core.kv_usage == 0


def test_requests_share_steps() -> None:
    simulation = Simulation()
    for name in "abc":
        simulation.submit(name)
    simulation.run()
    assert simulation.tokens("a") == simulation.tokens("b") == simulation.tokens("c")
    assert sum(isinstance(effect, StepEnded) for _, effect in simulation.effects) == 3


def test_a_late_prefill_stalls_the_running_stream() -> None:
    simulation = Simulation()
    simulation.submit("a", answer=20)
    simulation.run(until_ns=5 * MS)
    simulation.submit("late", prompt=500, answer=1)
    simulation.run()
    gaps = [after - before for before, after in zip(simulation.tokens("a"), simulation.tokens("a")[1:], strict=False)]
    assert max(gaps) > 4 * min(gaps)


def test_a_full_batch_makes_the_next_one_queue() -> None:
    simulation = Simulation(max_running=1)
    simulation.submit("a", answer=5)
    simulation.submit("b", answer=1)
    simulation.run()
    assert simulation.end("b").times.scheduled_ns == simulation.tokens("a")[-1]


def test_long_prompts_are_computed_in_chunks() -> None:
    simulation = Simulation(blocks=2000)
    simulation.submit("long", prompt=20_000, answer=1)
    simulation.run()
    assert sum(isinstance(effect, StepEnded) for _, effect in simulation.effects) == 3


def test_a_load_counts_as_queue_time() -> None:
    simulation = Simulation()
    simulation.submit("d", prompt=100, answer=2, load=True)
    assert simulation.core.load().to_load == 1
    simulation.run(until_ns=0)
    assert simulation.core.load().loading == 1
    simulation.run()
    times = simulation.end("d").times
    assert times.scheduled_ns == 2 * MS  # 100 tokens of 20 us
    assert times.first_token_ns == 3 * MS  # a decode step, not a prefill


def test_a_load_waits_for_a_slot_and_for_blocks() -> None:
    simulation = Simulation(max_running=4, blocks=10)
    simulation.submit("big", prompt=100, answer=20)  # 8 blocks
    simulation.submit("d", prompt=50, answer=2, load=True)  # 4 blocks
    simulation.run()
    started = next(time for time, effect in simulation.effects if isinstance(effect, LoadStarts))
    assert started == simulation.tokens("big")[-1]


def test_a_failed_load_ends_the_request_unscheduled() -> None:
    simulation = Simulation()
    simulation.fail.add("d")
    simulation.submit("d", load=True)
    simulation.run()
    ended = simulation.end("d")
    assert (ended.reason, ended.generated, ended.times.scheduled_ns) == (FinishReason.ERROR, 0, None)
    assert simulation.core.kv_usage == 0


def test_published_blocks_stay_until_they_are_read() -> None:
    simulation = Simulation()
    simulation.submit("p", prompt=33, answer=1, publish=True)
    simulation.run(until_ns=5 * MS)
    publication = simulation.core.published("p")
    assert publication is not None
    assert len(publication.blocks) == 3
    assert simulation.core.kv_usage == pytest.approx(0.03)
    assert simulation.core.release("p")
    assert simulation.core.kv_usage == 0
    assert not simulation.core.release("p")


def test_unread_blocks_expire_and_heartbeats_put_that_off() -> None:
    simulation = Simulation()
    simulation.submit("p", prompt=33, answer=1, publish=True)
    simulation.run(until_ns=5 * MS)
    simulation.now_ns = 20_000 * MS
    assert simulation.core.renew_lease("p", simulation.now_ns)
    simulation.run()
    expired = [time for time, effect in simulation.effects if isinstance(effect, LeaseExpired)]
    assert expired == [50_000 * MS]
    assert simulation.core.kv_usage == 0
    assert not simulation.core.renew_lease("p", simulation.now_ns)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (EngineJob("a", 0, 1, FinishReason.LENGTH), "at least one prompt token"),
        (EngineJob("a", 10_000, 1, FinishReason.LENGTH), "more than all 100 KV blocks"),
        (EngineJob("used", 1, 1, FinishReason.LENGTH), "is in use"),
    ],
    ids=["empty", "too large", "twice"],
)
def test_what_can_never_run_is_refused(job: EngineJob, message: str) -> None:
    simulation = Simulation()
    simulation.submit("used")
    with pytest.raises(ValueError, match=message):
        simulation.core.submit(job, 0)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 200), st.integers(1, 20), st.booleans(), st.booleans(), st.integers(0, 30), st.integers(0, 40)),
        min_size=1,
        max_size=12,
    ),
    failing=st.sets(st.integers(0, 11)),
)
def test_every_request_ends_once_and_every_block_comes_back(
    jobs: list[tuple[int, int, bool, bool, int, int]], failing: set[int]
) -> None:
    simulation = Simulation(max_running=3, blocks=20)
    simulation.fail = {f"r{index}" for index in failing}
    aborts: list[tuple[int, str]] = []
    for index, (prompt, answer, load, publish, pause_ms, abort_ms) in enumerate(jobs):
        simulation.run(until_ns=simulation.now_ns + pause_ms * MS)
        simulation.submit(f"r{index}", prompt=prompt, answer=answer, load=load, publish=publish)
        if abort_ms < 10:
            aborts.append((abort_ms, f"r{index}"))
    for after_ms, name in aborts:
        simulation.run(until_ns=simulation.now_ns + after_ms * MS)
        simulation._keep(simulation.core.abort(name))
    simulation.run()
    ends = [effect.id for _, effect in simulation.effects if isinstance(effect, Ended)]
    assert sorted(ends) == sorted(f"r{index}" for index in range(len(jobs)))
    assert simulation.core.kv_usage == 0  # also what was published: its lease has ended
    assert simulation.core.wake_ns() is None


BY_BLOCK = Scheduling(reserve_answer=False)


def test_without_reserve_the_last_one_is_preempted_and_all_answers_still_come() -> None:
    simulation = Simulation(blocks=10, scheduling=BY_BLOCK)
    for name in "abc":
        simulation.submit(name, prompt=40, answer=60)  # 3 blocks at first, 7 in the end
    simulation.run()
    preempted = [effect.id for _, effect in simulation.effects if isinstance(effect, Preempted)]
    assert preempted
    assert "a" not in preempted
    assert [simulation.end(name).generated for name in "abc"] == [60, 60, 60]
    assert simulation.core.kv_usage == 0


def test_a_preempted_stream_has_one_long_gap_and_keeps_its_first_times() -> None:
    simulation = Simulation(scheduling=BY_BLOCK)
    simulation.submit("a", answer=20)
    simulation.submit("b", prompt=200, answer=20)
    simulation.run(until_ns=15 * MS)
    assert simulation.core.preempt_last() == [Preempted("b")]
    simulation.run()
    tokens = simulation.tokens("b")
    gaps = sorted(after - before for before, after in pairwise(tokens))
    assert gaps[-1] >= 4 * MS  # 200 tokens and more are computed again
    assert simulation.end("b").times.scheduled_ns == 0
    assert len(tokens) == 20


def test_a_lone_stream_is_not_preempted_by_hand() -> None:
    simulation = Simulation()
    simulation.submit("a", answer=20)
    simulation.run(until_ns=5 * MS)
    assert simulation.core.preempt_last() == []


def test_without_chunked_prefill_a_prompt_has_its_step_alone() -> None:
    def gaps(chunked: bool) -> list[int]:
        simulation = Simulation(
            blocks=1000, scheduling=Scheduling(batch_tokens=512, chunked_prefill=chunked, reserve_answer=False)
        )
        simulation.submit("a", answer=40)
        simulation.run(until_ns=5 * MS)
        simulation.submit("late", prompt=4096, answer=1)
        simulation.run()
        tokens = simulation.tokens("a")
        return [after - before for before, after in pairwise(tokens)]

    whole, chunked = gaps(False), gaps(True)
    assert max(whole) > 4 * max(chunked)
    assert sum(gap > 5 * MS for gap in whole) == 1
    assert sum(gap > 5 * MS for gap in chunked) == 8


def test_a_failed_load_with_recompute_computes_the_prompt_here() -> None:
    simulation = Simulation()
    simulation.submit("d", prompt=500, answer=2, load=True)
    simulation.core.advance(0)
    assert simulation.core.load_done("d", False, recompute=True) == []
    simulation.run()
    assert simulation.end("d").reason is FinishReason.LENGTH
    assert simulation.tokens("d")[0] >= 5 * MS  # a prefill, not a decode step


def test_withheld_blocks_make_a_request_wait_until_they_are_given_back() -> None:
    simulation = Simulation(blocks=10)
    simulation.core.withhold(8)
    simulation.submit("d", prompt=50, answer=2, load=True)
    simulation.run()
    assert simulation.core.load().to_load == 1
    simulation.core.withhold(0)
    simulation.run()
    assert simulation.end("d").generated == 2


def test_cached_tokens_are_not_computed() -> None:
    simulation = Simulation(blocks=200)
    simulation.core.submit(EngineJob("a", 2000, 1, FinishReason.LENGTH, cached_tokens=1999), 0)
    simulation.run()
    assert simulation.tokens("a")[0] < 5 * MS


def test_a_prompt_is_scheduled_only_when_the_step_has_tokens_left_for_it() -> None:
    simulation = Simulation(blocks=2000, scheduling=Scheduling(batch_tokens=1000))
    simulation.submit("a", prompt=3000, answer=1)
    simulation.submit("b", prompt=100, answer=1)
    simulation.run()
    assert simulation.end("b").times.scheduled_ns == simulation.tokens("a")[-1]
