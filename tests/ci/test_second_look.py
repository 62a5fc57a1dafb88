"""The second look at failed tests reports which of them pass alone.

The run stays red.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / ".ci" / "second_look.py"

# each test fails in the runs that FAILS names; it counts its runs in a file
TEST = """
import json, os
from pathlib import Path
import pytest

FAILS = json.loads(os.environ["FAILS"])

@pytest.mark.parametrize("name", FAILS)
def test_it(name):
    runs = Path("runs." + name)
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) not in FAILS[name]
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def look(folder: Path, result: Path, **env: str) -> list[str]:
    """Return the report's lines that give a verdict."""
    command = [sys.executable, str(SCRIPT), str(result)]
    env = {**ENVIRONMENT, **env}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=True)
    return [line for line in done.stdout.splitlines() if "ALONE" in line]


@pytest.mark.parametrize(
    ("fails", "report"),
    [
        (
            {"a": [1], "b": [1, 4], "c": []},
            ["PASSES ALONE, fails beside others: test_it.py::test_it[a]", "FAILS ALONE too: test_it.py::test_it[b]"],
        ),
        ({key: [1] for key in "abcdef"}, []),
    ],
    ids=["two", "too many"],
)
def test_failures_of_a_run_are_reported_by_whether_they_pass_alone(
    tmp_path: Path, fails: dict[str, list[int]], report: list[str]
) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "conftest.py").write_bytes((TESTS / "conftest.py").read_bytes())
    result = tmp_path / "result.json"
    env = {"FAILS": json.dumps(fails)}
    full = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "."],
        cwd=tmp_path,
        env={**ENVIRONMENT, **env, "HANDRAIL_TEST_RESULT": str(result)},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert full.returncode == 1
    assert json.loads(result.read_text())["status"] == 1
    assert look(tmp_path, result, **env) == report


@pytest.mark.parametrize("text", ["", '{"status": 2, "failed": []}', '{"status": 2, "failed": ["test_it.py::test_it"]}', None])
def test_a_run_that_did_not_end_gets_no_second_look(tmp_path: Path, text: str | None) -> None:
    result = tmp_path / "result.json"
    if text is not None:
        result.write_text(text)
    assert look(tmp_path, result) == []


def test_no_report_makes_a_failed_part_green() -> None:
    run = (SCRIPT.parent / "run").read_text(encoding="utf-8")
    assert '&& return\n    .venv/bin/python .ci/second_look.py "$result"\n    return 1\n' in run
