"""The layout of an explanation at any width.

Figures and names stay whole, lines have no trailing blanks, and every row says something.
"""

from __future__ import annotations

from datetime import timedelta, timezone

import pytest

from handrail_cli.console import CleanConsole
from handrail_cli.render.period import render

NOW = 1_795_964_400_000_000_000  # 2026-11-29 15:00 UTC
MS, SECOND = 10**6, 10**9
LINK = "prefill-7.rack-12>decode-3.rack-4"


def contrast(value: str, **more: object) -> dict[str, object]:
    return {
        "dimension": "link",
        "value": value,
        "cases": 26,
        "cases_share": 1.0,
        "controls": 94,
        "controls_share": 0.0752,
        "lift": 13.3,
        "low": 9.6,
        "high": 18.4,
        "stands_out": True,
        "above_chance": True,
        **more,
    }


def answer(*contrasts: dict[str, object], verdict: str = "stands_out", place: str = "p0>d1") -> dict[str, object]:
    named = {
        "why": "",
        "phase": "prefill_compute",
        "phases": ["prefill_compute"],
        "place": place,
        "requests": 26,
        "share": 0.9,
        "excess_ns": 1760 * MS,
        "baseline_ns": 69 * MS,
        "first_unix_ns": NOW - 1000 * SECOND,
        "last_unix_ns": NOW - 600 * SECOND,
        "examples": ["a"],
    }
    tail = {
        "verdict": verdict,
        "excess_ns": 4020 * MS,
        "causes": {"named": [named], "ambiguous": 0, "at_base_rate": 3, "slow": 29},
        "phases": [
            {
                "phase": "unattributed",
                "place": "decode",
                "baseline_ns": 48 * MS,
                "slow_ns": 4030 * MS,
                "excess_ns": 3980 * MS,
                "share": 0.9,
            }
        ],
        "concentrations": list(contrasts),
    }
    percentiles = {"p50": 251 * MS, "p90": 1140 * MS, "p99": 3330 * MS, "p99.9": 5350 * MS}
    scope = {
        "scope": "edge",
        "summary": ["The slowest 1 % waited longer."],
        "requests": 2500,
        "timed": 2500,
        "gaps": 67_962,
        "ttft_ns": percentiles,
        "gap_ns": percentiles,
        "ttft": tail,
        "gap": None,
        "failures": {"requests": 0, "concentrations": [], "by_kv_outcome": {}, "by_outcome": {}},
    }
    return {
        "since_unix_ns": NOW - 3600 * SECOND,
        "until_unix_ns": NOW,
        "latest_unix_ns": NOW,
        "model": None,
        "models": [],
        "exact": True,
        "rolled_hours": 0,
        "scopes": [scope],
    }


def shown(plain: dict[str, object], width: int, zone: timezone = timezone.utc) -> list[str]:
    console = CleanConsole(width=width, highlight=False, markup=False, color_system=None)
    with console.capture() as capture:
        console.print(render(plain, width, NOW, zone))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 120])
@pytest.mark.parametrize("place", ["p0>d1", LINK])
def test_no_figure_and_no_name_is_cut(width: int, place: str) -> None:
    lines = shown(answer(contrast(place), place=place), width)
    text = "\n".join(lines)
    assert "…" not in text
    assert max(map(len, lines)) <= width
    for whole in ("3.33 s", "5.35 s", "1.76 s", "+3.98 s", "26 · 100 %"):
        assert whole in text
    if width >= 60:
        assert place in text or len(place) > 20  # a long one is folded
    if width >= 80 and place == "p0>d1":
        assert "14:43:20 and 14:50:00" in text


def test_no_line_ends_in_blanks() -> None:
    assert [line for line in shown(answer(contrast("p0>d1")), 100) if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("zone", "output"),
    [
        pytest.param(timezone.utc, "2026-11-29 14:00:00 to 15:00:00 UTC (1h 00m) · exact", id="utc"),
        pytest.param(timezone(timedelta(hours=1)), "2026-11-29 15:00:00 to 16:00:00 UTC+01:00 (1h 00m) · exact", id="east"),
        pytest.param(
            timezone(timedelta(hours=-14, minutes=-30)),
            "2026-11-28 23:30:00 to 2026-11-29 00:30:00 UTC-14:30 (1h 00m) · exact",
            id="over midnight",
        ),
    ],
)
def test_period_has_date_and_zone(zone: timezone, output: str) -> None:
    assert shown(answer(contrast("p0>d1")), 100, zone)[0] == output


def test_hosts_that_do_not_stand_out_and_may_be_chance_are_left_out() -> None:
    noise = [contrast(f"p{i}>d0", cases=2, stands_out=False, above_chance=False) for i in range(2000)]
    assert "p1>d0" not in "\n".join(shown(answer(*noise, verdict="nothing_stands_out"), 100))
    hint = contrast("p7>d7", stands_out=False)
    assert "p7>d7" in "\n".join(shown(answer(hint, *noise, verdict="nothing_stands_out"), 100))


def test_an_unknown_model_is_reported_with_the_nearest() -> None:
    nothing = {**answer(), "scopes": [], "model": "lama-8b", "models": ["llama-8b"]}
    text = "\n".join(shown(nothing, 100))
    assert "no request of the model 'lama-8b'" in text
    assert "nearest known: llama-8b" in text
    assert "--since" not in text
