"""Recognises what a log message says about KV: the table of all rows and the one function that searches it.

``recognise`` is what the file source and the logging handler inside the engine call, so: standard library only, bounded, no
exception for any text, and cheap for the lines that say nothing (a dictionary look-up on the first four characters).
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
"""Every row, in the order in which rows with the same beginning are tried."""

LONGEST_MESSAGE: Final = 65536
"""Characters of a message that are looked at."""


def _by_beginning(rows: Sequence[Recogniser]) -> dict[str, tuple[Recogniser, ...]]:
    found: dict[str, list[Recogniser]] = {}
    for row in rows:
        found.setdefault(row.template[:KEY_CHARS], []).append(row)
    return {beginning: tuple(those) for beginning, those in found.items()}


_ROWS: Final = _by_beginning(TABLE)


def recognise(message: str) -> Line | None:
    """What ``message`` (the text alone, without prefix, stamp or file name) says about KV; None for anything else."""
    rows = _ROWS.get(message[:KEY_CHARS])
    if rows is None:
        return None
    first = message[:LONGEST_MESSAGE].partition("\n")[0]
    for row in rows:
        line = row.read(first)
        if line is not None:
            return line
    return None
