"""Fixtures of the real-engine tests.

There is one pair for the session, one run for each configuration, and the table of figures at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.figures import Figures
from vllm.pair import find_installation, running_pair
from vllm.run import Runs
from vllm.stack import Bed, Taps

_FIGURES = pytest.StashKey[Figures]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    return pytestconfig.stash.setdefault(_FIGURES, Figures())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in config.stash.get(_FIGURES, Figures()).tables.items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def bed(work: Path) -> Iterator[Bed]:
    """Start the bed; fail (do not skip) when the engine is not installed.

    A run of these tests wants them.
    """
    installation = find_installation()
    taps = Taps()
    prefill, decode = taps.settings()
    with running_pair(installation, logs=work / "engines", prefill=prefill, decode=decode) as pair:
        yield Bed(installation, pair, taps)


@pytest.fixture(scope="session")
def runs(bed: Bed, work: Path) -> Runs:
    return Runs(bed, work)
