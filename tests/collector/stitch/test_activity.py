"""The recent activity of engines: kept once, in order, bounded, and found by time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handrail.records import Iteration, KvFetch, Process, ProcessEvent, ProcessEventKind, Role, Source, SpanIds
from handrail.records.devices import Device, DeviceKind, DeviceRun, Series
from handrail_collector.stitch.engine_activity import LATELY, MAX_GPUS, MAX_TRIALS, Activity, EngineTimeline
from handrail_collector.stitch.timeline import Timeline

MS = 1_000_000
START = 1_800_000_000 * 10**9
AT_D = Process(role=Role.DECODE, instance="d0:8000", host="d0")


@dataclass(frozen=True)
class Thing:
    begin_unix_ns: int
    end_unix_ns: int


_things = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 90)).map(lambda t: Thing(t[0], t[0] + t[1])), max_size=60)


@given(_things, st.integers(0, 600), st.integers(0, 100))
def test_what_lies_in_a_time_or_reaches_into_it_is_found_whatever_the_order(things: list[Thing], begin: int, length: int) -> None:
    line: Timeline[Thing] = Timeline(1000)
    for thing in things:
        line.put(thing)
    found = list(line.during(begin, begin + length))
    expected = [t for t in things if t.begin_unix_ns <= begin + length and t.end_unix_ns >= begin]
    assert sorted(found, key=lambda t: (t.begin_unix_ns, t.end_unix_ns)) == sorted(
        expected, key=lambda t: (t.begin_unix_ns, t.end_unix_ns)
    )
    assert [t.begin_unix_ns for t in found] == sorted(t.begin_unix_ns for t in found)
    assert all(thing in line for thing in things)
    assert Thing(-1, 0) not in line


def test_a_timeline_is_bounded_and_the_oldest_go() -> None:
    line: Timeline[Thing] = Timeline(10)
    for at in range(1000):
        line.put(Thing(at, at))
        assert len(line) <= 20
    assert [thing.begin_unix_ns for thing in line.during(0, 10**6)][-10:] == list(range(990, 1000))


def iteration(at_ns: int, took_ns: int, *, full: bool, **more: Any) -> Iteration:
    return Iteration(
        process=AT_D,
        source=Source.PLUGIN,
        started_unix_ns=START + at_ns,
        duration_ns=took_ns,
        steps=1 if full else 40,
        full=full,
        **more,
    )


def fetch(at_ns: int, **offsets: Any) -> KvFetch:
    return KvFetch(
        process=AT_D,
        source=Source.PLUGIN,
        ids=SpanIds(trace_id="1" * 32, span_id="2" * 16),
        engine="vllm",
        request_id="r",
        known_unix_ns=START + at_ns,
        tokens_wanted=700,
        **offsets,
    )


def pause(kind: ProcessEventKind = ProcessEventKind.PAUSED, instance: str = "d0:8000") -> ProcessEvent:
    return ProcessEvent(
        process=Process(role=Role.DECODE, instance=instance, host="d0"),
        source=Source.PLUGIN,
        at_unix_ns=START + 100 * MS,
        kind=kind,
        pid=7,
        process_kind="core",
        detail="throttled",
        at_bound_ns=50 * MS,
        duration_ns=80 * MS,
    )


def sample(at_ns: int, hertz: float, *reasons: str, key: str = "GPU-1", engine: str = "") -> DeviceRun:
    return DeviceRun(
        process=AT_D,
        source=Source.NVML,
        device=Device(kind=DeviceKind.GPU, key=key, engine=engine),
        at=[START + at_ns],
        took_ns=[0],
        series=[Series("clock_hertz", "sm", 0, [hertz]), *(Series("throttled", reason, 0, [1.0]) for reason in reasons)],
    )


def taken(*records: Iteration | KvFetch | ProcessEvent | DeviceRun) -> EngineTimeline:
    activity = Activity()
    for record in records:
        activity.take(record)
        activity.take(record)  # reported twice
    found = activity.of("d0:8000")
    assert found is not None
    return found


def test_each_thing_is_kept_once_and_as_what_it_is() -> None:
    doings = taken(
        iteration(0, 100 * MS, full=True, prefill_tokens=500, resumed_tokens=20, kv_landing_steps=1, usual_ns=10 * MS),
        iteration(0, 1000 * MS, full=False, decode_tokens=90, prefill_tokens=520),
        fetch(5 * MS, posted_ns=MS, done_ns=8 * MS, noticed_ns=9 * MS),
        fetch(50 * MS, posted_ns=MS),  # still on its way
        pause(),
        sample(0, 2e9),
    )
    (step,) = doings.steps.during(0, 2 * START)
    assert (step.begin_unix_ns, step.end_unix_ns, step.usual_ns) == (START, START + 100 * MS, 10 * MS)
    assert (step.prefill_tokens, step.resumed_tokens, step.landed) == (500, 20, True)
    (second,) = doings.seconds.during(0, 2 * START)
    assert (second.decode_tokens, second.prefill_tokens) == (90, 520)
    assert [x.begin_unix_ns - START for x in doings.landings.during(0, 2 * START)] == [6 * MS, 14 * MS, 51 * MS]
    (paused_pause,) = doings.pauses.during(0, 2 * START)
    assert (paused_pause.begin_unix_ns - START, paused_pause.end_unix_ns - START) == (
        75 * MS,
        180 * MS,
    )  # half of the bound lies before it
    assert (paused_pause.process, paused_pause.why) == ("core 7", "throttled")
    assert len(doings.gpus["GPU-1"].readings) == 1
    assert doings.newest_unix_ns == START + 1000 * MS


def test_other_events_of_a_process_are_no_pauses() -> None:
    assert len(taken(pause(ProcessEventKind.HUNG), iteration(0, MS, full=True)).pauses) == 0


def test_what_tokens_take_is_known_after_a_few_long_steps() -> None:
    made = [iteration(n * 200 * MS, 100 * MS, full=True, prefill_tokens=1000, usual_ns=10 * MS) for n in range(5)]
    assert taken(*made[:4]).a_token_ns() is None
    few = [iteration((2000 + n) * MS, 300 * MS, full=True, prefill_tokens=tokens) for n, tokens in enumerate((1, 40, 40, 40))]
    assert taken(*made, *few).a_token_ns() == (90 * MS / 1000, 90 * MS / 1000)
    slow = [iteration(n * 500 * MS, 410 * MS, full=True, prefill_tokens=1000, usual_ns=10 * MS) for n in range(5, 10)]
    assert taken(*made, *slow).a_token_ns() == (90 * MS / 1000, 400 * MS / 1000)


def test_the_usual_clock_is_that_of_the_fastest_tenth() -> None:
    doings = taken(*(sample(n * 100 * MS, 1e9 if n % 3 else 2e9) for n in range(90)))
    assert doings.gpus["GPU-1"].usual_hertz() == 2e9
    for n in range(90, 90 + LATELY):
        doings.gpus["GPU-1"].put(next(iter(taken(sample(n * 100 * MS, 5e8)).gpus["GPU-1"].readings.during(0, 2 * START))))
    assert doings.gpus["GPU-1"].usual_hertz() == 5e8


def test_reasons_that_somebody_chose_are_no_throttling() -> None:
    (reading,) = taken(sample(0, 1e9, "application_clocks", "hw_thermal")).gpus["GPU-1"].readings.during(0, 2 * START)
    assert reading.reasons == ("hw_thermal",)


def test_a_gpu_counts_for_the_engine_that_uses_it() -> None:
    activity = Activity()
    activity.take(sample(0, 1e9, engine="d1:8000"))
    assert activity.of("d0:8000") is None
    assert activity.of("d1:8000") is not None


def test_garbage_is_not_kept() -> None:
    doings = taken(iteration(0, MS, full=True), sample(0, 0.0), sample(0, -5.0))
    assert doings.gpus == {}
    activity = Activity()
    activity.take(pause(instance=""))
    assert activity.of("") is None


def test_everything_is_bounded() -> None:
    activity = Activity(max_engines=3)
    for number in range(10):
        activity.take(pause(instance=f"d{number}"))
    activity.take(pause(instance="d7"))
    activity.take(pause(instance="d10"))
    assert [f"d{n}" for n in range(11) if activity.of(f"d{n}") is not None] == ["d7", "d9", "d10"]
    doings = taken(*(sample(0, 1e9, key=f"GPU-{n}") for n in range(MAX_GPUS + 5)))
    assert len(doings.gpus) == MAX_GPUS
    for second in range(MAX_TRIALS + 50):
        doings.trial(START + second * 10**9)
    assert len(doings.trials) == MAX_TRIALS
