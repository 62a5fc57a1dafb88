"""The parts that keep a hanging call from delaying others, without NVML.

Tests decide which thread gets a call that returns at this moment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from handrail.device_counters.gpu import Pace
from handrail.records import Process, Role
from handrail.records.devices import Device, DeviceKind
from handrail_sidecar.gpu.alarm import Alarm
from handrail_sidecar.gpu.asking import Asker
from handrail_sidecar.gpu.call_batch import MOST_UNTOLD, Wave, is_to_tell, read_round
from handrail_sidecar.gpu.devices import GpuDevice
from handrail_sidecar.gpu.failures import HANGS, NvmlFailed
from handrail_sidecar.gpu.halt import Halt
from handrail_sidecar.gpu.reader import DeviceReader, Laid, ReadingJob, window_ns
from handrail_sidecar.gpu.state import SystemClock
from handrail_sidecar.gpu.steps import NvmlStep
from handrail_sidecar.gpu.worker import Lane
from handrail_sidecar.gpu.workers import GpuWorkers


class RecordedCalls(NvmlStep):
    """A call whose behaviour the test decides."""

    def __init__(self, name: str, call: Callable[[], Any] = lambda: 7) -> None:
        super().__init__(name)
        self.call = call

    def asking(self) -> Callable[[], Any]:
        return self.call


def wave_of(*steps: NvmlStep) -> Wave:
    job = reader(100).jobs[Pace.TICK]
    return Wave(SystemClock, [(job, Laid(steps, SystemClock.mono_ns))])


def test_what_has_not_begun_can_be_taken_and_the_call_that_runs_stays_with_its_thread() -> None:
    seen: list[object] = []

    def hangs() -> str:  # the watch, in the middle of it
        place, since_ns = wave.inside() or (-1, 0)
        seen.extend((place, wave.take(since_ns), [step.name for _, steps in wave.rest(place + 1) for step in steps]))
        seen.append([step.name for round_ in wave.done(place) for step, *_ in round_.add_call()])
        return "late"

    wave = wave_of(
        RecordedCalls("first"),
        RecordedCalls("hangs", hangs),
        RecordedCalls("third", lambda: seen.append("made")),
        RecordedCalls("fourth"),
    )
    assert not wave.ask()
    assert seen == [1, True, ["third", "fourth"], ["first"]]
    assert wave.out[1::2] == [7, "late"]
    assert wave.inside() is None


def test_a_call_that_has_returned_when_the_watch_looks_goes_on_with_the_rest() -> None:
    looks: list[bool] = []
    wave = wave_of(
        RecordedCalls("first"), RecordedCalls("second", lambda: looks.append(wave.take(wave.out[0]))), RecordedCalls("third")
    )
    assert not wave.ask()  # "second" began later than the call that the watch saw hanging
    assert looks == [False]
    wave.go_on()
    assert wave.ask()
    assert wave.out[1::2] == [7, None, 7]
    assert not wave.take(wave.out[-1])


def test_what_a_call_raises_is_its_answer_and_hides_no_other() -> None:
    wave = wave_of(RecordedCalls("fails", _fails), RecordedCalls("answers"))
    assert wave.ask()
    assert wave.failed
    (round_,) = wave.rounds
    (_, error, *_), (step, answer, began_ns, ended_ns) = round_.add_call()
    assert isinstance(error, NvmlFailed)
    assert (step.name, answer) == ("answers", 7)
    assert round_.began_ns <= began_ns <= ended_ns == wave.out[-1]


def test_every_call_is_made_by_one_thread_whenever_the_watch_looks() -> None:
    """One thread makes every call, whenever the watch looks.

    There are waves of 40 calls; another thread takes what has not begun, again and again, at any possible moment.
    """
    made: Counter[int] = Counter()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            taken_rest: list[NvmlStep] = []
            steps = [RecordedCalls(str(n), lambda n=n: made.update([n])) for n in range(40)]  # type: ignore[misc]
            wave, lock, over = wave_of(*steps), threading.Lock(), threading.Event()
            given_up = False

            def watch(wave: Wave = wave, lock: threading.Lock = lock, over: threading.Event = over) -> None:
                nonlocal given_up, taken_rest
                while not over.is_set() and not given_up:
                    inside = wave.inside()
                    if inside is not None and inside[0] > 5:
                        with lock:
                            if wave.take(inside[1]):
                                given_up = True
                                taken_rest = [step for _, kept in wave.rest(wave.taken_at + 1) for step in kept]

            thread = threading.Thread(target=watch)
            thread.start()
            while True:
                whole = wave.ask()
                with lock:
                    if whole or given_up:
                        break
                wave.go_on()
            over.set()
            thread.join(30.0)
            for step in taken_rest:
                step.asking()()
            if given_up and len(wave.out) == 2 * wave.taken_at + 1:
                steps[wave.taken_at].call()  # taken between the time and the call: its thread has it, and makes it next
            assert made == Counter(dict.fromkeys(range(40), 1))
            made.clear()
    finally:
        sys.setswitchinterval(before)


def _fails() -> None:
    raise NvmlFailed(999)


def test_an_unanswered_query_is_not_repeated() -> None:
    queries, begun, let_go = [], threading.Event(), threading.Event()

    def hangs() -> str:
        queries.append(1)
        begun.set()
        let_go.wait(60)
        return "late"

    ask = Asker(0.01)
    for _ in range(3):
        with pytest.raises(NvmlFailed) as caught:
            ask("GPU 0", hangs)
        assert caught.value.code == HANGS
    assert begun.wait(60)
    assert (len(queries), ask.hanging) == (1, 1)
    patient = Asker(30.0)
    assert patient("GPU 1", lambda value: value + 1, 6) == 7
    with pytest.raises(NvmlFailed):
        patient("GPU 1", _fails)
    let_go.set()
    deadline = time.monotonic() + 30
    while ask.hanging and time.monotonic() < deadline:
        time.sleep(0.001)
    ask.within_s = 30.0
    assert ask("GPU 0", hangs) == "late"


def test_everybody_who_sleeps_is_woken_once_it_stops() -> None:
    halt = Halt()
    assert not halt.wait(0.0)
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(halt.wait(30.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    halt.set()
    halt.set()
    for thread in threads:
        thread.join(30.0)
    assert woken == [True] * 4
    assert halt.wait(30.0)
    assert halt.is_set()


def test_a_job_is_laid_out_anew_where_its_steps_are_others_and_without_what_is_paused() -> None:
    def query() -> list[str]:
        return [step.name for step in job.laid_out(100, SystemClock.mono_ns).steps]

    one, two, three = RecordedCalls("one"), RecordedCalls("two"), RecordedCalls("three")
    job = ReadingJob(reader(100), Pace.TICK, 1)
    job.add([one, two])
    assert query() == ["one", "two"]
    assert job.laid_out(100, SystemClock.mono_ns) is job.laid_out(100, SystemClock.mono_ns)
    job.remove(one)
    job.add([three])
    assert query() == ["two", "three"]
    two.resume_ns = job.paused_ns = 101
    assert query() == ["three"]
    two.resume_ns = job.paused_ns = 100
    assert query() == ["two", "three"]


def test_an_alarm_that_is_put_off_rings_once_and_not_before() -> None:
    alarm, rung = Alarm(), []
    alarm.open()
    ends = time.monotonic_ns() + 120_000_000
    alarm.set(time.monotonic_ns() + 40_000_000)

    def waits() -> None:
        alarm.wait()
        rung.append(time.monotonic_ns())

    thread = threading.Thread(target=waits)
    thread.start()
    for _ in range(20):
        alarm.set(ends)  # again and again, as a lane does
    thread.join(30.0)
    assert rung
    assert rung[0] >= ends
    alarm.set(1)  # already over
    alarm.wait()
    alarm.close()
    alarm.close()


def test_an_alarm_without_a_timer_rings_all_the_time() -> None:
    alarm = Alarm()
    alarm.set(1 << 62)
    alarm.wait()


class Quiet(Lane):
    """A lane whose thread does nothing."""

    def _run(self) -> None:
        pass


class Noted(Alarm):
    """An alarm that notes the times that it was set to."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[int] = []

    def set(self, at_ns: int) -> None:
        self.times.append(at_ns)


