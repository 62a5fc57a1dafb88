"""Make foreign text safe to print: on /metrics, in the CLI, in logs, in exports.

This is the one rule of which characters are kept. A character is kept where Unicode calls it a letter, mark, number, punctuation
or symbol, or where it is the plain space, and where it is visible. Everything else is escaped: control characters (Cc), format
characters (Cf: directions, tags U+E0020 to U+E007F, joiners), surrogates (Cs), private and unassigned ones (Co, Cn), separators
but the space (Zl, Zp, Zs), and invisible characters that Unicode calls marks, letters or symbols (variation selectors, fillers,
the blank of Braille).
The joiners U+200C and U+200D are escaped too: names are no prose, and two names that look alike must not be two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final, TypeVar

T = TypeVar("T")

# Default_Ignorable_Code_Point of Unicode 15 without what str.isprintable refuses already, and U+2800, which is drawn as a blank.
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def is_printable(text: str) -> bool:
    """Whether ``printable`` changes nothing."""
    return text.isprintable() and (text.isascii() or not _INVISIBLE.search(text))


def printable(text: str, instead: str | None = None) -> str:
    r"""Escape ``text`` to one line of printable characters.

    Other characters are escaped as Python does (``\x1b``, ``\u202e``), or replaced by ``instead`` where it is set.
    """
    if is_printable(text):
        return text
    return "".join(each if is_printable(each) else _escape(each) if instead is None else instead for each in text)


def printable_lines(text: str) -> str:
    """Escape as ``printable`` does, but keep line ends."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(document: str) -> str:
    r"""Escape unprintable characters in a JSON document as ``\uXXXX``.

    Its meaning stays the same. JSON escapes C0 controls by itself; outside of its strings there is nothing else to escape.
    """
    if is_printable(document):
        return document
    return "".join(each if each == "\n" or is_printable(each) else _json_escape(each) for each in document)


def printable_series(series: Mapping[tuple[str, ...], T]) -> Mapping[tuple[str, ...], T]:
    """``series`` with printable label values, and as many of them as before.

    Label values that then read alike gain a hash: some scrapers refuse a whole page that names one series twice.
    """
    if all(is_printable(value) for labels in series for value in labels):
        return series
    found = {labels: value for labels, value in series.items() if all(map(is_printable, labels))}
    for labels, value in series.items():
        if labels not in found:
            shown = tuple(map(printable, labels))
            if shown in found:
                digest = hashlib.blake2b("\x1f".join(labels).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
                shown = (*shown[:-1], f"{shown[-1]}~{digest}")
            found[shown] = value
    return found


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
