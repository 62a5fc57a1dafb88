"""The articles' emulated pairs, run through the commands as a user runs them.

The commands are ``demo --plugin``, ``links`` and ``explain``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handrail_cli.main import main

Capture = pytest.CaptureFixture[str]
START = "2026-11-29T12:00:00Z"
PERIOD = ("--since", "2026-11-29T12:00:00Z", "--until", "2026-11-29T13:00:00Z")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pairs")
    for name in ("l40s-split", "h100-70b-split"):
        demo = ("demo", "--scenario", name, "--requests", "400", "--seed", "5", "--start", START, "--plugin")
        assert main([*demo, "--data", str(root / name), "--json"]) == 0
    return {name: root / name for name in ("l40s-split", "h100-70b-split")}


def links_output(command: str, folder: Path, capsys: Capture) -> dict[str, Any]:
    capsys.readouterr()
    assert main([command, "--data", str(folder), *PERIOD, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_L40S_explain_says_that_the_link_is_slow_and_at_what_rate_of_what(pairs: dict[str, Path], capsys: Capture) -> None:
    (answer,) = links_output("explain", pairs["l40s-split"], capsys)["links"]
    assert "The link p0:8000>d0:8000 is slow: KV moves at 0.36 GB/s while transferring" in answer
    assert "over TCP (eth0: 12 % of its line rate of 3.12 GB/s)" in answer
    assert "of the median time to first token" in answer
    assert main(["explain", "--data", str(pairs["l40s-split"]), *PERIOD]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert output.index("is slow") < output.index("edge as the client saw it"), (
        "where all suffer alike, that is the answer: first"
    )
    assert "handrail links --since" in output


def test_L40S_links_tell_it_by_the_counters_of_both_hosts_from_the_store(pairs: dict[str, Path], capsys: Capture) -> None:
    (link,) = links_output("links", pairs["l40s-split"], capsys)["links"]
    assert (link["transport"], link["slow"]) == ("tcp", True)
    assert [text for text in link["evidence"] if text.startswith("eth0 at")] == link["evidence"][:2]
    assert link["rate"] == pytest.approx(361.4e6, rel=0.02)
    assert link["share_of_line"] == pytest.approx(0.1157, rel=0.02)
    assert {device["host"] for device in link["devices"] if device["carried"]} == {"p0", "d0"}
    carrying = next(device for device in link["devices"] if device["host"] == "d0")
    assert carrying["peak"]["receive"] == pytest.approx(1.04 * 361.4e6, rel=0.05)
    assert carrying["mean"]["receive"] < 0.7 * carrying["peak"]["receive"]


def test_H100_over_RDMA_has_nothing_wrong(pairs: dict[str, Path], capsys: Capture) -> None:
    links = links_output("links", pairs["h100-70b-split"], capsys)["links"]
    assert [(link["transport"], link["findings"], link["slow"]) for link in links] == [("rdma", [], False)] * 2
    assert all(link["share_of_line"] == pytest.approx(1.0, abs=0.03) for link in links)
    assert not [answer for answer in links_output("explain", pairs["h100-70b-split"], capsys)["links"] if "slow" in answer]


def test_without_the_plugin_there_are_no_links_and_it_says_why(tmp_path: Path, capsys: Capture) -> None:
    demo = ("demo", "--scenario", "split", "--requests", "40", "--start", START, "--data", str(tmp_path / "run"))
    assert main(demo) == 0
    assert "links --data" not in capsys.readouterr().out
    assert main(["links", "--data", str(tmp_path / "run"), *PERIOD]) == 0
    assert "The plugin in the engines reports KV fetches" in capsys.readouterr().out


def test_plugin_is_for_a_run_in_virtual_time(capsys: Capture) -> None:
    assert main(["demo", "--plugin"]) == 2
    assert "--plugin needs --scenario" in capsys.readouterr().err