def test_one_lane_that_is_well_lets_the_watch_sleep_and_two_do_not() -> None:
    alarm = Noted()
    lanes = GpuWorkers(SystemClock, lambda sample: None, lambda of, code: None, limit_ns=50, alarm=alarm)
    one, two = (Quiet(lanes, name, reader(100).lane_jobs(), 50) for name in ("one", "two"))
    lanes._lanes = [one]
    lanes.well(one, 1_000)
    lanes._lanes = [one, two]  # of two lanes the other may hang
    lanes.well(one, 2_000)
    lanes._lanes = [one]
    lanes.stopping.set()
    lanes.well(one, 3_000)  # it must ring now
    assert alarm.times == [1_050]


class At(SystemClock):
    """A clock that stays where the test sets it."""

    now_ns = 0

    @classmethod
    def mono_ns(cls) -> int:
        return cls.now_ns


@pytest.mark.parametrize(("now_ms", "again_ms"), [(10, 40), (49, 2), (50, 2), (51, 50)])
def test_the_watch_looks_again_when_a_call_has_had_its_time_and_not_a_time_later(now_ms: int, again_ms: int) -> None:
    lanes = GpuWorkers(At, lambda sample: None, lambda of, code: None, limit_ns=50_000_000, alarm=Noted())
    lane = Quiet(lanes, "reads", reader(100).lane_jobs(), 50_000_000)
    lanes._lanes = [lane]
    At.now_ns = now_ms * 1_000_000
    recorded_calls = RecordedCalls("hangs")
    recorded_calls.warm = True
    lane.inside = lambda: (recorded_calls, lane.reader, 0)  # type: ignore[method-assign]
    assert lanes.look() == again_ms * 1_000_000


