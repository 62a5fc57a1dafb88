"""Text from outside as a terminal may show it: a name that somebody sends may hold what moves the cursor or paints the screen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

T = TypeVar("T")

# Control characters (C0, DEL, C1), and what turns the direction of text or breaks a line: names come from whoever sends spans.
_UNSHOWN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """As a terminal may show it: ``\\x1b`` for an escape, on one line."""
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_clean(text: str) -> bool:
    """Whether ``clean`` changes nothing."""
    return not _UNSHOWN.search(text)


def cleaned(value: T) -> T:
    """The same dataclass, mapping or sequence with every string in it ``clean``."""
    return _cleaned(value)  # type: ignore[no-any-return]


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value) if type(value) is str else value  # the words of an enum are ours
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _cleaned(getattr(value, each.name)) for each in fields(value) if each.init})
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_cleaned, value))
    return value
