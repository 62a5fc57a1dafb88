"""The fleet as processes: start, address output, service, end.

SIGTERM stops them. Mistakes end them with a message.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from handrail_sim.emulator.__main__ import main
from handrail_sim.emulator.scenario import load
from handrail_sim.emulator.workload import generate

FLEET = (sys.executable, "-m", "handrail_sim.emulator")
DEADLINE_S = 180.0


@contextmanager
def process(ready: Path, *arguments: str) -> Iterator[str]:
    """Start a part of the fleet and yield its HTTP address; it must end with status 0."""
    child = subprocess.Popen([*FLEET, *arguments, "--ready-file", str(ready)])
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not ready.exists():
            assert child.poll() is None, "it ended before it was ready"
            assert time.monotonic() < deadline, "it was never ready"
            time.sleep(0.02)
        content = json.loads(ready.read_text())
        assert content["pid"] == child.pid
        yield "http://" + content["addresses"]["http"]
        child.terminate()
        assert child.wait(DEADLINE_S) == 0
    finally:
        child.kill()
        child.wait()


def test_a_fleet_of_processes(tmp_path: Path) -> None:
    engine = ("engine", "--profile", "small-l40s-edge-constant", "--speed", "20", "--model", "m")
    with (
        process(tmp_path / "p.json", *engine, "--role", "prefill") as prefill,
        process(tmp_path / "d.json", *engine, "--role", "decode", "--listen", "127.0.0.1:0") as decode,
        process(tmp_path / "r.json", "router", "--prefill", prefill, "--decode", decode, "--replace-ids") as router,
    ):
        command = [*FLEET, "load", "--url", router, "--requests", "6", "--concurrency", "3"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout.splitlines()
        with urllib.request.urlopen(decode + "/metrics") as answer:
            metrics = answer.read().decode()
    sent = [json.loads(line) for line in lines]
    assert [each["error"] for each in sent] == [None] * 6
    assert 'vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 6.0' in metrics


def test_processes_share_a_scenario_its_faults_and_a_beginning_and_tell_the_truth(tmp_path: Path) -> None:
    began = str(time.time_ns())
    shared = ("--scenario", "split", "--began-unix-ns", began, "--fault", "slow_link:p0>d0:40", "--fault", "fetch_failed:p1>d0:1")

    def own(name: str) -> tuple[str, ...]:
        return (*shared, "--truth", str(tmp_path / f"{name}.truth"))

    def engine(host: str, role: str) -> tuple[str, ...]:
        return ("engine", "--role", role, "--host", host, "--speed", "10", *own(host))

    with (
        process(tmp_path / "p0.json", *engine("p0", "prefill")) as first,
        process(tmp_path / "p1.json", *engine("p1", "prefill")) as second,
        process(tmp_path / "d0.json", *engine("d0", "decode")) as decode,
        process(tmp_path / "r.json", "router", "--prefill", first, second, "--decode", decode, *own("r")) as router,
    ):
        lines = ("--requests", "6", "--seed", "3", "--scenario", "split", "--streaming-share", "1")
        sent = subprocess.run([*FLEET, "load", "--url", router, *lines], check=True, capture_output=True, timeout=DEADLINE_S)
    (tmp_path / "load.jsonl").write_bytes(sent.stdout)
    files = [str(path) for path in tmp_path.glob("*.truth")]
    command = [*FLEET, "truth", *files, "--load", str(tmp_path / "load.jsonl"), "--began-unix-ns", began]
    datas = subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S).stdout.splitlines()
    truths = [json.loads(line) for line in datas]
    virtual = generate(load("split"), 6, 3)
    assert [(truth["prompt_tokens"]) for truth in truths] == [arrival.prompt_tokens for arrival in virtual]
    assert [truth["prefill_host"] for truth in truths] == ["p0", "p1"] * 3
    assert [truth["outcome"] for truth in truths] == ["ok", "failed"] * 3
    for truth, arrival in zip(truths, virtual, strict=True):
        assert truth["arrival_ns"] >= arrival.at_ns
        if truth["outcome"] == "ok":
            assert truth["answer_tokens"] == arrival.answer_tokens
            assert truth["phases"]["kv_transfer"] >= arrival.prompt_tokens * 131_072 / (12.5e10 / 40) * 1e9


def test_a_child_may_be_ended_as_soon_as_it_is_ready(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, pathlib, signal\n"
        "from aiohttp import web\n"
        "from handrail_sim.emulator import process\n"
        "process.write = lambda path, addresses: os.kill(os.getpid(), signal.SIGTERM)\n"
        "asyncio.run(process.serve(web.Application(), ('127.0.0.1', 0), pathlib.Path('ready')))\n"
        "print('ended well')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "ended well\n")


def test_what_is_no_truth_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p0.truth"
    path.write_text('{"saw": "Nobody"}\n')
    assert main(["truth", str(path), "--load", str(path), "--began-unix-ns", "0"]) == 1
    assert "p0.truth line 1" in capsys.readouterr().err


def test_nothing_of_handrail_is_imported() -> None:
    """The fleet is the referee: it must not share code with what it judges."""
    code = (
        "import sys, handrail_sim.emulator.__main__, handrail_sim.emulator.http_api\n"
        "print([m for m in sys.modules if m == 'handrail' or m.startswith(('handrail.', 'handrail_collector'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--profile", "nothing"], "8b-h100-balanced-per-token"),
        (["engine", "--listen", "203.0.113.1:0"], "handrail_sim.emulator engine:"),
        (["engine", "--role", "prefill", "--host", "d0"], "valid: p0, p1"),
        (["engine", "--scenario", "nowhere"], "neither a file nor one of"),
        (["engine", "--fault", "slow_link:p0>d9:4"], "valid: *, p0>d0"),
        (["router", "--prefill", "http://x", "--decode", "http://x", "--fault", "slow:x:1"], "unknown; valid: slow_prefill"),
    ],
    ids=["profile", "address", "host", "scenario", "place", "fault"],
)
def test_what_cannot_start_says_why(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["engine", "--listen", "nowhere"],
        ["engine", "--speed", "0"],
        ["load", "--url", "http://127.0.0.1:1", "--requests", "0"],
        ["load", "--url", "http://127.0.0.1:1", "--requests", "1", "--chat-share", "2"],
        ["router", "--prefill", "http://127.0.0.1:1"],
    ],
    ids=["address", "speed", "count", "share", "missing"],
)
def test_bad_arguments_are_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "error:" in capsys.readouterr().err
