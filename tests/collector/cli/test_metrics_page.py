"""``handrail metrics``: its page for people and for programs.

The page says what it cannot know.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from handrail_cli.main import main

_DATA = Path(__file__).parents[2] / "data"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["metrics", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_recorded_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(_DATA / "recordings/metrics_decode_after_one_failure.txt"), "--role", "decode")
    assert (code, err) == (0, "")
    rows: dict[str, list[str]] = {}
    for line in filter(str.strip, out.splitlines()):
        rows.setdefault(line.split()[0], line.split())
    assert rows["kv_transfer_bytes"][1:6] == ["0", "nixl", "12", "131", "kB"]
    assert rows["queue_seconds"][-1] == "unknown"
    assert rows["kv_transfer_failures"][1:4] == ["0", "nixl", "1"]
    assert "e+" not in out
    assert "note: the sum of a time is negative" in out


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("D01_saturated.prom", "> 60.0 s"),
        ("D02_floor.prom", "≤ 300 ms"),
        ("D25_sglang_sample.prom", "> 30.0 s"),
        ("D08_A_old.prom", "another version's name: vllm:gpu_cache_usage_perc (expected vllm:kv_cache_usage_perc)"),
        ("D08_B_both.prom", "two names, the newer is read: vllm:gpu_cache_usage_perc"),
    ],
)
def test_reported_pages(page: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, str(_DATA / "replay/metrics" / page))
    assert shown in out


def test_D13_a_prefill_has_no_gaps_to_speak_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page"
    page.write_text(
        "vllm:inter_token_latency_seconds_count 0\nvllm:inter_token_latency_seconds_sum 0\nvllm:num_requests_running 1\n"
    )
    assert "not applicable" in run(capsys, str(page), "--role", "prefill")[1]
    assert "not applicable" not in run(capsys, str(page), "--role", "decode")[1]


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, str(_DATA / "replay/metrics/D25_sglang_sample.prom"), "--json")
    answer = json.loads(out)
    ttft = next(each for each in answer["histograms"] if each["name"] == "ttft_seconds")
    assert ttft["quantiles"]["p50"] == {"side": "above", "low": 30.0, "high": None, "value": None}
    assert {note["kind"] for note in answer["notes"]} == {"no_first_token", "tokens_without_gap", "saturated"}


@pytest.mark.parametrize(
    ("where", "code", "what"),
    [
        ("/nowhere/page", 2, "cannot be read"),
        ("http://127.0.0.1:1/metrics", 1, "cannot connect: Connection refused"),
        (str(_DATA / "LICENCES.md"), 1, "this is no metrics page"),
    ],
    ids=["no_file", "nobody", "no_page"],
)
def test_mistakes(where: str, code: int, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended, out, err = run(capsys, where)
    assert (ended, out) == (code, "")
    assert what in err
    assert f"where:   {where}" in err


def test_D23_nothing_is_called_verified() -> None:
    """No text of ours claims that bytes are right.

    A success counter belongs to the control layer.
    """
    root = Path(main.__code__.co_filename).parents[2]
    for file in [*(root / "sidecar").rglob("*.py"), *(root / "collector").rglob("*.py")]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
                assert "verified" not in node.value.lower().replace("unverified", ""), (file, node.lineno)
