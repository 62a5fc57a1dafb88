"""The share of the eval tests that CI runs: each commit begins elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "eval_share.py"
MARKERS = "[pytest]\nmarkers =\n    eval: long\n    vllm: real\n    grafana: big\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    for name in "abc":
        wrong = name == "c"
        text = f"import pytest\n\n@pytest.mark.eval\ndef test_long(): assert not {wrong}\n\ndef test_short(): assert False\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "test_none.py").write_text("def test_short(): assert False\n")
    return tmp_path


def share(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--tests", ".", *flags]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_all_eval_tests_and_no_others_run_where_the_time_suffices(folder: Path) -> None:
    done = share(folder, "--minutes", "5", "--start", "4")
    assert (done.returncode, done.stderr) == (1, "")
    assert "eval: 3 files, from number 1: test_b.py (--start 1 repeats it)" in done.stdout
    assert done.stdout.count("1 deselected") == 3
    assert done.stdout.endswith("eval: 3 of 3 files ran, 1 failed\n  test_c.py\n")


def test_no_file_begins_after_the_time(folder: Path) -> None:
    done = share(folder, "--minutes", "0")
    assert done.returncode == 0
    assert done.stdout.endswith("eval: 0 of 3 files ran, 0 failed\n")


def test_a_folder_without_eval_tests_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    done = share(tmp_path)
    assert (done.returncode, done.stderr) == (1, "there is no eval test\n")
