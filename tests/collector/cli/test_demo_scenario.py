"""``handrail demo --scenario``: a store made by a fleet in virtual time.

The errors of a run that cannot be made are covered too.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from handrail_cli.main import main
from handrail_collector.store.publish import StorePublisher
from handrail_sim.emulator import virtual_run
from handrail_sim.emulator.virtual_run import SimulationError

START = "2026-11-29T12:00:00Z"


def demo(folder: Path, *more: str) -> list[str]:
    return ["demo", "--scenario", "split", "--requests", "60", "--seed", "3", "--start", START, "--data", str(folder), *more]


def stored(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["requests", "--data", str(folder), "--limit", "1000", "--sort", "ttft", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_other_commands_read_what_it_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo(tmp_path / "run", "--fault", "slow_link:p0>d1:40", "--json")) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["scenario"], answer["requests"], answer["rows"], answer["outcomes"]) == ("split", 60, 60, {"ok": 60})
    assert answer["started_unix_ns"] == 1_795_953_600 * 10**9
    rows = stored(tmp_path / "run", capsys)
    assert len(rows) == 60
    assert (rows[0]["prefill_host"], rows[0]["decode_host"]) == ("p0", "d1")
    assert min(row["started_unix_ns"] for row in rows) >= answer["started_unix_ns"]
    assert main(["trace", rows[0]["client_request_id"], "--data", str(tmp_path / "run")]) == 0
    assert "unattributed (D)" in capsys.readouterr().out


def test_once_is_what_such_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo(tmp_path / "run", "--once", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 60


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        (("--keep", "x"), "--data DIR keeps"),
        (("--concurrency", "4"), "--rate"),
        (("--profile", "x.yaml"), "a scenario file"),
        (("--engine", "vllm"), "emulated"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_only_sockets_have_is_refused_with_what_to_do_instead(
    flags: tuple[str, ...], instead: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(demo(tmp_path / "run", *flags)) == 2
    output = capsys.readouterr().err
    assert "is for a fleet over sockets, not for --scenario" in output
    assert instead in output.partition("valid:")[2]


def test_a_seed_repeats_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        assert main(demo(tmp_path / name)) == 0
    assert stored(tmp_path / "one", capsys) == stored(tmp_path / "two", capsys)


def test_it_says_what_was_made_and_what_to_type_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo(tmp_path / "my run", "--fault", "fetch_failed:*:1")) == 0
    reported_output = capsys.readouterr().out
    assert "split with fetch_failed:*:1: 60 requests, seed 3" in reported_output
    assert "60 stream_error." in reported_output
    assert f"requests --data '{tmp_path / 'my run'}'" in reported_output


def test_by_default_it_ended_just_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000 * 10**9
    monkeypatch.setattr("handrail_sim.demo.scenario.time.time_ns", lambda: now)
    assert main(["demo", "--scenario", "collocated", "--requests", "20", "--data", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended_unix_ns"] == now


@pytest.mark.parametrize(
    ("arguments", "what", "nearest"),
    [
        (["--scenario", "splt", "--data", "run"], "splt: neither a file", ["split"]),
        (["--scenario", "split", "--data", "run", "--fault", "slow_lnk:p0:2"], "fault 'slow_lnk': unknown", ["slow_link"]),
        (["--scenario", "split", "--data", "run", "--fault", "slow_link:p0:2"], "'p0' is no place for it", []),
        (["--scenario", "split", "--data", "run", "--start", "noon"], "--start", []),
        (["--scenario", "split", "--data", "run", "--requests", "0"], "--requests 0", []),
        (["--scenario", "split", "--data", "run", "--keep", "x"], "--keep is for a fleet over sockets", []),
        (["--scenario", "split"], "--scenario needs --data", []),
        (["--data", "run"], "--data needs --scenario", []),
        (["--requests", "10001"], "--requests 10001", []),
    ],
)
def test_an_impossible_setting_is_reported_before_anything_is_made(
    arguments: list[str],
    what: str,
    nearest: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert what in error["what"]
    assert error["valid"]
    assert [name for name in nearest if name not in error["nearest"]] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--scenario", "--profile"])
def test_a_file_that_is_no_yaml_is_reported_on_one_line(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.yaml"
    data = ["--data", str(tmp_path / "run")] if flag == "--scenario" else []
    for content, reported_output in (
        (b"\x80\xff", "it is not UTF-8 text"),
        (b"a: [b\n", "line 2"),
        (b"a\0b", "special characters"),
    ):
        file.write_bytes(content)
        assert main(["demo", flag, str(file), *data]) == 2
        first = capsys.readouterr().err.splitlines()[0]
        assert first.startswith(f"handrail demo: {file}: not YAML: ")
        assert reported_output in first
        assert "\\n" not in first


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert main(demo(tmp_path)) == 2
    assert "the folder is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unreadable_trace_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", encoding="utf-8")
    assert main(demo(tmp_path / "run", "--trace", str(tmp_path / "bad.csv"))) == 1
    assert "bad.csv: line 2" in capsys.readouterr().err


def test_a_start_in_the_past_needs_no_equals_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--scenario", "split", "--requests", "20", "--seed", "3", "--json", "--data", str(tmp_path / "run")]
    began = time.time_ns()
    assert main([*arguments, "--start", "-5h"]) == 0
    away_ns = json.loads(capsys.readouterr().out)["started_unix_ns"] - (began - 5 * 3600 * 10**9)
    assert 0 <= away_ns < 3600 * 10**9


def test_of_two_runs_into_one_folder_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run begins while the first one simulates and has stored nothing yet."""
    fly = virtual_run.ran
    codes = []

    def fly_beside(*arguments: Any) -> Any:
        monkeypatch.setattr("handrail_sim.demo.scenario.virtual_run.ran", fly)
        codes.append(main(demo(tmp_path / "run")))
        return fly(*arguments)

    monkeypatch.setattr("handrail_sim.demo.scenario.virtual_run.ran", fly_beside)
    assert main(demo(tmp_path / "run")) == 0
    assert codes == [2]
    assert "--data: the folder is not empty" in capsys.readouterr().err
    assert len(stored(tmp_path / "run", capsys)) == 60


def test_a_store_that_another_process_took_meanwhile_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fly = virtual_run.ran
    publisher = StorePublisher(tmp_path / "run" / "store")

    def fly_and_lock(*arguments: Any) -> Any:
        publisher.open()
        return fly(*arguments)

    monkeypatch.setattr("handrail_sim.demo.scenario.virtual_run.ran", fly_and_lock)
    assert main(demo(tmp_path / "run")) == 1
    publisher.close()
    assert "another collector writes to this store" in capsys.readouterr().err


def test_a_run_that_failed_leaves_the_folder_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise SimulationError("no")

    with monkeypatch.context() as patched:
        patched.setattr("handrail_sim.demo.scenario.virtual_run.ran", fail)
        assert main(demo(tmp_path / "run")) == 1
    assert main(demo(tmp_path / "run")) == 0
