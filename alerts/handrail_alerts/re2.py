r"""Decide whether Prometheus accepts a regular expression.

The syntax is RE2's as Go's ``regexp/syntax`` takes it, with Perl flags on.
Python's ``re`` accepts other things (lookahead, back references, ``\Z``) and refuses some of these, so it cannot decide.
Source: https://github.com/google/re2/wiki/Syntax and the parser of Go 1.19; compared with promtool (tests/alerts/test_re2.py).
Not checked: whether a name of three or more letters in ``\p{...}`` is a script, and Go's limit of the compiled size.
"""

from __future__ import annotations

import re
from typing import Final

_MOST_REPEATS: Final = 1000
_MOST_NESTED: Final = 1000
_PERL_CLASSES: Final = "dDsSwW"
_ANCHORS: Final = "AbBz"
_CATEGORIES: Final = frozenset(
    {
        *("C", "Cc", "Cf", "Co", "Cs", "L", "Ll", "Lm", "Lo", "Lt", "Lu", "M", "Mc", "Me", "Mn", "N", "Nd", "Nl", "No"),
        *("P", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S", "Sc", "Sk", "Sm", "So", "Z", "Zl", "Zp", "Zs"),
    }
)
_POSIX: Final = frozenset(
    {
        *("alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space", "upper", "word"),
        "xdigit",
    }
)
_REPEAT: Final = re.compile(r"\{(0|[1-9]\d*)(?:,(0|[1-9]\d*)?)?\}", re.A)
_NAMED: Final = re.compile(r"\(\?P<\w+>", re.A)
_FLAGS: Final = re.compile(r"\(\?(?:[imsU]*|[imsU]*-[imsU]+)[:)]")
_ESCAPED: Final = re.compile(r"\\(?:[0-7]{2,3}|0|x[0-9A-Fa-f]{2}|x\{([0-9A-Fa-f]+)\}|[afnrtv]|(?![A-Za-z0-9])[\x00-\x7f])", re.S)
_UNICODE: Final = re.compile(r"\\[pP](?:\{\^?([^}]*)\}|([^{]))", re.S)
_POSIX_CLASS: Final = re.compile(r"\[:(.*?):\]", re.S)
_SIMPLE: Final = {"a": 7, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}


class _RefusedError(Exception):
    """The pattern is refused; the message says why."""


def refusal(pattern: str) -> str:
    """Return why Prometheus would refuse ``pattern`` as a regular expression.

    Returns '' where it would accept it.
    """
    try:
        _Reader(pattern).read()
    except _RefusedError as error:
        return str(error)
    return ""


class _Reader:
    """Reads a pattern from the left.

    ``_last``: how many repeats the item before already has; None where there is no item to repeat.
    """

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._open: list[tuple[int, int]] = []  # per open group: where it began, and the most repeats before it
        self._most = 1
        self._last: int | None = None

    def read(self) -> None:
        repeated = False
        while self._at < len(self._text):
            before, repeated = repeated, False
            match self._text[self._at]:
                case "(":
                    self._group()
                case ")":
                    self._group_end()
                case "|":
                    self._last = None
                    self._at += 1
                case "[":
                    self._class()
                    self._item()
                case "*" | "+" | "?":
                    self._repeat(1, 1, before)
                    repeated = True
                case "{" if found := _REPEAT.match(self._text, self._at):
                    self._repeat(self._times(found), len(found[0]), before)
                    repeated = True
                case "\\":
                    self._backslash()
                case _:
                    self._at += 1
                    self._item()
        if self._open:
            raise _RefusedError(f"the group that begins with {self._text[self._open[-1][0] :][:12]!r} has no end: ) is missing")

    def _item(self) -> None:
        self._last = 1

    def _group(self) -> None:
        start = self._at
        if self._text.startswith("(?", start):
            if named := _NAMED.match(self._text, start):
                self._at = named.end()
            elif flags := _FLAGS.match(self._text, start):
                self._at = flags.end()
                if flags[0].endswith(")"):
                    return
            else:
                raise _RefusedError(
                    f"{self._text[start : start + 4]!r} begins no group that there is: no lookahead, no lookbehind"
                )
        else:
            self._at += 1
        self._open.append((start, self._most))
        self._most, self._last = 1, None
        if len(self._open) >= _MOST_NESTED:
            raise _RefusedError("its groups nest too deeply")

    def _group_end(self) -> None:
        if not self._open:
            raise _RefusedError(f"a ) without its ( at character {self._at + 1}")
        self._last = self._most
        self._most = max(self._open.pop()[1], self._last)
        self._at += 1

    def _times(self, found: re.Match[str]) -> int:
        least = int(found[1])
        highest = int(found[2]) if found[2] else least
        if max(least, highest) > _MOST_REPEATS or highest < least:
            raise _RefusedError(f"{found[0]} repeats too often or from more to less: at most {_MOST_REPEATS}, the smaller first")
        return highest

    def _repeat(self, times: int, length: int, before: bool) -> None:
        what = self._text[self._at : self._at + length]
        lazy = self._text.startswith("?", self._at + length)
        if before:
            raise _RefusedError(f"{what} repeats what is repeated already: use a group, (?:...){what}")
        if self._last is None:
            raise _RefusedError(f"{what} at character {self._at + 1} has nothing before it to repeat")
        self._last = self._last * times if times else 1
        if self._last > _MOST_REPEATS:
            raise _RefusedError(f"{what} makes more than {_MOST_REPEATS} repeats of what is in it")
        self._most = max(self._most, self._last)
        self._at += length + lazy

    def _backslash(self) -> None:
        text, at = self._text, self._at
        if text.startswith("\\Q", at):
            end = text.find("\\E", at + 2)
            if end < 0:  # Go would accept it; Prometheus puts the pattern into a group, whose end it would quote
                raise _RefusedError("\\Q has no end: \\E is missing")
            quoted, self._at = text[at + 2 : end], end + 2
            if quoted:
                self._item()
            return
        if text[at + 1 : at + 2] and text[at + 1] in _ANCHORS:
            self._at += 2
        elif not self._class_escape():
            self._escape()
        self._item()

    def _class_escape(self) -> bool:
        r"""Read a class such as ``\d`` or ``\p{Greek}``."""
        after = self._text[self._at + 1 : self._at + 2]
        if after and after in _PERL_CLASSES:
            self._at += 2
            return True
        if after not in ("p", "P"):
            return False
        found = _UNICODE.match(self._text, self._at)
        name = (found[1] if found[1] is not None else found[2]) if found else ""
        if not found or not (name in _CATEGORIES or (len(name) > 2 and name[0].isupper() and name.replace("_", "").isalpha())):
            raise _RefusedError(
                f"{self._text[self._at : self._at + 12]!r} names no class of Unicode, such as \\pL or \\p{{Greek}}"
            )
        self._at = found.end()
        return True

    def _escape(self) -> int:
        """Read one escaped character and return its code."""
        if self._at + 1 == len(self._text):
            raise _RefusedError("it ends with a backslash")
        found = _ESCAPED.match(self._text, self._at)
        code = _code(found) if found else -1
        if found is None or code > 0x10FFFF:
            raise _RefusedError(f"{self._text[self._at : self._at + 2]} is no escape (RE2 has no back references and no \\Z)")
        self._at = found.end()
        return code

    def _class(self) -> None:
        start = self._at
        self._at += 1 + self._text.startswith("^", self._at + 1)
        first = True
        while first or not self._text.startswith("]", self._at):
            first = False
            named = _POSIX_CLASS.match(self._text, self._at)
            if named:
                if named[1].removeprefix("^") not in _POSIX:
                    raise _RefusedError(f"{named[0]} is no class, such as [:alnum:]")
                self._at = named.end()
            elif not (self._text.startswith("\\", self._at) and self._class_escape()):
                self._range(start)
        self._at += 1

    def _range(self, start: int) -> None:
        begins = self._at
        low = self._character(start)
        if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
            self._at += 1
            if self._character(start) < low:
                raise _RefusedError(f"the range {self._text[begins : self._at]} goes backwards")

    def _character(self, start: int) -> int:
        if self._at >= len(self._text):
            raise _RefusedError(f"the class that begins with {self._text[start:][:12]!r} has no end: ] is missing")
        if self._text[self._at] == "\\":
            return self._escape()
        self._at += 1
        return ord(self._text[self._at - 1])


def _code(found: re.Match[str]) -> int:
    body = found[0][1:]
    if found[1]:
        return int(found[1], 16) if len(found[1].lstrip("0")) <= 6 else 0x110000
    if body[0] == "x":
        return int(body[1:], 16)
    if body[0].isdigit():
        return int(body, 8)
    return _SIMPLE.get(body, ord(body))