@pytest.mark.parametrize("pace", [Pace.BYTES, Pace.WINDOW])
def test_a_call_that_is_well_again_rejoins_at_its_own_pace_though_nothing_else_is_read_at_it(pace: Pace) -> None:
    lanes = GpuWorkers(SystemClock, lambda sample: None, lambda of, code: None, limit_ns=50, alarm=Noted())
    of = reader(100)
    home_job = of.jobs[pace]
    step = home_job.steps[0]
    home_job.steps.clear()
    home = Quiet(lanes, "reads", of.lane_jobs(), 50)  # without that job
    alone = Quiet(lanes, "device 0", [home_job.alone(step)], 50)
    alone.alone = True
    lanes._lanes = [home, alone]
    assert lanes.rejoin(alone)
    assert lanes._home(home_job) is home_job  # again, before the lane has looked
    assert home_job.steps == [step]
    lanes.stopping.set()
    for job in (*home.jobs, home_job):
        job.next_ns = 1
    assert home._due() is None  # the sampler stops, and every returned call is taken back
    assert [job for job in home.jobs if job is home_job] == [home_job]


def test_what_a_lane_was_given_when_it_ended_begins_anew() -> None:
    lanes = GpuWorkers(SystemClock, lambda sample: None, lambda of, code: None, limit_ns=50, alarm=Noted())
    given = reader(100).lane_jobs()
    lane = Quiet(lanes, "reads", reader(100).lane_jobs(), 50)
    lane.incoming.append(given)
    lanes._lanes = [lane]
    lanes.ended(lane)
    (other,) = lanes.all()
    assert other is not lane
    lanes.stop(30.0)


def reader(period_ms: int) -> DeviceReader:
    gpu = GpuDevice(device=Device(kind=DeviceKind.GPU, key="GPU-a", index=0), handle=None)
    nvml: Any = SimpleNamespace()
    return DeviceReader(nvml, gpu, SystemClock, Process(role=Role.UNKNOWN, instance="", host=""), period_ms * 1_000_000)


@pytest.mark.parametrize(("period_ms", "window_ms"), [(10, 110), (20, 120), (50, 150), (100, 200), (101, 101), (1000, 1000)])
def test_windows_end_with_a_tick_and_are_longer_than_100_ms(period_ms: int, window_ms: int) -> None:
    assert reader(period_ms).jobs[Pace.WINDOW].period_ns == window_ms * 1_000_000


@pytest.mark.parametrize(
    ("period_ms", "devices", "expected_ms"),
    [(100, 4, 200), (100, 5, 300), (100, 8, 400), (100, 16, 800), (1000, 56, 3000), (10, 16, 110)],
)
def test_many_gpus_have_longer_windows_unless_they_are_sampled_faster_than_usual(
    period_ms: int, devices: int, expected_ms: int
) -> None:
    assert window_ns(period_ms * 1_000_000, devices) == expected_ms * 1_000_000


@pytest.mark.parametrize(
    ("requested_ms", "next_ms", "reported"),
    [
        ((0, 100, 200, 300), 400, False),
        ((0, 100, 200, 300, 400), 500, True),
        ((0,), 1000, True),
        ((), 1000, False),
        (tuple(range(MOST_UNTOLD)), MOST_UNTOLD, True),
    ],
    ids=["waits", "half-a-second", "once-a-second", "nothing-asked", "enough"],
)
def test_answers_are_delivered_together(requested_ms: tuple[int, ...], next_ms: int, reported: bool) -> None:
    rounds = []
    for at in requested_ms:
        wave = wave_of(RecordedCalls("one"))
        wave.ask()
        wave.out[0] = at * 1_000_000
        rounds += wave.rounds
    assert is_to_tell(rounds, next_ms * 1_000_000) is reported


def test_periods_that_passed_are_counted_and_not_made_up_for() -> None:
    job = reader(100).jobs[Pace.TICK]
    job.begin_at(1_000_000_000)
    assert (job.plan_next(1_003_000_000), job.next_ns) == (0, 1_100_000_000)
    assert (job.plan_next(1_350_000_000), job.next_ns) == (2, 1_400_000_000)


def test_a_binding_without_any_function_makes_everything_absent() -> None:
    empty = reader(100)
    for job in empty.lane_jobs():
        for step in job.steps:
            if not step.name.startswith("nvmlDevice"):
                job.remove(step)
        assert read_round(job, SystemClock) is None
    assert empty.absent["utilization_ratio", ""] == -1
