"""Benchmark figures in the pages.

They are put where a page has a place for them; nothing else of the page changes.
"""

from __future__ import annotations

import pytest

from bench.__main__ import NAMES, pages, written

FIGURES = [
    {"name": "gpu: of a core", "value": 0.62, "unit": "%", "budget": 1.0, "ratio": 0.62, "met": True},
    {"name": "gpu: samples", "value": 11800.0, "unit": "1/s", "budget": None, "ratio": None, "met": None},
]


def test_old_figures_make_way_for_new_ones() -> None:
    page = "before\n<!-- figures gpu -->\nold\n<!-- /figures -->\nafter\n<!-- figures links --><!-- /figures -->"
    assert written(page, "gpu", FIGURES, "two cores, load 0.1") == (
        "before\n<!-- figures gpu -->\n| two cores, load 0.1 | | budget |\n|---|---|---|\n"
        "| gpu: of a core | 0.62 % | 1 %, met |\n| gpu: samples | 11,800 1/s | |\n<!-- /figures -->\nafter\n"
        "<!-- figures links --><!-- /figures -->"
    )


@pytest.mark.parametrize("name", ["gpu", "links"])
def test_the_pages_of_devices_have_a_place(name: str) -> None:
    assert name in NAMES
    assert [page.name for page in pages(name)] == [f"{name}.md"]
