"""Options and fixtures of the whole suite."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from harness.skips import UNABLE

# no test may fail because the machine is busy: neither an example's time nor the time to make it is judged
settings.register_profile("suite", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("suite"), max_examples=200)  # make test-all
settings.load_profile("suite")

for _name in ("COLUMNS", "LINES"):  # readline leaves them in the environment of pytest-xdist's workers
    os.environ.pop(_name, None)

GOLDEN = Path(__file__).parent / "golden"
MEMORY = Path("/dev/shm")


def _put_folders_in_memory() -> None:
    """Make ``tmp_path`` a folder in memory where there is room.

    Then no other user of the disk delays a test.
    """
    if MEMORY.is_dir():
        state = os.statvfs(MEMORY)
        if state.f_bavail * state.f_frsize > 4 << 30 and not state.f_flag & os.ST_NOEXEC:  # some tests run what they write
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


_put_folders_in_memory()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden and generated files instead of comparing with them")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail in CI what is skipped for any reason but that the machine is unable."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(UNABLE):
            report.outcome, report.longrepr = "failed", f"skipped in CI, where make setup installs what tests need: {reason}"
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write how the run ended and what failed, for ``.ci/second_look.py``."""
    path = os.environ.get("HANDRAIL_TEST_RESULT")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if path and reporter is not None:
        failed = {report.nodeid for kind in ("failed", "error") for report in reporter.stats.get(kind, ())}
        Path(path).write_text(json.dumps({"status": int(exitstatus), "failed": sorted(failed)}), encoding="utf-8")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path | str, str], None]:
    """Return ``golden(path, text)``, which checks that a golden file holds this text.

    The path is relative to tests/golden. With ``--update`` it writes the file.
    """

    def compare(path: Path | str, text: str) -> None:
        file = GOLDEN / path
        if request.config.getoption("--update"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        assert file.exists(), f"{file} is missing: run this test with --update and review what it writes"
        kept = file.read_text(encoding="utf-8")
        if kept != text:
            diff = "\n".join(difflib.unified_diff(kept.splitlines(), text.splitlines(), str(path), "now", lineterm=""))
            pytest.fail(f"{path} differs; run with --update and review the diff if it is meant:\n{diff}")

    return compare
