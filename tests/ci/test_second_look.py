"""The second run of a red test run.

It happens only where one or two tests failed. The run stays red unless each passes three times alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "second_look.py"
CONFTEST = Path(__file__).parents[1] / "conftest.py"

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


@pytest.mark.parametrize(
    ("names", "fails", "expected", "output"),
    [
        ("a b", "1", 0, "UNSTEADY, to be mended: test_it.py::test_it[b]"),
        ("a", "1 4", 1, "BROKEN: test_it.py::test_it[a]"),
        ("a b c", "1", 1, ""),
    ],
)
def test_what_fails_once_in_a_full_run_must_pass_three_times_alone(
    tmp_path: Path, names: str, fails: str, expected: int, output: str
) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "conftest.py").write_bytes(CONFTEST.read_bytes())
    result = tmp_path / "result.json"
    env = {**os.environ, "NAMES": names, "BREAK": fails, "HANDRAIL_TEST_RESULT": str(result)}
    full = subprocess.run([sys.executable, "-m", "pytest", "-q", "."], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert full.returncode == 1
    assert json.loads(result.read_text())["status"] == 1
    del env["HANDRAIL_TEST_RESULT"]
    second = subprocess.run(
        [sys.executable, str(SCRIPT), str(result)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert second.returncode == expected
    assert output in second.stdout
    assert ("second look" in second.stdout) is bool(output)


@pytest.mark.parametrize("text", ["", '{"status": 2, "failed": []}', '{"status": 2, "failed": ["test_it.py::test_it"]}', None])
def test_a_run_that_did_not_end_stays_red(tmp_path: Path, text: str | None) -> None:
    result = tmp_path / "result.json"
    if text is not None:
        result.write_text(text)
    done = subprocess.run([sys.executable, str(SCRIPT), str(result)], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == b""
