"""Read top-level members of a JSON object of which only both ends were kept.

A member counts only when its place at the top level is certain: the beginning is scanned forwards from the opening brace, the
end backwards from the closing one. Both scans know at every byte whether they are inside a string, so text that merely looks
like a member (in a prompt, in a nested object) is never taken for one. Grammar: RFC 8259. Input that is not JSON gives nothing
or a part, never an exception; ``_STEPS`` bounds the work whatever the input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

_STEPS: Final = 20_000  # structural tokens and quotes read in each direction: under 10 ms
_SPACE: Final = b" \t\r\n"

# At the top level every separator matters; deeper only brackets and strings do, so lists of token ids are skipped in C. Strings
# are left with bytes.find: a regular expression for one takes 0.2 s to give up on a megabyte that never ends.
_TOP: Final = re.compile(rb'["{}\[\]:,]')
_DEEP: Final = re.compile(rb'["{}\[\]]')
_OPENING: Final = b"{["
_CLOSING: Final = b"}]"


def head_members(head: bytes) -> tuple[dict[bytes, bytes], tuple[bytes, bytes] | None]:
    """Complete top-level members at the beginning of an object, and the cut one.

    They map raw key (without quotes) to raw value. The last of two equal keys wins, as in every JSON reader. The value of the cut
    member is as much of it as there is.
    """
    members: dict[bytes, bytes] = {}
    start = len(head) - len(head.lstrip(_SPACE))
    if head[start : start + 1] != b"{":
        return members, None
    at, key = start + 1, None
    for kind, begin, end in _tokens(head, start + 1, _OPENING, _CLOSING, _ends):
        if kind == b":" and key is None:
            key, at = head[at:begin].strip(_SPACE), end
        elif kind in (b",", b"}"):
            if key is not None and _is_key(key):
                members[key[1:-1]] = head[at:begin].strip(_SPACE)
            key, at = None, end
        if kind == b"}":
            return members, None
    cut = (key[1:-1], head[at:].lstrip(_SPACE)) if key is not None and _is_key(key) else None
    return members, cut


def tail_members(tail: bytes) -> dict[bytes, bytes]:
    """Complete top-level members at the end of an object.

    Its last byte (white space apart) is its closing brace.
    """
    members: dict[bytes, bytes] = {}
    body = tail.rstrip(_SPACE)
    if body[-1:] != b"}":
        return members
    text = body[-2::-1]
    at, value = 0, None
    for kind, begin, end in _tokens(text, 0, _CLOSING, _OPENING, _begins):
        if kind == b":":
            value, at = text[at:begin][::-1].strip(_SPACE), end
        elif kind in (b",", b"{"):
            key = text[at:begin][::-1].strip(_SPACE)
            if value is not None and _is_key(key):
                members.setdefault(key[1:-1], value)
            value, at = None, end
        if kind == b"{":
            break
    return members


def _tokens(
    text: bytes, start: int, opening: bytes, closing: bytes, leaves: Callable[[bytes, int, int], bool]
) -> Iterator[tuple[bytes, int, int]]:
    """Separators at the top level with their places, then the bracket that leaves it.

    It ends early at an unfinished string.
    """
    depth, at, string = 0, start, 0
    for _ in range(_STEPS):
        if string:
            at = text.find(b'"', at) + 1
            if at == 0:
                return
            if leaves(text, string, at - 1):
                string = 0
            continue
        found = (_DEEP if depth else _TOP).search(text, at)
        if found is None:
            return
        begin, at = found.span()
        kind = found[0]
        if kind == b'"':
            string = at
        elif kind in opening:
            depth += 1
        elif kind in closing and depth:
            depth -= 1
        elif depth == 0:
            yield kind, begin, at
            if kind in closing:
                return


def _ends(text: bytes, string: int, quote: int) -> bool:
    """Whether this quote ends the string that began at ``string``.

    It does not with an odd number of backslashes before it.
    """
    inside = text[max(string, text.rfind(b'"', string, quote) + 1) : quote]
    return (len(inside) - len(inside.rstrip(b"\\"))) % 2 == 0


def _begins(text: bytes, string: int, quote: int) -> bool:
    """Whether this quote begins a string, on reversed bytes.

    A quote inside a string has a backslash before it (here: behind it), an opening one never has.
    At the edge of what was kept it could be either, so it does not count as one.
    """
    return quote + 1 < len(text) and text[quote + 1] != 0x5C


def _is_key(raw: bytes) -> bool:
    """Whether this is one plain string.

    A key written with escapes is none of the wanted ones, so it is left alone.
    """
    return len(raw) >= 2 and raw[:1] == b'"' == raw[-1:] and raw.count(b'"') == 2 and b"\\" not in raw
