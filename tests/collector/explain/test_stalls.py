"""Causes of stalls, including the cases B12, B16, B21 and B24.

Each cause is named where its evidence is, and none where the evidence is everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.plugin import times
from builders.records import EPOCH, MS, kv, split_request
from builders.stalls import by_cause, clock, gc_of_case_B12, landing, pause, seconds, stalls_of, step, stream
from handrail import conventions as names
from handrail.records import Role
from handrail.records.devices import DeviceRun, Series
from handrail_collector.explain.stalls.cause import DOUBT
from handrail_collector.rows import NO_STALLS

DATA = Path(__file__).parents[2] / "data"
STALL_EVERY = 4  # seconds


def at_d(count: int = 12, gap_ms: float = 130, *, usual_ms: float = 10, **more: Any) -> tuple[list[Any], list[float]]:
    """Return streams at D, one after the other, and when each stall began, in ms.

    Each stream lasts 4 s and has one stall in its middle.
    """
    made, begins = [], []
    for number in range(count):
        at_ms = number * STALL_EVERY * 1000.0
        half = round(1950 / usual_ms)
        gaps = [usual_ms] * half + [gap_ms] + [usual_ms] * half
        made.append(stream(Role.DECODE, at_ms, 20, gaps, rid=f"req-{number}", trace=f"t{number}", **more))
        begins.append(at_ms + 20 + half * usual_ms)
    return [*made, *seconds(0, count * STALL_EVERY * 1000)], begins


Evidence = Callable[[float, float], list[Any]]

CAUSES: dict[str, Evidence] = {
    "prefill_coscheduled": lambda at, took: [step(at, took, prefill_tokens=2048, prefill_requests=1)],
    "preemption": lambda at, took: [step(at, took, resumed_tokens=1500)],
    "kv_landing": lambda at, took: [step(at, took, landed=True), landing(at + 3)],
    "gpu_throttled": lambda at, took: [clock(at + 20, 5e8, "hw_thermal"), clock(at + 110, 5e8, "hw_thermal"), step(at, took)],
    "host_pause": lambda at, took: [pause(at + 5, took - 10)],
}


def healthy_clocks(slow: list[Any]) -> list[Any]:
    """Return clocks ten times a second, unless the test gives another rate."""
    statements = [each.at_unix_ns for each in slow if isinstance(each, DeviceRun)]
    made = [clock(at, 2e9) for at in range(0, 50_000, 100)] if statements else []
    return [each for each in made if all(abs(each.at_unix_ns - at) > 60 * MS for at in statements)]


@pytest.mark.parametrize("cause", CAUSES)
def test_evidence_in_every_stall_and_nowhere_else_is_the_cause(cause: str) -> None:
    records, begins = at_d()
    records += [each for at in begins for each in CAUSES[cause](at, 130)]
    first, second, *stalls = stalls_of(records + healthy_clocks(records))
    assert {first.cause, second.cause} <= {"unknown", cause}  # after a stall or two in a few seconds it may be chance
    assert by_cause(stalls) == {cause: 10}
    assert all(stall.lift is not None and stall.lift > 10 for stall in stalls)
    assert all(stall.doubt is not None and stall.doubt <= DOUBT for stall in stalls)
    assert all(stall.accounted_ns >= 60 * MS and stall.evidence for stall in stalls)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_same_evidence_at_other_times_is_no_cause(cause: str) -> None:
    records, begins = at_d()
    records += [each for at in begins for each in CAUSES[cause](at + 700, 130)]
    assert by_cause(stalls_of(records + healthy_clocks(records))) == {"unknown": 12}


@pytest.mark.parametrize("cause", ["kv_landing", "host_pause"])
def test_evidence_that_is_there_all_the_time_is_no_cause(cause: str) -> None:
    """The evidence is in every stall, and as often where nothing stalls."""
    records, begins = at_d()
    records += [each for at in range(0, 48_000, 200) for each in CAUSES[cause](at, 130)]
    stalls = stalls_of(records)
    assert by_cause(stalls) == {"unknown": len(begins)}
    assert "may be chance" in stalls[-1].evidence[0]


@pytest.mark.parametrize("busy", [[0.98, 0.97, 0.03, 0.02, 0.98], [0.98]], ids=["a-dip", "throughout"])
def test_F14_how_busy_a_gpu_was_is_no_cause(busy: list[float]) -> None:
    """GPU utilization does not explain a stall.

    Kernels that run, or do not, are an effect of the stall and not its reason.
    """
    records, begins = at_d(gap_ms=2100)
    for at in begins:
        gpu = clock(at - 2000, 2e9)
        for second, share in enumerate(busy * (5 // len(busy))):
            at_ns = gpu.at[0] + second * 1000 * MS
            records.append(replace(gpu, at=[at_ns], series=[Series(names.GPU_BUSY, "", 0, [share])]))
    stalls = stalls_of(records)
    assert by_cause(stalls) == {"unknown": len(begins)}
    assert not any("GPU" in line for stall in stalls for line in stall.evidence)


def test_one_stall_in_a_long_quiet_time_is_named_at_once_and_one_in_a_short_is_not() -> None:
    quiet = stream(Role.DECODE, 0, 20, [10] * 3000 + [130] + [10] * 3000, rid="req-a")
    named = stalls_of([quiet, *seconds(0, 61_000), step(30_020, 130, prefill_tokens=2048)])
    assert by_cause(named) == {"prefill_coscheduled": 1}
    short = stream(Role.DECODE, 0, 20, [10] * 30 + [130] + [10] * 30, rid="req-a")
    (doubted,) = stalls_of([short, *seconds(0, 1000), step(320, 130, prefill_tokens=2048)])
    assert doubted.cause == "unknown"
    assert re.fullmatch(
        r"a step of 130 ms, usual are 10 ms, computed 2,048 prompt tokens, but that may be chance "
        r"\([\d.]+ times as often as without a stall, by chance in [\d.]+ %\)",
        doubted.evidence[0],
    )


def test_several_steps_that_computed_prompts_are_one_evidence() -> None:
    quiet = stream(Role.DECODE, 0, 20, [10] * 3000 + [360] + [10] * 3000, rid="req-a")
    prompts = [
        step(30_020 + at, took, prefill_tokens=tokens)
        for at, took, tokens in ((0, 120, 2048), (120, 130, 2200), (250, 110, 1900))
    ]
    (stall,) = stalls_of([quiet, *seconds(0, 61_000), *prompts])
    assert stall.cause == "prefill_coscheduled"
    assert stall.evidence[0].startswith("3 steps of up to 130 ms, usual are 10 ms, computed 6,148 prompt tokens")


def test_a_step_that_computed_little_is_no_prefill() -> None:
    records, begins = at_d()
    records += [step(at, 130, prefill_tokens=1, prefill_requests=1) for at in begins]
    assert by_cause(stalls_of(records)) == {"unknown": 12}
    assert stalls_of(records)[0].evidence == ("a step took long, without unusual work",)


@pytest.mark.parametrize(("since_ms", "took_ms"), [(0, 80), (-40, 110), (60, 130)], ids=["short", "early", "late"])
def test_a_step_that_did_not_end_with_the_stall_did_not_hold_it_up(since_ms: float, took_ms: float) -> None:
    """The stream's next token would come at the end of that step.

    Something else caused the stall, however often the two coincide.
    """
    records, begins = at_d()
    records += [step(at + since_ms, took_ms, prefill_tokens=2048) for at in begins]
    stalls = stalls_of(records)
    assert by_cause(stalls) == {"unknown": 12}
    assert {stall.evidence for stall in stalls} == {("the work of the engine's steps does not explain it",)}


def test_a_pause_longer_than_the_prompt_tokens_in_it_is_the_cause() -> None:
    """A process was stopped while its step computed a prompt.

    The other steps show how long so many tokens take.
    """
    records, begins = at_d(gap_ms=500)
    for at in begins:
        records += [step(at - 700, 60, prefill_tokens=1000), step(at, 500, prefill_tokens=1000), pause(at + 20, 440, "held")]
    assert by_cause(stalls_of(records)[2:]) == {"host_pause": 10}


def test_a_paused_step_with_a_few_tokens_is_no_prefill() -> None:
    """Those few tokens take 2 ms."""
    records, begins = at_d(gap_ms=500)
    for at in begins:
        records += [step(at - 700, 60, prefill_tokens=1000), step(at, 500, prefill_tokens=40)]
    assert by_cause(stalls_of(records)) == {"unknown": 12}


def test_a_thread_that_waits_for_a_long_step_is_no_cause_of_it() -> None:
    """The pause of the plugin's thread has no reason of its own.

    A thread that computes may keep the interpreter's lock, so the plugin's thread wakes late.
    """
    records, begins = at_d()
    for at in begins:
        records += [step(at, 130, prefill_tokens=2048), pause(at + 10, 110, "held")]
    assert by_cause(stalls_of(records)[2:]) == {"prefill_coscheduled": 10}


def test_a_request_that_waited_preempted_has_preemption_as_its_cause() -> None:
    gaps = [10.0] * 100 + [400] + [10] * 100
    seen = stream(Role.DECODE, 0, 20, gaps, rid="req-a")
    own = times(Role.DECODE, 1, 5, 18, 2500, rid="cmpl-req-a-0-0000dddd", parent=seen, preempted=(1025 * MS, 1400 * MS))
    (stall,) = stalls_of([own, seen, *seconds(0, 3000)])
    assert (stall.cause, stall.lift, stall.doubt) == ("preemption", None, 0.0)
    assert stall.evidence == ("the request was preempted for 375 ms",)


def test_B21_what_the_client_did_not_take_is_the_clients() -> None:
    seen = stream(Role.DECODE, 0, 200, [20] * 50 + [1800] + [20] * 10, held_ms=[(1210, 3000)], rid="req-a")
    (stall,) = stalls_of([seen, *seconds(0, 4000), step(1300, 130, prefill_tokens=2048)])
    assert (stall.cause, stall.accounted_ns, stall.doubt) == ("client_backpressure", 1790 * MS, 0.0)


def test_B12_a_collection_of_garbage_stalls_every_stream_at_once_and_is_three_events() -> None:
    expected, made = gc_of_case_B12()
    stalls = stalls_of(made)
    assert len(stalls) == expected["not_outliers"]
    assert by_cause(stalls[5:]) == {"host_pause": 55}  # the first streams of a process have little to compare with
    assert {stall.evidence[0].split(" paused")[0] for stall in stalls} == {"process api 7"}
    begins = [stall.started_unix_ns for stall in stalls]
    groups = 1 + sum(two - one > 500 * MS for one, two in zip(begins, begins[1:], strict=False))  # noqa: RUF007
    assert groups == expected["stall_events"]


def test_B16_the_hand_off_in_the_first_gap_is_no_stall_of_the_stream() -> None:
    parts = split_request()
    edge = stream(Role.EDGE, 0, 620, [1390] + [24] * 40)
    p = parts["p"].__class__(**{**{f: getattr(parts["p"], f) for f in parts["p"].__slots__}, "duration_ns": 600 * MS})
    d = stream(Role.DECODE, 640, 1360, [24] * 39, kv_in=kv("cmpl-req-a-0-0000aaaa"))
    assert stalls_of([edge, p, d, *seconds(0, 4000)]) == []
    alone = stalls_of([edge])
    assert [(stall.index, stall.cause) for stall in alone] == [(0, "unknown")]  # no other evidence shows where tokens came from


def test_B24_gaps_beside_others_prefill_and_a_parser_that_held_text_back() -> None:
    made: list[Any] = list(seconds(0, 12_000))
    for request in json.loads((DATA / "request_traces/aiperf_two_requests_gaps.json").read_text())["requests"]:
        at = request["ttft_ms"] + sum(request["gaps_ms"][: request["reasoning_tokens"]])
        exchange = stream(
            Role.DECODE,
            request["start_ms"],
            request["ttft_ms"],
            request["gaps_ms"],
            turns=[(at, "reasoning>text")],
            rid=request["id"],
            trace=request["id"],
        )
        made.append(exchange)
        if request["id"] == "r-1":
            at = request["start_ms"] + request["ttft_ms"]
            for gap in request["gaps_ms"][:15]:
                made.append(step(at, gap, usual_ms=22, prefill_tokens=4096))
                at += gap
    stalls = stalls_of(made)
    early = [stall for stall in stalls if stall.index < 15]
    assert by_cause(early) == {"prefill_coscheduled": 18}
    late = [stall for stall in stalls if stall.index >= 15]
    assert [stall.cause for stall in late] == ["unknown", "unknown"]
    assert all("a parser may have delayed it" in stall.evidence[-1] for stall in late)


def test_the_edge_and_d_see_one_stall_and_their_clocks_need_not_agree() -> None:
    gaps = [10.0] * 3000 + [130] + [10] * 3000
    edge = stream(Role.EDGE, 0, 300, gaps, host="edge-host")
    d = stream(Role.DECODE, -50_000, 160, gaps, host="d-host", parent=edge)  # its clock is 50 s behind
    at = -50_000 + 160 + 30_000
    (stall,) = stalls_of([edge, d, *seconds(-60_000, 20_000), step(at - 5, 131, prefill_tokens=2048)])
    assert (stall.cause, stall.at, stall.witness, stall.scope) == ("prefill_coscheduled", "decode", "edge:8000", "edge")
    assert stall.started_unix_ns == EPOCH + 30_300 * MS
    assert (stall.instance, stall.host, stall.offset_ns) == ("decode:8000", "d-host", 30_300 * MS)


def test_a_first_chunk_that_came_late_to_the_edge_hides_none_of_the_engines_stalls() -> None:
    """Every other chunk was on time, and still no stall was found at D.

    Seen in tests/vllm.
    """
    edge = stream(Role.EDGE, 0, 400, [0.1] * 10 + [9] + [10] * 3000 + [130] + [10] * 3000)
    d = stream(Role.DECODE, 130, 160, [10.0] * 3011 + [130] + [10] * 3000, parent=edge)
    at = 130 + 160 + 30_110
    (stall,) = stalls_of([edge, d, *seconds(0, 62_000), step(at - 5, 131, prefill_tokens=2048)])
    assert (stall.cause, stall.at) == ("prefill_coscheduled", "decode")


def test_where_only_the_edge_saw_the_stream_the_engine_is_found_by_its_first_token() -> None:
    edge = stream(Role.EDGE, 0, 300, [10.0] * 3000 + [130] + [10] * 3000, host="edge-host")
    own = times(Role.DECODE, -50_000, 100, 150, 65_000, rid="cmpl-req-a-0-0000dddd", parent=edge, host="d-host")
    at = -50_000 + 150 + 30_000
    (stall,) = stalls_of([own, edge, *seconds(-60_000, 20_000), step(at - 3, 131, prefill_tokens=2048)])
    assert (stall.cause, stall.at) == ("prefill_coscheduled", "decode")


def test_a_stall_that_d_did_not_have_is_none_of_ds_doing() -> None:
    edge = stream(Role.EDGE, 0, 300, [10.0] * 300 + [130] + [10] * 300)
    d = stream(Role.DECODE, 130, 160, [10.0] * 601, parent=edge)
    at = 130 + 160 + 3000
    (stall,) = stalls_of([edge, d, *seconds(0, 8000), step(at, 131, prefill_tokens=2048)])
    assert (stall.cause, stall.at) == ("unknown", "path")
    assert stall.evidence == ("the engine's own stream continued: the delay is between the engine and the observer",)


def test_a_pause_of_the_sidecar_at_the_edge_is_the_edges() -> None:
    edge = stream(Role.EDGE, 0, 300, [10.0] * 3000 + [130] + [10] * 3000)
    d = stream(Role.DECODE, 130, 160, [10.0] * 6012, parent=edge)
    own = pause(30_310, 115, "queued", "sidecar", Role.EDGE)
    (stall,) = stalls_of([edge, d, own, *seconds(0, 62_000)])
    assert (stall.cause, stall.at) == ("host_pause", "path")
    assert stall.evidence == ("process sidecar 7 paused for 115 ms: queued",)


def test_without_a_plugin_the_missing_evidence_is_named() -> None:
    (stall,) = stalls_of([stream(Role.DECODE, 0, 20, [10] * 300 + [130] + [10] * 300)])
    assert (stall.cause, stall.lift, stall.doubt) == ("unknown", None, None)
    assert stall.evidence == ("the content of the engine's steps is unknown: the plugin reports it",)


def test_streams_without_stalls_tell_none() -> None:
    assert stalls_of([stream(Role.DECODE, 0, 20, [10] * 300), *seconds(0, 4000)]) == []


def test_absurd_times_of_other_stalls_are_left_out() -> None:
    from dataclasses import replace

    seen = stream(Role.DECODE, 0, 20, [10] * 300 + [130] + [10] * 300)
    assert seen.stalls is not None
    broken = replace(seen, stalls=replace(seen.stalls, times=b"\xff"))
    assert len(stalls_of([broken, *seconds(0, 8000)])) == 1
    assert NO_STALLS < 0
