"""A store for each test of maintenance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.store import Kept, kept_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Kept]:
    kept = kept_store(tmp_path / "store")
    yield kept
    kept.reader.close()
    kept.publisher.close()
