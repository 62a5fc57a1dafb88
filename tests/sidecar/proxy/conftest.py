"""Tests here run on uvloop, as the sidecar does; those marked ``both_loops`` on asyncio's own loop too."""

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
