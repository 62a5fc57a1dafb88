"""JSON answers to a wrong command line with ``--json``."""

from __future__ import annotations

import json

import pytest

from handrail_cli.main import main


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [(["requests", "--sort", "tffts", "--json"], ["ttft"]), (["config", "check", "--json"], []), (["trace", "--json"], [])],
    ids=["choice", "sub-command", "missing"],
)
def test_usage_errors_are_one_object(arguments: list[str], nearest: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["where"] == "command line"
    assert error["nearest"] == nearest


def test_without_it_they_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requests", "--sort", "tffts"]) == 2
    assert "did you mean ttft?" in capsys.readouterr().err
