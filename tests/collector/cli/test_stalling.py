"""Stalls under the waterfall, and the stall table of ``explain``.

Golden files hold whole renderings. Other tests check what must hold for any stall.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timezone
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from builders.request_rows import EDGE as EDGE_INSTANCE
from builders.request_rows import MS, ROWS, STARTED, D
from handrail_cli.glossary import STALL
from handrail_cli.main import main
from handrail_cli.render.period import render
from handrail_cli.render.stalls import MARKS, SHOWN, stall_lines
from handrail_cli.render.waterfall import render_waterfall
from handrail_collector.api.schema import RequestAnswer, stall_from_json
from handrail_collector.batch import publish
from handrail_collector.explain.stalls.evidence import StallCause
from handrail_collector.rows import StallRow

ROW = ROWS["ordinary"]
BEGIN_NS = ROW.ttft_token_ns or 0


def stall(at_ms: float, gap_ms: float, cause: str = "unknown", number: int = 0, **more: Any) -> StallRow:
    """Return a stall that begins ``at_ms`` after the first token."""
    offset_ns = BEGIN_NS + round(at_ms * MS)
    return StallRow(
        **{
            "started_unix_ns": STARTED + offset_ns,
            "trace_id": ROW.trace_id,
            "request_id": ROW.request_id,
            "version": ROW.version,
            "number": number,
            "client_request_id": ROW.client_request_id,
            "scope": "edge",
            "model": ROW.model,
            "witness": EDGE_INSTANCE,
            "at": "decode",
            "instance": D,
            "host": "host-d",
            "offset_ns": offset_ns,
            "gap_ns": round(gap_ms * MS),
            "median_ns": 11_200_000,
            "index": 40,
            "cause": cause,
            **more,
        }
    )


STALLS = (
    stall(
        300,
        212,
        "prefill_coscheduled",
        0,
        accounted_ns=198 * MS,
        lift=41.3,
        doubt=0.004,
        evidence=("a step of 204 ms (usual 11.2 ms) ran 8,192 prompt tokens beside 24 of streams",),
    ),
    stall(
        700, 140, "prefill_coscheduled", 1, accounted_ns=120 * MS, lift=41.3, doubt=0.0002, evidence=("a step ran 4,096 more",)
    ),
    stall(
        1900, 1500, "client_backpressure", 2, accounted_ns=1490 * MS, doubt=0.0, evidence=("the client read nothing for 1.49 s",)
    ),
    stall(3450, 60, "unknown", 3, evidence=("the engine's steps were no longer than usual",)),
)


def shown(stalls: tuple[StallRow, ...], width: int) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(
        render_waterfall(RequestAnswer(row=ROW, stalls=stalls), width, zone=timezone.utc)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_stalls_of_a_stream_are_drawn_as_before(width: int, golden: Callable[[str, str], None]) -> None:
    text = shown(STALLS, width)
    section = text[text.index("Stalls\n") : text.index("\nHow the evidence")]
    golden(f"cli/trace_stalls_{width}.txt", section)


def test_a_stream_without_stalls_has_no_such_section() -> None:
    assert "Stalls" not in shown((), 100)


def test_every_cause_has_its_letter_and_its_words() -> None:
    causes = {cause.value for cause in StallCause}
    assert set(MARKS) == set(STALL) == causes
    assert len(set(MARKS.values())) == len(causes)


def test_the_longest_are_shown_in_order_and_the_others_counted() -> None:
    many = tuple(stall(100 * number, 30 + number, number=number) for number in range(SHOWN + 5))
    text = shown(many, 100)
    assert f"the {SHOWN} longest of {SHOWN + 5}; --json has all" in text
    assert "30.0 ms" not in text
    assert text.index(" 36.0 ms") < text.index(" 40.0 ms")


_MADE = st.builds(
    stall,
    st.floats(-10_000, 1e6, allow_nan=False),
    st.floats(0, 1e6, allow_nan=False),
    st.sampled_from([cause.value for cause in StallCause] + ["a_cause_of_a_later_version"]),
    lift=st.none() | st.floats(0, 1e9),
    doubt=st.none() | st.floats(0, 1),
    evidence=st.lists(st.text("ab \n\x1b", max_size=300), max_size=3).map(tuple),
)


@given(st.lists(_MADE, max_size=20), st.integers(60, 200), st.integers(0, 10**12))
def test_any_stalls_fit_any_width(stalls: list[StallRow], width: int, duration_ns: int) -> None:
    for line in stall_lines(replace(ROW, duration_ns=duration_ns), stalls, width):
        assert line.cell_len <= width


@pytest.fixture
def data(tmp_path: Path) -> Path:
    publish(tmp_path, [ROW], stalls=list(STALLS))
    return tmp_path


def test_a_trace_of_a_store_has_them_in_words_and_whole_as_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "user-42-7", "--data", str(data)]) == 0
    assert "client_backpressure" in capsys.readouterr().out
    assert main(["trace", "user-42-7", "--data", str(data), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["stalls"]
    assert [stall_from_json(each) for each in answer] == list(STALLS)


def test_explain_has_them_by_cause(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    period = ["--since", "2026-11-01", "--until", "2027-11-02"]
    assert main(["explain", "--data", str(data), *period]) == 0
    text = capsys.readouterr().out
    assert "Streams stalled 4 times" in text
    assert "Why streams stalled" in text
    assert main(["explain", "--data", str(data), "--json", *period]) == 0
    (scope,) = json.loads(capsys.readouterr().out)["scopes"]
    assert {each["cause"]: each["stalls"] for each in scope["stalls"]["causes"]} == {
        "prefill_coscheduled": 2,
        "client_backpressure": 1,
        "unknown": 1,
    }


def test_the_table_of_causes_at_any_width(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--data", str(data), "--json", "--since", "2026-11-01", "--until", "2027-11-02"]) == 0
    plain = json.loads(capsys.readouterr().out)
    for width in (60, 80, 100, 140):
        console = Console(width=width, highlight=False, markup=False, color_system=None)
        with console.capture() as capture:
            console.print(render(plain, width, STARTED, timezone.utc))
        lines = capture.get().splitlines()
        assert all(len(line) <= width for line in lines)
        assert any(line.split()[:2] == ["client_backpressure", "1"] for line in lines)
