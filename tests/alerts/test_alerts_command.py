"""``handrail alerts``, as it is run."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from handrail.cli.main import main
from handrail_alerts.groups import files
from handrail_alerts.slo import DEFAULT, load

GENERATED = Path(__file__).parents[2] / "alerts/generated"


def test_render_writes_a_file_a_group_as_they_are_in_the_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "render", "--out", str(tmp_path / "rules")]) == 0
    written = {file.name: file.read_text("utf-8") for file in (tmp_path / "rules").iterdir()}
    assert written == {file.name: file.read_text("utf-8") for file in GENERATED.glob("*.yaml")}
    assert capsys.readouterr().out.split() == [str(tmp_path / "rules" / f"{name}.yaml") for name in files(load())]


def test_render_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "render", "--slo", str(DEFAULT), "--runbooks", "https://example.org/r/"]) == 0
    groups = yaml.safe_load(capsys.readouterr().out)["groups"]
    assert [group["name"] for group in groups] == [group.name for made in files(load()).values() for group in made]
    urls = [rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert "https://example.org/r/KvFetchFailed.md" in urls


def test_render_for_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "render", "--format", "prometheusrule", "--evaluation-interval", "5s"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert {group["interval"] for group in made["spec"]["groups"]} == {"5s"}
    names = [group["name"] for group in made["spec"]["groups"]]
    assert len(names) == len(set(names)), "the operator's API refuses two groups of one name"


def test_windows_follow_the_scrape_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "render", "--scrape-interval", "2m"]) == 0
    out = capsys.readouterr().out
    assert "[5m]" not in out
    assert "[8m]" in out


def test_json_lists_what_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("objectives: [{signal: ttft, role: edge, threshold: 2100ms, target_percent: 99}]", "utf-8")
    assert main(["alerts", "render", "--slo", str(slo), "--out", str(tmp_path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert str(tmp_path / "handoff.yaml") in made["files"]
    assert "KvFetchFailed" in made["alerts"]
    assert made["moved"] == ["ttft-edge: threshold 2100ms is judged at 2200ms, the nearest bound of the histogram's buckets"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--evaluation-interval", "30"], "is not a duration"),
        (["--scrape-interval", "10ms"], "at least 1s"),
        (["--slo", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["--out", "/proc/rules"], "rules cannot be written"),
    ],
)
def test_what_cannot_be_rendered_is_told(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "render", *flags]) in (1, 2)
    assert said in capsys.readouterr().err


def test_check_says_what_a_valid_file_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "check", str(DEFAULT)]) == 0
    assert "valid; 5 objectives, " in capsys.readouterr().out


def test_check_lists_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("objectives: [{signal: ttft}]\nwindw: 30d", "utf-8")
    assert main(["alerts", "check", str(slo), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] is False
    assert {problem["path"] for problem in told["problems"]} >= {"windw", "objectives[0].target_percent"}


def test_the_objectives_that_come_with_it_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "slo"]) == 0
    assert capsys.readouterr().out == DEFAULT.read_text("utf-8")


async def test_check_asks_a_prometheus(capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    async def query(request: web.Request) -> web.Response:
        known = "handrail_gpu" not in request.query["query"]
        return web.json_response({"status": "success", "data": {"result": [{"value": [0, "1"]}] if known else []}})

    application = web.Application()
    application.router.add_get("/api/v1/query", query)
    runner = web.AppRunner(application)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        assert await asyncio.to_thread(main, ["alerts", "check", str(DEFAULT), "--prometheus", url]) == 1
    finally:
        await runner.cleanup()
    told = capsys.readouterr().out
    assert "selectors match nothing" in told
    assert "handrail_gpu_lost\n    GpuLost" in told
    assert "KvFetchFailed" not in told


def test_a_prometheus_that_does_not_answer_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    assert main(["alerts", "check", str(DEFAULT), "--prometheus", f"127.0.0.1:{port}"]) == 1
    assert "Prometheus cannot be asked" in capsys.readouterr().err
