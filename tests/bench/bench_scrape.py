"""Measure what it costs to read a metrics page.

Handrail's reader and the stock parser read the recorded page of a real vLLM 0.32 decode engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from handrail_sidecar.engine_metrics.page import PageReader

_PAGE = Path(__file__).parents[1] / "data/recordings/metrics_decode.txt"
_REPEATS = 30
_BUDGET_MS = 2.0


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.process_time_ns()
        call()
        taken.append((time.process_time_ns() - begin) / 1e6)
    return median(taken)


def _stock(text: str) -> int:
    return sum(len(family.samples) for family in text_string_to_metric_families(text))


def run() -> list[dict[str, Any]]:
    """Return the figures in milliseconds of CPU a page."""
    page = _PAGE.read_bytes()
    text = page.decode()
    reader = PageReader()
    first = _median_ms(lambda: PageReader().read(page), 5)
    again = _median_ms(lambda: reader.read(page), _REPEATS)
    stock = _median_ms(lambda: _stock(text), 5)
    samples = _stock(text)
    return [
        _figure("scrape: a page read again", again, "ms", _BUDGET_MS),
        _figure("scrape: a page read first", first, "ms", None),
        _figure("scrape: the stock parser", stock, "ms", None),
        _figure("scrape: per sample, again", again * 1000 / samples, "us", None),
        _figure("scrape: per sample, stock", stock * 1000 / samples, "us", None),
    ]


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "budget": budget,
        "ratio": None if budget is None else round(value / budget, 3),
        "met": None if budget is None else value <= budget,
    }
