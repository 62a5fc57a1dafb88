"""The double of NVML, built once a run.

Without a compiler or headers its tests print the reason and are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.skips import skip_missing
from nvml.build import CannotBuild, build
from nvml.child import Double


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("nvml"))
    except CannotBuild as reason:
        skip_missing(f"the NVML double cannot be built: {reason}")


@pytest.fixture
def double(library: Path, tmp_path: Path) -> Double:
    return Double(library, tmp_path)
