"""Recognise what a log message says about KV, by a table of all rows.

The file source and the logging handler inside the engine call ``recognise``.
So it uses the standard library only, is bounded, raises no exception for any text, and is cheap for lines without meaning
(a dictionary look-up on the first four characters).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from handrail_sidecar.engine_logs import lines_libraries, lines_sglang, lines_vllm, lines_vllm_connectors
from handrail_sidecar.engine_logs.line_pattern import KEY_CHARS, Line, Recogniser

TABLE: Final[tuple[Recogniser, ...]] = (
    *lines_vllm.ROWS,
    *lines_vllm_connectors.ROWS,
    *lines_libraries.ROWS,
    *lines_sglang.ROWS,
)
"""Every row; rows with the same beginning are tried in this order."""

LONGEST_MESSAGE: Final = 65536
"""Most characters of a message that are examined."""


def _by_beginning(rows: Sequence[Recogniser]) -> dict[str, tuple[Recogniser, ...]]:
    found: dict[str, list[Recogniser]] = {}
    for row in rows:
        found.setdefault(row.template[:KEY_CHARS], []).append(row)
    return {beginning: tuple(those) for beginning, those in found.items()}


_ROWS: Final = _by_beginning(TABLE)


def recognise(message: str) -> Line | None:
    """Return what ``message`` says about KV; None for any other message.

    ``message`` is the text alone, without prefix, stamp or file name.
    """
    rows = _ROWS.get(message[:KEY_CHARS])
    if rows is None:
        return None
    first = message[:LONGEST_MESSAGE].partition("\n")[0]
    for row in rows:
        line = row.read(first)
        if line is not None:
            return line
    return None
