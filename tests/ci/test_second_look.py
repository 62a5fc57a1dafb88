"""The second look at failed tests: a report of which of them pass alone. It turns no red run green."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / ".ci" / "second_look.py"

# fails in its first run, whose number it keeps in a file, and in the runs that BREAK names
TEST = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", os.environ["NAMES"].split())
def test_it(name):
    runs = Path("runs." + name)
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert str(len(runs.read_text())) not in os.environ["BREAK"]
"""


def look(folder: Path, result: Path, **env: str) -> str:
    command = [sys.executable, str(SCRIPT), str(result)]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("names", "fails", "output"),
    [
        ("a b", "1", "PASSES ALONE, fails beside others: test_it.py::test_it[b]"),
        ("a", "1 4", "FAILS ALONE too: test_it.py::test_it[a]"),
        ("a b c d e f", "1", ""),
    ],
)
def test_failures_of_a_run_are_reported_by_whether_they_pass_alone(tmp_path: Path, names: str, fails: str, output: str) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "conftest.py").write_bytes((TESTS / "conftest.py").read_bytes())
    result = tmp_path / "result.json"
    env = {"NAMES": names, "BREAK": fails, "PYTHONPATH": str(TESTS)}
    full = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "."],
        cwd=tmp_path,
        env={**os.environ, **env, "HANDRAIL_TEST_RESULT": str(result)},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert full.returncode == 1
    assert json.loads(result.read_text())["status"] == 1
    report = look(tmp_path, result, **env)
    assert output in report
    assert ("second look" in report) is bool(output)


@pytest.mark.parametrize("text", ["", '{"status": 2, "failed": []}', '{"status": 2, "failed": ["test_it.py::test_it"]}', None])
def test_a_run_that_did_not_end_gets_no_second_look(tmp_path: Path, text: str | None) -> None:
    result = tmp_path / "result.json"
    if text is not None:
        result.write_text(text)
    assert look(tmp_path, result) == ""


def test_no_report_makes_a_failed_part_green() -> None:
    run = (SCRIPT.parent / "run").read_text(encoding="utf-8")
    assert '&& return\n    .venv/bin/python .ci/second_look.py "$result"\n    return 1\n' in run
