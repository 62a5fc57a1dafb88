"""``handrail compare`` on the published experiment, from the fleet to a verdict.

The fleet runs in virtual time. Its evidence goes through stitching into stores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handrail_cli.main import main

pytestmark = pytest.mark.timeout(1200)  # whole runs in virtual time, five of them for the first of the eval tests

L40S_REQUESTS = 600
"""25 minutes at 0.4/s.

The headline does not depend on it: 200, 300, 400, 600 and 1,200 requests of this seed give the same one.
The split arm's p99 gap does, since about 1 % of the gaps hold a post of a transfer: 26 ms or 50.2 ms. Hence an objective of 60
ms here.
"""


ARMS = ("chunked", "split")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for scenario, requests in (
        ("l40s-chunked", L40S_REQUESTS),
        ("l40s-split", L40S_REQUESTS),
        ("h100-70b-plain", 500),
        ("h100-70b-chunked", 500),
        ("h100-70b-split", 500),
    ):
        demo(folder / scenario, "--scenario", scenario, "--requests", str(requests), "--seed", "7")
    return folder


def demo(folder: Path, *argv: str) -> Path:
    assert main(["demo", *argv, "--data", str(folder), "--json"]) == 0
    return folder


def compared(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["compare", *argv, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_split_without_peer_to_peer_does_not_pay_in_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = {name: demo(tmp_path / name, "--scenario", f"l40s-{name}", "--requests", "200", "--seed", "7") for name in ARMS}
    answer = compared(capsys, *(f"{name}={folder}" for name, folder in arms.items()), "--ttft", "1s", "--itl", "60ms")
    assert answer["headline"] == "split does not pay: ITL tail fixed, TTFT lost in the hand-off"


@pytest.mark.eval
def test_two_l40s_without_peer_to_peer_fix_the_tail_and_lose_the_ttft(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = [f"chunked={runs / 'l40s-chunked'}", f"split={runs / 'l40s-split'}"]
    answer = compared(capsys, *arms, "--ttft", "1s", "--itl", "60ms")  # published: 169 ms collocated, 25 to 52 ms split
    assert answer["headline"] == "split does not pay: ITL tail fixed, TTFT lost in the hand-off"
    assert [arm["layout"] for arm in answer["arms"]] == ["collocated", "split"]
    changes = {change["figure"]: change for change in answer["pairs"][0]["changes"]}
    assert changes["gap_p99_ns"]["difference"]["high"] < -80e6
    assert 1.1e9 < changes["ttft_p50_ns"]["difference"]["low"] < changes["ttft_p50_ns"]["difference"]["high"] < 2.5e9
    assert answer["arms"][1]["handoff"]["at_most_ns"]["value"] > 1.3e9  # the transfer alone


@pytest.mark.eval
def test_a_ttft_objective_that_the_hand_off_fits_into_lets_the_same_split_pay(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = [f"chunked={runs / 'l40s-chunked'}", f"split={runs / 'l40s-split'}"]
    answer = compared(capsys, *arms, "--ttft", "10s", "--itl", "80ms")
    assert answer["headline"] == "split pays: ITL tail fixed, TTFT longer but within its objective"


@pytest.mark.eval
def test_a_70b_model_on_h100_pays_against_both_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("plain", "chunked", "split")
    answer = compared(capsys, *(f"{name}={runs / f'h100-70b-{name}'}" for name in names), "--ttft", "2s", "--itl", "50ms")
    assert answer["headline"] == ("split pays against plain and chunked: ITL tail fixed, TTFT longer but within its objective")
    assert [(pair["of"], pair["to"]) for pair in answer["pairs"]] == [
        ("plain", "chunked"),
        ("plain", "split"),
        ("chunked", "split"),
    ]


@pytest.mark.eval
def test_a_baseline_that_may_reach_the_goal_is_not_worth_less_than_one_that_misses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain meets the objectives for about 93 % of its requests, split for none.

    Plain's interval holds the goal.
    """
    plain, split = (
        demo(tmp_path / name, "--scenario", f"l40s-{name}", "--requests", str(L40S_REQUESTS), "--seed", "1")
        for name in ("plain", "split")
    )
    answer = compared(capsys, f"plain={plain}", f"split={split}", "--ttft", "1s", "--itl", "60ms")
    met = answer["arms"][0]["goodput"]["levels"][0]["met"]
    assert met["low"] < 0.9 < met["high"]
    assert answer["arms"][1]["goodput"]["levels"][0]["met"]["high"] < 0.1
    assert answer["headline"] == "split does not pay: ITL tail not known to differ, TTFT lost in the hand-off"


@pytest.mark.eval
def test_a_slow_router_is_not_called_the_hand_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = demo(tmp_path / "plain", "--scenario", "collocated", "--requests", "1500", "--seed", "5")
    slow = demo(
        tmp_path / "slow", "--scenario", "split", "--fault", "router_slow:router:1.5", "--requests", "1500", "--seed", "5"
    )
    answer = compared(capsys, f"plain={plain}", f"split={slow}")
    assert answer["headline"] == "split does not pay: ITL tail fixed, TTFT lost between the processes (router and network)"
    handoff = answer["arms"][1]["handoff"]
    assert handoff["between_ns"]["value"] > 1.5e9
    assert handoff["at_most_ns"]["value"] < 0.1e9
