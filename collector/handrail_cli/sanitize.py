"""Make text from outside safe for a terminal.

A name that somebody sends may hold codes that move the cursor or paint the screen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from handrail.printable import printable, printable_json

T = TypeVar("T")


def cleaned(value: T) -> T:
    """Return the same dataclass, mapping or sequence with every string ``printable``."""
    return _cleaned(value)  # type: ignore[no-any-return]


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value) if type(value) is str else value  # the words of an enum are ours
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _cleaned(getattr(value, each.name)) for each in fields(value) if each.init})
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_cleaned, value))
    return value


def print_document(value: Any) -> None:
    """Print an answer on standard output as one line of JSON.

    Letters of every script stay; control characters are escaped.
    """
    print(printable_json(json.dumps(value, ensure_ascii=False)))
