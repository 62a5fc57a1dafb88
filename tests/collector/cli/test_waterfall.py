"""The waterfall: golden files of whole renderings, and rules for any row."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from builders.request_rows import JOINS, KV_AND_QUEUE, MS, ROWS, SPANS, phase, request_row, spread
from handrail.phases import Phase
from handrail_cli.render.phases import in_path_order, main_id, percent
from handrail_cli.render.waterfall import render_waterfall
from handrail_collector.api.schema import RequestAnswer
from handrail_collector.rows import PhaseRow, RequestRow

Golden = Callable[[str, str], None]


def plain_text(renderable: RenderableType, width: int, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, **options).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def drawn(row: RequestRow, width: int = 100, spans: Sequence[Any] = ()) -> str:
    return plain_text(render_waterfall(RequestAnswer(row=row, spans=spans), width, zone=timezone.utc), width)


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_is_drawn_as_before(name: str, width: int, golden: Golden) -> None:
    golden(f"cli/waterfall_{name}_{width}.txt", drawn(ROWS[name], width, SPANS if name == "ordinary" else ()))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        pytest.param(ROWS["slow_prefill_queue"], "prefill_queue at P 10.0.0.1:8100: 812 ms of the 918 ms", id="queue"),
        pytest.param(ROWS["slow_router"], "router_and_hops: 420 ms of the 524 ms", id="router"),
        pytest.param(ROWS["unattributed_at_decode"], "unattributed at D 10.0.0.2:8200: 1.03 s of the 1.12 s", id="unattributed"),
        pytest.param(
            request_row(tuple(phase(each.value, 10, "decode") for each in list(Phase)[4:10])),
            "No phase dominates the 60.0 ms to first token; the largest is decode_admission",
            id="even",
        ),
        pytest.param(ROWS["unreachable"], "failed after 3.00 ms: the server could not be reached (HTTP 502).", id="unreachable"),
        pytest.param(
            request_row((), outcome="client_disconnect", phase_of=""),
            "ended after 3.52 s: the client disconnected.",
            id="client-gone",
        ),
        pytest.param(
            request_row((), phase_of=""),
            "No phases: the evidence does not say where the time went.",
            id="answered-without-phases",
        ),
    ],
)
def test_the_first_sentence_names_what_matters(row: RequestRow, sentence: str) -> None:
    assert sentence in " ".join(drawn(row, 140).split())


def test_every_process_keeps_its_own_glyph_without_colour() -> None:
    text = drawn(ROWS["ordinary"], 140)
    rows = {line.split()[0]: line for line in text.splitlines() if " ms " in line and "%" in line}
    assert "█" in rows["prefill_compute"]
    assert "▓" in rows["first_step"]
    assert "▒" in rows["router_and_hops"]
    assert "░" in rows["unattributed"]
    assert "\x1b" not in text


def test_a_short_phase_is_not_drawn_long() -> None:
    lines = drawn(ROWS["unattributed_at_decode"], 140).splitlines()
    assert next(line for line in lines if line.startswith("decode_respond")).count("▓") == 0
    assert "▏" in next(line for line in lines if line.startswith("decode_respond"))


def test_a_sum_that_does_not_close_is_reported() -> None:
    row = request_row(spread(), ttft_token_ns=200 * MS)
    assert "The phases sum to 110 ms, not to 200 ms." in drawn(row)


def test_what_would_tell_hidden_phases_apart_depends_on_the_evidence() -> None:
    row = request_row((phase("unattributed", 90, "decode", may_be=KV_AND_QUEUE), phase("first_step", 9, "decode")))
    assert "D's own span does not separate them." in drawn(row)
    assert "point its OTLP exporter at its sidecar" in drawn(replace(row, joins=JOINS[:1]))
    tap_only = replace(row, joins=tuple(join for join in JOINS if join.evidence != "decode:proxy"))
    assert "An inline sidecar in front of D" in drawn(tap_only)
    nowhere = replace(row, phases=(phase("unattributed", 90, "path", may_be=("router_and_hops",)),))
    assert "A sidecar beside each process on the path" in " ".join(drawn(nowhere).split())


def test_words_of_a_newer_collector_are_shown_as_they_are() -> None:
    row = request_row(
        (phase("quantum_leap", 90, "elsewhere", "oracle"),), outcome="sublimated", findings=("odd_thing: 7",), hints=("new_hint",)
    )
    text = drawn(row, 140)
    assert all(word in text for word in ("quantum_leap", "oracle", "sublimated", "odd_thing: 7", "new_hint: new hint"))


def test_an_unattributed_part_stands_where_it_may_have_been_spent() -> None:
    assert [each.phase for each in in_path_order(spread())] == [
        "prefill_admission",
        "prefill_queue",
        "prefill_compute",
        "prefill_respond",
        "router_and_hops",
        "decode_admission",
        "unattributed",
        "first_step",
        "decode_respond",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "user-42-7", id="the-client's"),
        pytest.param({"client_request_id": None}, "chatcmpl-user-42-7", id="the-response's"),
        pytest.param({"client_request_id": None, "response_id": "x" * 49}, "00f067aa0ba902b7", id="not-a-line-of-it"),
    ],
)
def test_the_id_shown_is_the_one_people_know(changes: dict[str, Any], expected: str) -> None:
    assert main_id(request_row(spread(), **changes)) == expected


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [
        (0, 100, "0 %"),
        (1, 10_000, "<0.1 %"),
        (41, 1000, "4.1 %"),
        (9_949, 100_000, "9.9 %"),
        (996, 10_000, "10 %"),
    ],
)
def test_shares(part: int, whole: int, expected: str) -> None:
    assert percent(part, whole) == expected


@st.composite
def phase_rows(draw: st.DrawFn) -> tuple[PhaseRow, ...]:
    names = st.sampled_from([each.value for each in Phase])
    one = st.builds(
        PhaseRow,
        phase=names,
        duration_ns=st.integers(0, 10**13),
        process=st.sampled_from(["prefill", "decode", "path"]),
        source=st.sampled_from(["proxy", "otlp", "proxy+otlp"]),
        bound_ns=st.integers(0, 10**9),
        may_be=st.lists(names, max_size=3, unique=True).map(tuple),
    )
    return tuple(draw(st.lists(one, max_size=17)))


@given(phases=phase_rows(), width=st.integers(60, 200), of=st.sampled_from(["ttft", "total", ""]))
def test_any_phases_fit_the_width(phases: tuple[PhaseRow, ...], width: int, of: str) -> None:
    text = drawn(request_row(phases, phase_of=of), width)
    assert max(map(len, text.splitlines())) <= width


@given(phases=phase_rows().filter(bool))
def test_bars_follow_one_another_on_the_axis(phases: tuple[PhaseRow, ...]) -> None:
    lines = drawn(request_row(phases, phase_of=""), 160).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("phase "))
    axis = lines[start].index("share") + 7
    firsts = [len(line[axis:]) - len(line[axis:].lstrip()) for line in lines[start + 1 : start + 1 + len(phases)]]
    assert firsts == sorted(firsts)


def test_G03_spans_of_hosts_whose_clocks_differ_stand_along_the_path_with_their_raw_times() -> None:
    """The rows keep the order of the path and their raw times.

    P's clock is 5 s ahead. Nothing is moved. The title says whose clock gives each start.
    """
    ahead = {
        span.span_id: replace(span, start_unix_ns=span.start_unix_ns + 5000 * MS, end_unix_ns=span.end_unix_ns + 5000 * MS)
        for span in SPANS
        if span.role == "prefill"
    }
    straight, skewed = (
        [line.split() for line in text.partition("(each by the wall clock of its own host)")[2].splitlines() if line.strip()]
        for text in (
            drawn(ROWS["ordinary"], spans=SPANS),
            drawn(ROWS["ordinary"], spans=[ahead.get(span.span_id, span) for span in SPANS]),
        )
    )
    assert [line[0] for line in skewed] == ["handrail.request", "prefill", "llm_request", "decode", "llm_request"]
    assert [line[3:] for line in skewed] == [line[3:] for line in straight], "durations and places are as they were"
    assert skewed[1][1:3] == ["+5.00", "s"]
