"""The list of GPU counters at any width: every word stays whole."""

from __future__ import annotations

import pytest
from rich.console import Console

from handrail.device_counters.gpu import ALL
from handrail_cli.render.gpus import show_counters


@pytest.mark.parametrize("width", [60, 80, 120, 140, 220])
def test_no_word_of_a_counter_is_broken(width: int) -> None:
    console = Console(width=width, highlight=False, markup=False, color_system=None)
    with console.capture() as capture:
        show_counters(console)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    words = {word.rstrip(".") for line in lines for word in line.split()}
    for counter in ALL:
        assert {word.rstrip(".") for word in f"{counter.name} {counter.help} {counter.absent}".split()} <= words
