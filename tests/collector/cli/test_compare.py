"""``handrail compare`` against real stores: folders, API, output and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builders.gaps import NO_GAPS
from builders.request_rows import MS, STARTED, request_row, spread
from doubles.memory_store import Kept, MemoryReader
from handrail.durations import format_rfc3339
from handrail_cli.main import main
from handrail_cli.render.comparison import render_comparison
from handrail_collector.api.server import ApiServer
from handrail_collector.compare.report import (
    ArmReport,
    Change,
    Comparison,
    Estimate,
    Goodput,
    HandoffOverhead,
    PairReport,
    RateLevel,
    SloTargets,
)
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader

S = 1000 * MS
HALF = STARTED + 300 * S
BEFORE, AFTER = f"{STARTED}..{HALF}", f"{HALF}..{STARTED + 700 * S}"


class NoRows:
    def rows(self) -> tuple[()]:
        return ()

    def stalls(self) -> tuple[()]:
        return ()

    def fetches(self) -> tuple[()]:
        return ()


@pytest.fixture(autouse=True)
def nobody_sets_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "HANDRAIL_API", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def stored(folder: Path, *, slower_after: float = 0.0) -> Path:
    """Store 600 requests, one a second.

    From the middle on, their prefill takes ``slower_after`` ms longer.
    """
    made = []
    for n in range(600):
        phases = spread(queue=5 + n % 7, compute=61 + (slower_after if n >= 300 else 0))
        made.append(request_row(phases, request_id=f"{n:016x}", started_unix_ns=STARTED + n * S, **NO_GAPS))
    publisher = StorePublisher(folder / "store")
    publisher.open()
    publisher.publish(0, 10, 10, [], made)
    publisher.close()
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return stored(tmp_path / "data", slower_after=200)


@pytest.fixture
async def api(data: Path) -> AsyncIterator[str]:
    server = ApiServer(StoreReader(data / "store"), NoRows(), dict, "127.0.0.1", 0, now_unix_ns=lambda: STARTED + 700 * S)
    await server.start()
    yield f"http://{server.address[0]}:{server.address[1]}"
    await server.shutdown()


async def test_a_collector_and_its_folder_say_the_same(data: Path, api: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for where in (["--data", str(data)], ["--api", api]):
        arms = [f"before={BEFORE}", f"after={AFTER}", "--gpus", "before=2,after=2", "--ttft", "250ms", "--json"]
        assert await asyncio.to_thread(main, ["compare", *arms, *where]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert answers[0]["word"] == "worse"
    assert answers[0]["objectives"]["ttft_ns"] == 250 * MS
    assert [arm["gpus"] for arm in answers[0]["arms"]] == [2, 2]
    changes = {change["figure"]: change for change in answers[0]["pairs"][0]["changes"]}
    assert changes["ttft_p50_ns"]["difference"]["value"] == pytest.approx(200 * MS)
    assert changes["gap_p99_ns"]["says"] == "cannot tell"


async def test_periods_are_given_in_any_form_of_time(api: str, capsys: pytest.CaptureFixture[str]) -> None:
    rfc = f"{format_rfc3339(STARTED)}..{format_rfc3339(HALF)}"
    assert await asyncio.to_thread(main, ["compare", rfc, AFTER, "--api", api]) == 0
    assert "▶ B is worse than A" in capsys.readouterr().out


def test_folders_are_arms_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = stored(tmp_path / "monday"), stored(tmp_path / "tuesday")
    assert main(["compare", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    assert "▶ tuesday does not differ from monday" in text
    assert main(["compare", f"{one}@{BEFORE}", f"x={other}@{BEFORE},{other}@{AFTER}", "--json"]) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    assert [(arm["name"], arm["requests"]) for arm in arms] == [("monday", 300), ("x", 600)]


def test_equal_folder_names_become_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(stored(tmp_path / "a" / "run")), str(stored(tmp_path / "b" / "run"))]) == 0
    assert "▶ B does not differ from A" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "output"),
    [
        pytest.param(["DATA"], 2, "1 arm to compare", id="one-arm"),
        pytest.param(["DATA"] * 4, 2, "4 arms to compare", id="four-arms"),
        pytest.param(["a=DATA", "a=DATA"], 2, "two arms have the same name", id="names"),
        pytest.param(["DATA", "nowhere"], 2, "this is neither a folder nor a period", id="no-folder"),
        pytest.param(["DATA", "EMPTY"], 1, "this folder holds no store", id="no-store"),
        pytest.param([f"DATA@{BEFORE}", f"DATA@{HALF}..{STARTED}"], 2, "ends before it begins", id="reversed"),
        pytest.param(["-1h..-2h", "-2h..-1h", "--data", "DATA"], 2, "ends before it begins", id="reversed-ago"),
        pytest.param(["-2h..-1h", "-1h..now", "--data", "DATA"], 1, "A: no request began in that time", id="empty"),
        pytest.param(["soon..now", "DATA"], 2, "'soon' is not a time", id="no-time"),
        pytest.param([BEFORE, "DATA"], 2, "cannot be compared with a folder", id="mixed"),
        pytest.param(["DATA", "DATA", "--gpus", "z=2"], 2, "--gpus: 'z=2' is not valid", id="gpus"),
        pytest.param(["DATA", "DATA", "--gpus", "0"], 2, "--gpus: '0' is not valid", id="no-gpus"),
        pytest.param(["DATA", "DATA", "--attain", "90"], 2, "attain: 90.0 is not between 0 and 1", id="attain"),
        pytest.param(["DATA", "DATA", "--ttft", "1"], 2, "'1' is not a duration", id="ttft"),
        pytest.param(["DATA", "DATA", "--itl-of", "p98"], 2, "invalid choice", id="itl-of"),
        pytest.param(["DATA", "DATA", "--model", "none"], 1, "no request of model 'none'", id="model"),
        pytest.param(["DATA", "DATA", "--scope", "engine"], 1, "no requests of scope engine", id="scope"),
    ],
)
def test_incomparable_arms_are_reported(
    argv: list[str], code: int, output: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    filled = [each.replace("DATA", str(data)).replace("EMPTY", str(tmp_path / "empty")) for each in argv]
    assert main(["compare", *filled]) == code
    captured = capsys.readouterr()
    assert output in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("query", "status", "output"),
    [
        pytest.param(f"a={BEFORE}", 400, "b: missing", id="one-arm"),
        pytest.param(f"a={BEFORE}&b={AFTER}&ttf=1s", 400, "unknown parameter 'ttf'", id="unknown"),
        pytest.param(f"a={BEFORE}&b={AFTER}&b={AFTER}", 400, "b: given twice", id="twice"),
        pytest.param(f"a=x={BEFORE}&b=x={AFTER}", 400, "two arms have the same name: x, x", id="names"),
        pytest.param(f"a={BEFORE}&b={HALF}..{STARTED}", 400, "ends before it begins", id="reversed"),
        pytest.param(f"a={BEFORE}&b={AFTER}&attain=2", 400, "attain: 2.0 is not between 0 and 1", id="attain"),
        pytest.param(f"a={BEFORE}&b={AFTER}&gpus=none", 400, "gpus: 'none' is not valid", id="gpus"),
        pytest.param(f"a={BEFORE}&b={AFTER}&scope=edg", 400, "scope: 'edg' is not valid", id="scope"),
        pytest.param(f"a={BEFORE}&b={STARTED + 10**6 * S}..{STARTED + 10**7 * S}", 404, "B: no request began", id="empty"),
    ],
)
async def test_the_api_says_what_is_wrong(query: str, status: int, output: str, api: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(f"{api}/api/v1/compare?{query}") as answer:
        assert answer.status == status
        assert output in (await answer.json())["error"]["what"]


async def test_the_api_names_periods_as_times_that_people_read(api: str) -> None:
    import aiohttp

    day = f"{STARTED + 86_400 * S}..{STARTED + 2 * 86_400 * S}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{api}/api/v1/compare?a={BEFORE}&b={AFTER}") as answer:
            assert [arm["where"] for arm in (await answer.json())["arms"]] == [
                ["2026-11-29T14:19:47.123Z..2026-11-29T14:24:47.123Z"],
                ["2026-11-29T14:24:47.123Z..2026-11-29T14:31:27.123Z"],
            ]
        async with session.get(f"{api}/api/v1/compare?a={BEFORE}&b={day}") as answer:
            assert (await answer.json())["error"]["where"] == "2026-11-30T14:19:47.123Z..2026-12-01T14:19:47.123Z"


async def test_another_server_is_no_collector(
    api: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail_collector.api.server.answer", lambda _: (200, {"word": "?"}))
    assert await asyncio.to_thread(main, ["compare", BEFORE, AFTER, "--api", api]) == 1
    assert "the collector's answer is not understood" in capsys.readouterr().err


async def test_a_store_without_columns_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    server = ApiServer(MemoryReader(Kept()), NoRows(), dict, "127.0.0.1", 0)
    await server.start()
    try:
        api = f"{server.address[0]}:{server.address[1]}"
        assert await asyncio.to_thread(main, ["compare", BEFORE, AFTER, "--api", api]) == 1
    finally:
        await server.shutdown()
    assert "this store has no columns to offer" in capsys.readouterr().err


# --- what is printed ------------------------------------------------------------------------------------------------------


def share(value: float, by: float = 0.02) -> Estimate:
    return Estimate(value, max(0.0, value - by), min(1.0, value + by))


def about(value: float) -> Estimate:
    return Estimate(value, value - 0.05 * abs(value), value + 0.05 * abs(value))


def made_arm(name: str, *, split: bool, ttft_ms: float, gap_ms: float, met: float, **changes: Any) -> ArmReport:
    level = RateLevel(rate=0.4, requests=1000, judged=998, seconds=2500, met=share(met), met_ttft=share(0.5), met_itl=share(0.6))
    by_tpot = replace(level, met=share(0.5), met_itl=share(1.0))
    handoff = HandoffOverhead(
        requests=1000,
        measured=0.0,
        at_least_ns=about(0.0),
        at_most_ns=about(1.9e9),
        at_least_per_1000_tokens_ns=about(0.0),
        at_most_per_1000_tokens_ns=about(2.3e8),
        between_ns=about(1.3e6),
    )
    hidden = {"unattributed": about(1.3e9)} if split else {}
    arm = ArmReport(
        name=name,
        where=(f"runs/{name}",),
        layout="split" if split else "collocated",
        layout_source=f"{1000 if split else 0:,} of 1,000 requests show a hand-off",
        begin_unix_ns=STARTED,
        end_unix_ns=STARTED + 2500 * S,
        scope="edge",
        requests=1000,
        rate=0.4,
        failed=Estimate(0.0, 0.0, 0.004),
        left=3 if split else 0,
        engines=2,
        gpus=2,
        gpus_source="engines seen, counted as one GPU each",
        gap_unit="chunk",
        gaps=255_000,
        prompt_tokens=8192.0,
        output_tokens=256.0,
        cached_share=None,
        models=("m-7b",),
        figures={"ttft_p50_ns": about(ttft_ms * MS)},
        quantiles_ns={
            "ttft": {"p10": 0.9 * ttft_ms * MS, "p50": ttft_ms * MS, "p90": 1.5 * ttft_ms * MS, "p99": 2 * ttft_ms * MS},
            "gap": {"p10": 20.0 * MS, "p50": 22.0 * MS, "p90": 25.0 * MS, "p99": gap_ms * MS},
        },
        phases_ns={"prefill_queue": about(2e7), "prefill_compute": about(7e8), "router_and_hops": about(1.3e6)} | hidden,
        goodput=Goodput(levels=(level,), at_least=None, below=0.4, estimate=None, gpus=2, contradicts=False),
        goodput_tpot=Goodput(levels=(by_tpot,), at_least=None, below=0.4, estimate=None, gpus=2, contradicts=False),
        handoff=handoff if split else None,
        notes=("named split, but by its rows it is collocated",) if name == "odd" else (),
    )
    return replace(arm, **changes)


def changed(figure: str, of: float, to: float, says: str) -> Change:
    return Change(figure=figure, of=of, to=to, difference=about(to - of), says=says)


def made_pair(of: str, to: str) -> PairReport:
    return PairReport(
        of=of,
        to=to,
        word="split does not pay",
        word_tpot="cannot tell",
        short=("ITL tail fixed", "TTFT lost in the hand-off"),
        reasons=(
            "ITL tail fixed: stream gap p99 171 ms -> 26.5 ms, -144 ms (-154 ms to -117 ms)",
            "TTFT lost in the hand-off: TTFT p50 718 ms -> 2.09 s, +1.37 s (+1.36 s to +1.65 s)",
        ),
        unlike=(),
        changes=(
            changed("ttft_p50_ns", 718 * MS, 2090 * MS, "worse"),
            replace(changed("ttft_p99_ns", 1.2e9, 7e9, "cannot tell"), difference=Estimate(5.8e9, None, None)),
            changed("gap_p99_ns", 171 * MS, 26.5 * MS, "better"),
            Change(figure="failed_share", of=0.0, to=0.001, difference=Estimate(0.001, -0.003, 0.006), says="no difference"),
        ),
        phases=(changed("prefill_compute", 7e8, 7e8 + 1e6, "no difference"), changed("unattributed", 0.0, 1.3e9, "worse")),
    )


def comparison(*arms: ArmReport) -> Comparison:
    return Comparison(
        objectives=SloTargets(),
        confidence=0.95,
        simultaneous=7,
        word="split does not pay",
        headline="split does not pay: ITL tail fixed, TTFT lost in the hand-off",
        arms=arms,
        pairs=tuple(made_pair(arm.name, arms[-1].name) for arm in arms[:-1]),
    )


PLAIN = made_arm("plain", split=False, ttft_ms=718, gap_ms=171, met=0.31)
SPLIT = made_arm("split", split=True, ttft_ms=2090, gap_ms=26.5, met=0.0)


@pytest.mark.parametrize(
    ("name", "made", "width"),
    [
        pytest.param("two", comparison(PLAIN, SPLIT), 110, id="two"),
        pytest.param("three", comparison(PLAIN, replace(PLAIN, name="odd", notes=("named odd",)), SPLIT), 110, id="three"),
        pytest.param("narrow", comparison(PLAIN, SPLIT), 70, id="narrow"),
    ],
)
def test_the_text_is_as_reviewed(name: str, made: Comparison, width: int, golden: Callable[[str, str], None]) -> None:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(render_comparison(made, width, zone=timezone.utc))
    text = "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
    assert max(map(len, text.splitlines())) <= width
    golden(f"cli/compare_{name}.txt", text)


def test_the_goodput_by_tpot_is_shown_once_where_it_is_the_objective() -> None:
    made = replace(comparison(PLAIN, SPLIT), objectives=SloTargets(itl_of="mean"))
    console = Console(width=110)
    with console.capture() as capture:
        console.print(render_comparison(made, 110, zone=timezone.utc))
    text = capture.get()
    assert "TTFT and TPOT" in text
    assert "gap p99  TTFT" not in text
    assert text.count("by TPOT") == 2


def test_an_arm_without_figures_is_drawn_all_the_same() -> None:
    bare = replace(
        PLAIN,
        quantiles_ns={},
        phases_ns={},
        goodput=replace(PLAIN.goodput, levels=()),
        goodput_tpot=replace(PLAIN.goodput, levels=()),
        models=(),
        where=("x",),
    )
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render_comparison(comparison(bare, replace(bare, name="b")), 100, zone=timezone.utc))
    assert "too few requests to judge" in capture.get()
