"""Which gaps are stalls: the rule on made and recorded streams.

The way in which the gaps are passed does not change the result.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.metrics.exponential_histogram import GapSketch
from handrail.stalls import (
    APART_NS,
    BLOCK,
    FACTOR,
    FLOOR_NS,
    KEPT,
    LEAST_GAPS,
    TIMES_KEPT,
    Stall,
    Stalls,
    StallWatch,
    marked,
    pack_times,
    unpack_times,
)
from handrail_sidecar.proxy.response_reader import End, ResponseReader, StreamFacts

MS = 1_000_000
TRACE = Path(__file__).parents[1] / "data" / "request_traces" / "aiperf_two_requests_gaps.json"


def ends_of(gaps: list[int], first_ns: int = 0) -> list[int]:
    ends, at = [], first_ns
    for gap in gaps:
        at += gap
        ends.append(at)
    return ends


def stalls_of(gaps: list[int]) -> Stalls | None:
    watch = StallWatch()
    watch.extend(gaps, ends_of(gaps))
    return watch.stalls()


def lengths(stalls: Stalls | None) -> list[int]:
    return [stall.gap_ns // MS for stall in stalls.longest] if stalls is not None else []


@pytest.mark.parametrize(
    ("gaps_ms", "found"),
    [
        pytest.param([25] * 20 + [220] + [25] * 20, [220], id="one"),
        pytest.param([25] * 20 + [74] + [25] * 20, [], id="below-three-times"),
        pytest.param([25] * 20 + [75] + [25] * 20, [75], id="three-times"),
        pytest.param([5] * 20 + [19] + [5] * 20, [], id="below-the-floor"),
        pytest.param([5] * 20 + [20] + [5] * 20, [20], id="the-floor"),
        pytest.param([25, 25, 25, 500], [], id="too-few-to-say"),
        pytest.param([25, 25, 25, 25, 500], [500], id="just-enough"),
        pytest.param([], [], id="no-gaps"),
        pytest.param([200] * 60, [], id="slow-and-steady"),
        pytest.param([0, 0, 0, 100] * 20, [], id="four-chunks-a-read"),
        pytest.param([0, 0, 0, 100] * 10 + [0, 0, 0, 400] + [0, 0, 0, 100] * 10, [400], id="a-stall-of-bundles"),
        pytest.param([20] * 200 + [90] * 200 + [300] + [90] * 20, [300], id="the-median-runs-along"),
        pytest.param([140] * 15 + [23] * 49, [140] * 15, id="stalls-first"),
    ],
)
def test_the_rule(gaps_ms: list[int], found: list[int]) -> None:
    assert lengths(stalls_of([gap * MS for gap in gaps_ms])) == found


def test_a_stall_has_these_facts() -> None:
    gaps = [25 * MS] * 100 + [220 * MS] + [25 * MS] * 3
    assert stalls_of(gaps) == Stalls(
        count=1,
        sum_ns=220 * MS,
        longest=(Stall(end_ns=2_720 * MS, gap_ns=220 * MS, median_ns=25 * MS, index=100),),
        times=pack_times([(2_500 * MS, 2_720 * MS)]),
    )


def test_many_stalls_are_counted_and_the_longest_reported_by_time() -> None:
    gaps = []
    for number in range(100):
        gaps += [20 * MS] * 4 + [(100 + number) * MS]
    found = stalls_of(gaps)
    assert found is not None
    assert (found.count, found.sum_ns) == (100, sum(range(100, 200)) * MS)
    assert lengths(found) == list(range(200 - KEPT, 200))
    times = unpack_times(found.times)
    assert [end - begin for begin, end in times] == [length * MS for length in range(100, 200)]
    assert times[-1][1] == sum(gaps)


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**10)), max_size=600))
def test_times_come_back_to_the_microsecond(drawn: list[tuple[int, int]]) -> None:
    times = sorted((end - min(end, length), end) for end, length in drawn)
    times.sort(key=lambda each: each[1])
    back = unpack_times(pack_times(times))
    assert len(back) == min(len(times), TIMES_KEPT)
    for (begin, end), (reported_begin, reported_end) in zip(times, back, strict=False):
        assert 0 <= end - reported_end < 1000
        assert abs(begin - reported_begin) < 2000


@given(st.binary(max_size=40))
def test_whatever_the_bytes_they_are_times_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert all(begin <= end for begin, end in unpack_times(data))


@given(st.lists(st.integers(0, 200 * MS), max_size=300), st.lists(st.integers(1, 64), min_size=1, max_size=20))
def test_how_gaps_are_handed_over_changes_nothing(gaps: list[int], pieces: list[int]) -> None:
    watch, at, ends, turn = StallWatch(), 0, ends_of(gaps), 0
    while at < len(gaps):
        size = pieces[turn % len(pieces)]
        turn += 1
        watch.extend(gaps[at : at + size], ends[at : at + size])
        watch.stalls()  # reading changes nothing either
        at += size
    assert watch.stalls() == stalls_of(gaps)


@given(st.lists(st.integers(0, 200 * MS), max_size=4 * BLOCK))
def test_every_stall_is_one_by_the_rule_and_every_other_gap_is_none(gaps: list[int]) -> None:
    found = stalls_of(gaps)
    expected = []
    for index, gap in enumerate(gaps):
        first = index - index % BLOCK
        among = gaps[first : first + BLOCK]
        if len(among) < BLOCK:
            among = gaps[max(0, len(gaps) - BLOCK) :]
        arrivals = [other for other in among if other >= APART_NS]
        if len(arrivals) >= LEAST_GAPS and gap >= max(FACTOR * median_low(arrivals), FLOOR_NS):
            expected.append(index)
    assert (found.count if found else 0) == len(expected)
    if found is not None:
        assert {stall.index for stall in found.longest} <= set(expected)
        assert len(found.longest) == min(KEPT, len(expected))
        assert all(stall.end_ns == sum(gaps[: stall.index + 1]) for stall in found.longest)


def test_time_in_which_the_client_did_not_read_belongs_to_the_stalls_around_it() -> None:
    gaps = [20 * MS] * 10 + [500 * MS] + [20 * MS] * 10
    found = stalls_of(gaps)
    assert found is not None
    stalls = marked(found, [(150 * MS, 160 * MS), (300 * MS, 650 * MS)], [(700 * MS, "reasoning>text")])
    assert stalls.held_ns == 360 * MS
    assert [(stall.held_ns, stall.turn) for stall in stalls.longest] == [(350 * MS, "reasoning>text")]


# --- recorded and made-up streams ----------------------------------------------------------------------------------------


def read(pieces: list[tuple[int, bytes]]) -> StreamFacts:
    reader = ResponseReader(
        "chat",
        choices=1,
        status=200,
        content_type="text/event-stream",
        content_encoding=None,
        continuous_usage=None,
    )
    for at_ns, data in pieces:
        reader.feed(data, at_ns)
    reader.finish(pieces[-1][0], End.CLEAN)
    return reader.facts()


def delta(**content: str) -> bytes:
    chunk = {"id": "c", "model": "m", "choices": [{"index": 0, "delta": content, "finish_reason": None}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def test_B24_gaps_beside_others_prefill_and_one_where_reasoning_ends() -> None:
    reports: list[Any] = []
    for request in json.loads(TRACE.read_text())["requests"]:
        gaps = [round(gap * MS) for gap in request["gaps_ms"]]
        at = round(request["ttft_ms"] * MS)
        kinds = ["reasoning"] * request["reasoning_tokens"] + ["content"] * len(gaps)
        pieces = [(at, delta(**{kinds[0]: "t"}))]
        for gap, kind in zip(gaps, kinds[1:], strict=False):
            at += gap
            pieces.append((at, delta(**{kind: "t"})))
        facts = read(pieces)
        assert facts.gaps is not None
        assert facts.stalls is not None
        sketch = GapSketch.decode(facts.gaps.sketch)
        reports.append(
            (
                [pytest.approx((sketch.quantile(q) or 0) / MS, rel=0.01) for q in (0.5, 0.99)],
                facts.gaps.max_ns / MS,
                [stall.index for stall in facts.stalls.longest if not stall.turn],
                [(stall.index, stall.turn) for stall in facts.stalls.longest if stall.turn],
            )
        )
    assert reports == [
        ([22.7, 142.45], 159.07, list(range(15)), [(131, "reasoning>text")]),
        ([22.7, 139.01], 160.85, [0, 1, 2], [(130, "reasoning>text")]),
    ]


def test_B07_one_token_has_no_gap_and_no_stall() -> None:
    facts = read([(22_000 * MS, delta(content="t"))])
    assert (facts.events, facts.gaps, facts.itl, facts.stalls, facts.tpot_mean_ns) == (1, None, None, None, None)


def test_an_answer_that_comes_at_once_in_the_end_has_no_stalls() -> None:
    pieces = [(3_000 * MS + number * 50_000, delta(content="t")) for number in range(40)]
    facts = read([*pieces, (3_030 * MS, delta(content="t"))])
    assert (facts.events, facts.stalls) == (41, None)
