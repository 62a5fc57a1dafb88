"""The generated dashboards: up to date, complete and usable in any Grafana."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from handrail_dashboards.boards import BOARDS
from handrail_dashboards.export import Choices, dashboards
from harness.skips import needs_ability

KINDS = {"row", "timeseries", "stat", "bargauge", "table", "text"}
TEXTS = dashboards(Choices())
FILES = [f"{board.file}.json" for board in BOARDS]


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TEXTS[name])
    return found


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in load(name)["panels"] if panel["type"] != "row"]


def uids(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for key, below in value.items():
            if key == "uid":
                yield below
            yield from uids(below)
    elif isinstance(value, list):
        for below in value:
            yield from uids(below)


@needs_ability(sys.version_info >= (3, 11), "Python 3.11, which grafana-foundation-sdk needs")
def test_the_files_are_what_the_code_makes(pytestconfig: pytest.Config) -> None:
    from handrail_dashboards.__main__ import GENERATED, write
    from handrail_dashboards.build import board_json

    if pytestconfig.getoption("--update"):
        write()
    made = {f"{board.file}.json": board_json(board) for board in BOARDS}
    kept = {file.name: file.read_text("utf-8") for file in GENERATED.glob("*.json")}
    assert kept.keys() == made.keys(), "run make dashboards"
    assert [name for name in made if made[name] != kept[name]] == [], (
        "these are not what the code makes: run make dashboards and review the diff"
    )


def test_there_are_five_and_each_says_what_it_is_for() -> None:
    boards = [load(name) for name in FILES]
    assert [board["title"] for board in boards] == [
        "Handrail / Fleet",
        "Handrail / Hand-off",
        "Handrail / Decode",
        "Handrail / GPU and links",
        "Handrail / Itself",
    ]
    assert all(board["description"] for board in boards)


@pytest.mark.parametrize("name", FILES)
def test_every_panel_has_a_title_a_description_and_a_unit(name: str) -> None:
    for panel in panels(name):
        assert panel["type"] in KINDS, panel["title"]
        assert panel["title"], panel["id"]
        assert panel["description"].endswith(".") or panel["type"] == "text", f"{panel['title']}: a description is a sentence"
        if panel["type"] != "text":
            defaults = panel["fieldConfig"]["defaults"]
            assert defaults["unit"], panel["title"]
            assert defaults["noValue"], f"{panel['title']}: what stands for nothing must be said"
            assert panel["targets"], panel["title"]
    titles = [panel["title"] for panel in panels(name)]
    assert len(titles) == len(set(titles)), "two panels of one name cannot be told apart in a link or a talk"


@pytest.mark.parametrize("name", FILES)
def test_no_panel_covers_another_and_every_id_is_one_panels(name: str) -> None:
    placed = load(name)["panels"]
    assert len({panel["id"] for panel in placed}) == len(placed)
    for panel in placed:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
    for one, other in combinations(placed, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, f"{one['title']} and {other['title']} overlap"


@pytest.mark.parametrize("name", FILES)
def test_H04_no_uid_is_written_out_and_a_variable_chooses_the_data_source(name: str) -> None:
    board = load(name)
    assert board.get("uid") is None
    assert board.get("id") is None
    assert {str(uid) for uid in uids(board)} == {"${datasource}"}
    assert "${DS_" not in TEXTS[name], "what only an import by hand asks for stays open when it is provisioned"
    assert "__inputs" not in board
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert next(iter(variables)) == "datasource", "the others ask it, so it comes first"
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for variable in variables.values():
        if variable["type"] == "query":
            assert variable["datasource"]["uid"] == "${datasource}", variable["name"]
    for annotation in board["annotations"]["list"]:
        assert annotation["datasource"]["uid"] == "${datasource}", annotation["name"]
    for panel in panels(name):
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel.get("targets", ())), panel["title"]


@pytest.mark.parametrize("name", FILES)
def test_a_choice_of_all_finds_series_without_the_label_too(name: str) -> None:
    queries = [variable for variable in load(name)["templating"]["list"] if variable["type"] == "query"]
    assert [variable["name"] for variable in queries] == ["cluster", "model", "role", "instance"]
    for variable in queries:
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*")
        assert variable["current"]["value"] == "$__all"


@pytest.mark.parametrize("name", FILES)
def test_every_variable_that_is_used_is_there(name: str) -> None:
    known = {variable["name"] for variable in load(name)["templating"]["list"]} | {
        "__all",
        "__rate_interval",
        "__range",
        "__from",
        "__to",
    }
    assert set(re.findall(r"\$\{?([A-Za-z_]\w*)", TEXTS[name])) <= known


@pytest.mark.parametrize("name", FILES)
def test_what_changed_is_drawn_over_the_panels(name: str) -> None:
    annotations = load(name)["annotations"]["list"]
    assert [annotation["name"] for annotation in annotations] == ["Engine restarted", "Deployed"]
    assert all(annotation["titleFormat"] and annotation["textFormat"] for annotation in annotations)
    assert all(annotation["target"]["expr"] == annotation["expr"] for annotation in annotations), "newer and older Grafanas"


@pytest.mark.parametrize("name", FILES)
def test_traces_are_one_click_away_by_variables(name: str) -> None:
    links = {link["title"]: link for link in load(name)["links"]}
    assert links.keys() == {"Handrail", "Slowest requests", "Tempo", "Jaeger"}
    assert (links["Handrail"]["type"], links["Handrail"]["tags"]) == ("dashboards", ["handrail"])
    assert links["Slowest requests"]["url"].startswith("${handrail}/api/v1/requests?")
    assert links["Jaeger"]["url"].startswith("${jaeger}/")
    assert links["Tempo"]["url"].count("${tempo}") == 2
    assert load(name)["tags"] == ["handrail"]


def test_H08_what_is_absent_is_not_shown_as_0() -> None:
    """An absent series is not shown as 0.

    A panel whose series nobody exports shows words. Only a sum of series that some may export uses 0 for the others.
    """
    zero = [
        panel["title"]
        for name in FILES
        for panel in panels(name)
        for target in panel.get("targets", ())
        if "vector(0)" in target["expr"]
    ]
    assert set(zero) == {"Sidecars lost", "Unused"}


def test_D13_figures_that_a_prefill_pool_cannot_have_are_not_applicable() -> None:
    shown = {
        panel["title"]: panel["fieldConfig"]["defaults"]["noValue"] for panel in panels("decode.json") if panel["type"] != "text"
    }
    for title in ("Stream gaps by pool", "Time per token by pool"):
        assert shown[title].startswith("not applicable"), title
    ratios = [
        target["expr"]
        for panel in panels("decode.json")
        for target in panel.get("targets", ())
        if "histogram_quantile" in target["expr"]
    ]
    assert all("> 0" in expr for expr in ratios), "a quantile of nothing is NaN, which compares with nothing and so is left out"


def test_D22_size_busy_rate_and_carried_rate_are_three_panels() -> None:
    units = {
        panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in panels("handoff.json") if panel["type"] != "text"
    }
    assert (units["Size of a fetch"], units["Rate while transferring"], units["Carried, on average"]) == (
        "decbytes",
        "Bps",
        "Bps",
    )


def test_B18_a_peak_stands_beside_every_mean_of_a_link() -> None:
    for name, title in (
        ("handoff.json", "Ports against their line rate"),
        ("gpu-links.json", "Against the line rate: mean and peak second"),
    ):
        panel = next(panel for panel in panels(name) if panel["title"] == title)
        assert any("handrail_link_peak_bytes_per_second" in target["expr"] for target in panel["targets"])
    pools = next(panel for panel in panels("gpu-links.json") if panel["title"] == "Pools")
    assert any("max_over_time" in target["expr"] for target in pools["targets"])
    assert any("avg_over_time" in target["expr"] for target in pools["targets"])


def test_D05_engines_of_one_process_are_distinguished_and_one_without_the_label_is_shown() -> None:
    panel = next(panel for panel in panels("decode.json") if panel["title"] == "KV cache in use")
    (target,) = panel["targets"]
    assert "by (role, instance, engine)" in target["expr"], "grouping by a label that is absent keeps the series"
    assert "engine=" not in target["expr"], "a matcher would drop it"


def test_A04_the_failures_of_an_engine_that_does_not_count_expiry_apart_are_called_mixed() -> None:
    panel = next(panel for panel in panels("handoff.json") if panel["title"] == "Failures as engines count them")
    together, transfers, expired, _ = (target["expr"] for target in panel["targets"])
    assert together == f"{transfers} + ({expired} or 0 * {transfers})", "the same total whether expiry is counted apart or not"
    assert "The network is the cause only where expiry has a counter of its own" in panel["description"]
