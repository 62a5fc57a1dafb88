"""Every panel of every board, drawn by Grafana's own components in Chromium.

A real Prometheus scrapes real pages for it.
``make test-dashboards`` installs what this needs. ``HANDRAIL_STAGE_SECONDS`` says how long the fleet runs first (75).
``HANDRAIL_SCREENSHOTS`` says where the screenshots go (the test's own folder; docs/screenshots to renew those of the pages).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from handrail_dashboards.boards import BOARDS
from handrail_dashboards.export import Choices, dashboards
from harness.skips import skip_missing
from harness.staged_fleet import SCRAPE_S, Stage, staged

pytestmark = pytest.mark.grafana

RENDER: Final = Path(__file__).parent / "render"
NAMES: Final = [board.file for board in BOARDS]
FAULTS: Final = (
    *("slow_link:p0>d0:8", "fetch_failed:p1>d1:0.2", "preemption_storm:d0:0.3", "gpu_throttled:d1:4"),
    "slow_prefill:p1:25@150-190",  # by then enough requests are joined to say which ones are slow
)
SECONDS: Final = float(os.environ.get("HANDRAIL_STAGE_SECONDS", "75"))
Shown = dict[str, Any]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        skip_missing(f"{name}: make test-dashboards installs it")
    return found


@pytest.fixture(scope="session")
def node() -> str:
    found = program("node")
    if not (RENDER / "node_modules/.package-lock.json").exists():
        skip_missing("Grafana's components: make test-dashboards installs them (npm, 530 MB)")
    return found


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("boards")
    made = dashboards(Choices())
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [str(folder / f"{name}.json") for name in NAMES]


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory, node: str) -> Iterator[Stage]:
    program("prometheus")
    program("chromium")
    with staged(tmp_path_factory.mktemp("stage"), FAULTS) as running:
        yield running


@pytest.fixture(scope="session")
def shown(stage: Stage, node: str, files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Return what each board shows once the fleet has run for a while."""
    if not (RENDER / "dist/index.html").exists():
        subprocess.run([node, "node_modules/vite/bin/vite.js", "build"], cwd=RENDER, check=True, timeout=300)
    while time.time() < stage.started_s + SECONDS or not stage.ask("handrail_trace_coverage_ratio"):
        assert time.time() < stage.started_s + SECONDS + 120, "nothing is joined"
        time.sleep(1)
    out = tmp_path_factory.mktemp("screenshots")
    times = ("--start", str(int(stage.started_s) + 5), "--end", str(int(time.time()) - 1), "--scrape", str(SCRAPE_S))
    where = ("--prometheus", stage.prometheus, "--out", str(out), "--chromium", program("chromium"))
    done = subprocess.run([node, "render.mjs", *where, *times, *files], cwd=RENDER, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    if kept := os.environ.get("HANDRAIL_SCREENSHOTS"):
        for image in out.glob("*.png"):
            shutil.copy(image, kept)
    found: Shown = json.loads(done.stdout)
    return found


@pytest.mark.timeout(600)
def test_boards_are_of_the_types_that_grafana_publishes(node: str, files: list[str]) -> None:
    done = subprocess.run([node, "types.mjs", *files], cwd=RENDER, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "broken",
    [
        ("gridPos", {"h": 4, "w": "wide", "x": 0, "y": 0}),
        ("options", {"graphMode": "aera"}),
        ("fieldConfig", {"defaults": {"thresholds": {"mode": "absolutely", "steps": []}}, "overrides": []}),
    ],
    ids=lambda broken: broken[0],
)
def test_a_board_of_other_types_is_found(node: str, files: list[str], tmp_path: Path, broken: tuple[str, Any]) -> None:
    board = json.loads(Path(files[0]).read_text("utf-8"))
    panel = next(panel for panel in board["panels"] if panel["type"] == "stat")
    panel[broken[0]] = broken[1]
    (tmp_path / "broken.json").write_text(json.dumps(board), encoding="utf-8")
    done = subprocess.run(
        [node, "types.mjs", str(tmp_path / "broken.json")], cwd=RENDER, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, "the type check finds nothing"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_every_panel_is_drawn_without_an_error(shown: Shown, name: str) -> None:
    board = shown[name]
    assert board["errors"] == []
    assert [
        f"{panel['title']}: {panel['failed']}" for panel in board["panels"] if panel["failed"] or panel["state"] != "done"
    ] == []
    assert [count for _, count in board["annotations"]], "annotations are asked too"


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_shows_data_or_says_why_there_is_none(shown: Shown, name: str) -> None:
    for panel in shown[name]["panels"]:
        if panel["type"] == "text":
            continue
        assert "No data" not in panel["text"], panel["title"]
        assert "NaN" not in panel["text"], panel["title"]
        assert panel["frames"] or panel["nothing"] or panel["type"] == "stat", panel["title"]


EMPTY: Final = {
    # one host: nothing bounds a pair of clocks; nothing is lost; slow links and slow requests show after some minutes
    "fleet": set() if SECONDS >= 250 else {"Where the slowest 1 % spend their time to first token", "Slow requests, by phase"},
    "handoff": {"Slow links now"},
    "decode": {"ITL p99"},  # the load asks for no running totals
    "gpu-links": {"Errors and congestion"},
    "handrail": {
        "Sidecars: lost in this time range",
        "Collectors: not used in this time range",
        "Findings of this time range",
        "Clock bound",
        "Clock bounds",
    },
}
"""Panels that may be without data on this stage, by board.

Each then shows its own words.
"""


@pytest.mark.parametrize("name", NAMES)
def test_panels_of_the_stage_have_data(shown: Shown, name: str) -> None:
    empty = {panel["title"] for panel in shown[name]["panels"] if panel["type"] != "text" and not panel["frames"]}
    assert empty <= EMPTY.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_panels_stay_within_the_page(shown: Shown, name: str) -> None:
    for panel in shown[name]["panels"]:
        x, y, width, height = panel["box"]
        assert x >= 0, panel["title"]
        assert x + width <= 1440, panel["title"]
        assert y + height <= shown[name]["height"] + 1, panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_answer_is_on_the_first_screen(shown: Shown, name: str) -> None:
    """At 1440x900 the numbers and what is below them fit without scrolling."""
    panels = sorted(shown[name]["panels"], key=lambda panel: (panel["box"][1], panel["box"][0]))
    numbers = [panel for panel in panels if panel["type"] == "stat"]
    below = next(panel for panel in panels if panel["type"] != "stat")
    assert len(numbers) >= 6
    assert max(panel["box"][1] + panel["box"][3] for panel in (*numbers, below)) <= 900


def test_variables_find_what_is_there(shown: Shown) -> None:
    options = shown["fleet"]["options"]
    assert options["cluster"] == ["demo"]
    assert {"edge", "prefill", "decode"} <= set(options["role"])
    assert len(options["instance"]) == 5
    assert options["model"]


def test_failures_count_under_the_requested_model(shown: Shown) -> None:
    (models,) = (panel for panel in shown["fleet"]["panels"] if panel["title"] == "Models and pools")
    assert "emulated-8b" in models["text"]
    assert "unknown" not in models["text"]


def test_failures_that_did_not_happen_are_0_and_not_nothing(shown: Shown) -> None:
    (wrong,) = (panel for panel in shown["handoff"]["panels"] if panel["title"] == "Wrong KV")
    assert wrong["text"].splitlines()[-1] == "0"


def test_exemplars_are_stored_with_their_trace(stage: Stage, shown: Shown) -> None:
    query = {"query": "handrail_ttft_seconds_bucket", "start": str(stage.started_s), "end": str(time.time())}
    found = get(f"{stage.prometheus}/api/v1/query_exemplars?{urllib.parse.urlencode(query)}")["data"]
    traces = [exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]]
    assert traces
    row = get(f"{stage.api}/api/v1/requests/{traces[0]}")["request"]
    assert row["trace_id"] == traces[0], "the link of an exemplar leads to its request"


def test_quantiles_of_the_boards_are_those_that_the_client_saw(
    stage: Stage, shown: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quantiles of the boards' own queries match the client's within 10 %.

    They cover the whole run at the edge. The client's own loop may add time.
    """
    sent = [each for each in stage.sent() if each["stream"] and each["status"] == 200 and each["ttft_token_ns"]]
    clients = {
        "Time to first token by pool": [each["ttft_token_ns"] / 1e9 for each in sent],
        "Stream gaps by pool": [(b - a) / 1e9 for each in sent for a, b in pairwise(each["chunk_ns"])],
    }
    errors = {}
    for panel in json.loads(dashboards(Choices())["fleet.json"])["panels"]:
        for share, target in zip((0.5, 0.99, 0.999), panel.get("targets", ()) if panel["title"] in clients else (), strict=False):
            query = target["expr"].replace("$__rate_interval", f"{int(time.time() - stage.started_s)}s").replace("$role", "edge")
            (found,) = stage.ask(re.sub(r"\$(cluster|model|instance)", ".*", query))
            ordered = sorted(clients[panel["title"]])
            true = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
            errors[panel["title"], share] = float(found["value"][1]) / true - 1
            assert float(found["value"][1]) == pytest.approx(true, rel=0.1, abs=0.01), (panel["title"], share)
    assert len(errors) == 6
    with capsys.disabled():
        print(
            f"\nboards against {len(sent)} requests of the load generator: "
            + ", ".join(f"{error:+.1%}" for error in errors.values())
        )


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)
