"""Provide the two output streams of a command.

The answer goes to standard output, everything about it to standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from handrail.printable import is_printable, printable


class CleanConsole(Console):
    """Console that removes foreign control characters and trailing blanks.

    The control characters are those in texts that were not ``cleaned`` before.
    Trailing blanks come from tables, which fill their last column with them.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        blanks: list[Segment] = []
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            text = segment.text
            if not is_printable(text):
                *ended, last = map(printable, text.split("\n"))
                text = "\n".join([*(line.rstrip(" ") for line in ended), last])
            kept = text.rstrip(" ")
            if kept:
                if not kept.startswith("\n"):
                    yield from blanks
                blanks = []
                yield segment._replace(text=kept)
            if len(kept) < len(text):
                blanks.append(segment._replace(text=text[len(kept) :]))
        yield from blanks


def answer_console(*, in_pipe: int) -> Console:
    """Return a console on standard output.

    Its width is that of the terminal or COLUMNS, else ``in_pipe``. It obeys NO_COLOR.
    Glyphs that its encoding lacks become ``?``.
    """
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = CleanConsole(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = in_pipe
    return console


def remark(text: str) -> None:
    """Print a remark for a person, only where standard error is a terminal."""
    if sys.stderr.isatty():
        print(printable(text), file=sys.stderr)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a spinner on standard error while the command waits for an answer.

    It shows nothing where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    with CleanConsole(stderr=True).status(printable(text)):
        yield
