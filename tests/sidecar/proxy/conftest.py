"""Run the tests on uvloop, as the sidecar runs.

Tests marked ``both_loops`` also run on asyncio's own loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    both = {"asyncio": asyncio.new_event_loop} if item.get_closest_marker("both_loops") else {}
    return {"uvloop": uvloop.new_event_loop, **both}
