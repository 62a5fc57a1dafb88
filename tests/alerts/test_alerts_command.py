"""``handrail alerts``, as it is run."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from handrail_alerts.groups import files
from handrail_alerts.slo import DEFAULT, load
from handrail_cli.main import main
from harness.certs import Authority

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
    ("flags", "output"),
    [
        (["--evaluation-interval", "30"], "is not a duration"),
        (["--scrape-interval", "10ms"], "at least 1s"),
        (["--slo", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["--out", "/proc/rules"], "cannot write the rules"),
    ],
)
def test_unrenderable_input_is_reported(flags: list[str], output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "render", *flags]) in (1, 2)
    assert output in capsys.readouterr().err


def test_check_says_what_a_valid_file_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "check", str(DEFAULT)]) == 0
    assert "valid; 5 objectives, " in capsys.readouterr().out


def test_one_objective_is_not_called_objectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("objectives: [{signal: kv_fetch, target_percent: 99.9}]", "utf-8")
    assert main(["alerts", "check", str(slo)]) == 0
    assert "valid; 1 objective, " in capsys.readouterr().out


def test_days_are_shown_as_days(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = tmp_path / "slo.yaml"
    for window, output in (("1h", "must be at least 7d"), ("400d", "must be at most 366d")):
        slo.write_text(f"window: {window}\nobjectives: [{{signal: kv_fetch, target_percent: 99.9}}]", "utf-8")
        assert main(["alerts", "check", str(slo)]) == 2
        assert output in capsys.readouterr().out


def test_check_lists_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("objectives: [{signal: ttft}]\nwindw: 30d", "utf-8")
    assert main(["alerts", "check", str(slo), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False
    assert {problem["path"] for problem in answer["problems"]} >= {"windw", "objectives[0].target_percent"}


def test_the_objectives_that_come_with_it_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "slo"]) == 0
    assert capsys.readouterr().out == DEFAULT.read_text("utf-8")


@pytest.mark.parametrize("as_json", [False, True])
def test_render_tells_each_problem_on_its_line(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("objectives: [{signal: ttft, role: edge}]\nwindw: 30d\n", "utf-8")
    assert main(["alerts", "render", "--slo", str(slo), *(["--json"] if as_json else [])]) == 2
    reported_output = capsys.readouterr().err
    if as_json:
        error = json.loads(reported_output)["error"]
        assert {problem["path"] for problem in error["problems"]} == {"windw", "objectives[0].target_percent"}
        assert "handrail alerts slo" in error["valid"]
        return
    lines = reported_output.splitlines()
    assert lines[0] == f"handrail alerts: {slo}: 2 problems"
    assert f"  windw: unknown; did you mean window? ({slo}:2)" in lines
    assert f"  objectives[0].target_percent: must be given ({slo}:1)" in lines
    assert "    valid: target_percent: 99.5" in lines
    assert lines[-1].startswith("  valid:   ")
    assert "\\n" not in reported_output


Handler = Callable[[web.Request], web.Response]


async def check(handler: Handler, *flags: str, tls: ssl.SSLContext | None = None) -> int:
    """Run ``handrail alerts check`` of the default file against a stub Prometheus.

    ``handler`` answers the queries.
    """

    async def query(request: web.Request) -> web.Response:
        return handler(request)

    application = web.Application()
    application.router.add_get("/api/v1/query", query)
    runner = web.AppRunner(application)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener, ssl_context=tls).start()
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        return await asyncio.to_thread(main, ["alerts", "check", str(DEFAULT), "--prometheus", url, *flags])
    finally:
        await runner.cleanup()


def all_but_gpus(request: web.Request) -> web.Response:
    known = "handrail_gpu" not in request.query["query"]
    return web.json_response({"status": "success", "data": {"result": [{"value": [0, "1"]}] if known else []}})


async def test_check_asks_a_prometheus(capsys: pytest.CaptureFixture[str]) -> None:
    assert await check(all_but_gpus) == 1
    reported_output = capsys.readouterr().out
    assert "selectors match no series" in reported_output
    assert "handrail_gpu_lost\n    GpuLost" in reported_output
    assert "KvFetchFailed" not in reported_output


def failure(status: int, error: str = "", headers: dict[str, str] | None = None) -> Handler:
    def answer(_: web.Request) -> web.Response:
        if not error:
            return web.Response(status=status, text="<html>no</html>", headers=headers)
        return web.json_response({"status": "error", "errorType": "bad_data", "error": error}, status=status)

    return answer


@pytest.mark.parametrize("status", [400, 422])
async def test_a_refused_query_is_reported_with_its_rules_and_prometheus_error(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = 'invalid parameter "query": 1:9: parse error: unexpected <op:/>'
    assert await check(failure(status, reason)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"handrail alerts: Prometheus refuses a query of the rules: {reason}"
    assert lines[1].startswith("  query:   count(last_over_time(handrail_")
    assert lines[2].startswith("  rules:   ")
    assert "prometheus.selector, group_by and the models come from" in lines[-1]


@pytest.mark.parametrize(
    ("handler", "output"),
    [
        (failure(401), "--token-file FILE (or HANDRAIL_PROMETHEUS_TOKEN_FILE)"),
        (failure(403), "HTTP 403"),
        (failure(400), "https://127.0.0.1"),
        (failure(404), "there is no Prometheus API at this address"),
        (failure(302, headers={"Location": "https://login.example.org/"}), "redirects to https://login.example.org/"),
        (failure(503, "the query timed out"), "Prometheus cannot answer: the query timed out"),
        (failure(503), "Prometheus cannot answer: HTTP 503"),
        (lambda _: web.Response(text="hello"), "the server at this address is not Prometheus"),
        (lambda _: web.json_response(["a"]), "the server at this address is not Prometheus"),
    ],
    ids=["401", "403", "plain to TLS", "404", "redirect", "busy", "proxy", "no JSON", "other JSON"],
)
async def test_unexpected_answer_is_reported(handler: Handler, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await check(handler) == 1
    assert output in capsys.readouterr().err


async def test_a_secured_prometheus_is_queried_with_certificates_and_its_own_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = Authority(tmp_path)
    server, mine = ca.files("server"), ca.files("mine")
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.write_text("0123456789abcdef")
    other.write_text("of-the-collectors-api")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca.file))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(server.cert, server.key)

    def guarded(request: web.Request) -> web.Response:
        allowed = request.headers.get("Authorization") == "Bearer 0123456789abcdef"
        return all_but_gpus(request) if allowed else web.Response(status=401)

    certificates = ("--ca-file", str(ca.file), "--cert-file", str(mine.cert), "--key-file", str(mine.key))
    monkeypatch.setenv("HANDRAIL_API_TOKEN_FILE", str(other))
    assert await check(guarded, *certificates, tls=context) == 1
    assert "HANDRAIL_PROMETHEUS_TOKEN_FILE" in capsys.readouterr().err
    assert await check(guarded, *certificates, "--token-file", str(ours), tls=context) == 1
    assert "selectors match no series" in capsys.readouterr().out
    monkeypatch.setenv("HANDRAIL_PROMETHEUS_TOKEN_FILE", str(ours))
    assert await check(guarded, *certificates, tls=context) == 1
    assert "selectors match no series" in capsys.readouterr().out
    assert await check(guarded, tls=context) == 1
    assert "the certificate of Prometheus is not trusted" in capsys.readouterr().err


def test_a_prometheus_that_does_not_answer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    assert main(["alerts", "check", str(DEFAULT), "--prometheus", f"127.0.0.1:{port}"]) == 1
    assert "cannot query Prometheus" in capsys.readouterr().err
