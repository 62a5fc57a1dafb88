"""The two streams of a command: the answer on standard output, everything about it on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Final

from rich.console import Console

_PIPE_WIDTH: Final = 100


def answer_console() -> Console:
    """Standard output as it is written to; NO_COLOR and COLUMNS count. Glyphs that its encoding lacks become ``?``."""
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return Console(highlight=False, markup=False, emoji=False)


def answer_width(console: Console, *, in_pipe: int = _PIPE_WIDTH) -> int:
    """How wide to draw: the terminal's width or COLUMNS; ``in_pipe`` where nobody says."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else in_pipe


def remark(text: str) -> None:
    """A line beside the answer, for a person: only where standard error is a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner on standard error while an answer is awaited; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(text):
        yield
