"""Parse the repr of a flat Python dict in a log line without evaluating it.

The parser is bounded in size and depth (case A07).
``ast.literal_eval`` builds a tree of any input and recurses; a log line is input from outside.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

Scalar: TypeAlias = str | int | float | bool | None

MAX_CHARS: Final = 8192
MAX_DEPTH: Final = 4
_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"""
    r"""|(?P<word>[A-Za-z_]\w*)|(?P<mark>[{}\[\](),:]))"""
)
_WORDS: Final[dict[str, Scalar]] = {"None": None, "True": True, "False": False}


class NotALiteralError(ValueError):
    """The text is not the repr of a dict, or exceeds the bounds."""


def flat_dict(text: str) -> dict[str, Scalar]:
    """Return the scalar entries of the dict at the start of ``text``.

    Keys must be strings. Nested values are skipped; text after the closing brace is not examined.
    Raises ``NotALiteralError`` when the text is no such dict or exceeds the bounds.
    """
    found: dict[str, Scalar] = {}
    key: str | None = None
    awaiting_value = False
    depth = at = 0
    while at < min(len(text), MAX_CHARS):
        match = _TOKEN.match(text, at, MAX_CHARS)
        if match is None:
            raise NotALiteralError(f"at {at}")
        at = match.end()
        mark = match["mark"]
        if mark is not None and mark in "{[(":
            depth += 1
            awaiting_value = awaiting_value and depth < 2  # a nested value: its entry is skipped
            if depth > MAX_DEPTH:
                raise NotALiteralError("nested too deep")
        elif not depth:
            raise NotALiteralError("no opening brace")
        elif mark is not None and mark in "}])":
            depth -= 1
            if not depth:
                return found
        elif mark == ":":
            awaiting_value = awaiting_value or depth == 1
        elif mark == ",":
            key = None if depth == 1 else key
        elif depth == 1 and awaiting_value and key is not None:
            found[key] = _scalar(match)
            awaiting_value, key = False, None
        elif depth == 1 and match["text"] is not None:
            key = _unquoted(match["text"])
            awaiting_value = False
    raise NotALiteralError("not closed")


def _scalar(match: re.Match[str]) -> Scalar:
    if match["text"] is not None:
        return _unquoted(match["text"])
    if match["number"] is not None:
        number = match["number"]
        return int(number) if number.lstrip("-").isdigit() and len(number) < 20 else float(number)
    return _WORDS.get(match["word"], match["word"])


def _unquoted(text: str) -> str:
    return text[1:-1].replace("\\'", "'").replace('\\"', '"')
