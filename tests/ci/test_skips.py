"""Skips by class: in CI, one that an installation would cure is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASES = """
import pytest
from harness.skips import needs_ability, needs_program, package, skip_missing, skip_unable

@needs_program("no-such-program")
def test_program(): ...

@needs_program("sh")
def test_installed(): ...

@needs_ability(False, "root")
def test_root(): ...

def test_package():
    package("no_such_package", "no-such-package")

def test_build():
    skip_missing("a compiler")

def test_kernel():
    skip_unable("quotas")

@pytest.mark.skip(reason="no time")
def test_without_class(): ...

@pytest.mark.xfail(reason="known", strict=True)
def test_expected():
    assert False
"""


@pytest.mark.parametrize(
    ("ci", "counts"), [("", "1 passed, 6 skipped, 1 xfailed"), ("true", "2 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors")]
)
def test_in_ci_only_what_the_machine_is_unable_to_do_is_skipped(tmp_path: Path, ci: str, counts: str) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_bytes((TESTS / "conftest.py").read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert counts in done.stdout, done.stdout
    assert "not on this machine: root" in done.stdout
