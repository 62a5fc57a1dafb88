"""The display of a command's failure.

Details get lines of their own. Nothing in the text moves a terminal's cursor.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from handrail_cli.errors import CliError
from handrail_cli.main import main
from handrail_cli.subprocesses import ChildError


def test_lines_stand_below_what_and_control_characters_are_shown() -> None:
    error = CliError(what="a\nb", lines=("one", "two\x1b[2J"), where="w", valid="v", nearest=("n",))
    assert str(error).split("\n") == [r"a\nb", "  one", r"  two\x1b[2J", "  where:   w", "  valid:   v", "  nearest: n"]
    assert error.to_json() == {"what": "a\nb", "lines": ["one", "two\x1b[2J"], "where": "w", "valid": "v", "nearest": ["n"]}


def test_without_lines_the_json_is_that_of_the_api() -> None:
    assert CliError(what="a").to_json() == {"what": "a", "where": "", "valid": "", "nearest": []}


@pytest.mark.parametrize("as_json", [False, True])
def test_the_last_output_of_a_part_of_the_demo_is_shown_line_by_line(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise ChildError("collector ended with status 1; its output (c.log):\n  | one\n  | two")

    monkeypatch.setattr("handrail_sim.demo.command._Demo.run", fail)
    assert main(["demo", "--once", "--keep", str(tmp_path / "kept"), *(["--json"] if as_json else [])]) == 1
    output = capsys.readouterr().err
    if as_json:
        assert json.loads(output)["error"]["lines"] == ["  | one", "  | two"]
        return
    assert "its output (c.log):\n    | one\n    | two\n  where:   " in output


def test_an_answer_that_a_demo_cannot_use_is_reported_with_the_place_of_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise CliError(what="no collector answers", where="http://x", valid="another", exit_code=1)

    monkeypatch.setattr("handrail_sim.demo.command._Demo.run", fail)
    assert main(["demo", "--once", "--keep", str(tmp_path / "kept")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "handrail demo: no collector answers"
    assert lines[1] == f"  the logs of all parts: {tmp_path / 'kept'}"
    assert lines[2:] == ["  where:   http://x", "  valid:   another"]
