"""Reads a Prometheus text page fast: what a line is, is decided once and remembered by its bytes up to the value.

A page repeats itself at every scrape but for its numbers, so a line costs a split, a dictionary look-up and, where the family
is wanted, one ``float``: 0.9 us a sample, the stock parser's 19 in the same run (tests/bench/bench_scrape.py). The memory is
bounded; a page whose labels change at every scrape costs what a first scrape costs.

Source: Prometheus text format 0.0.4. Comments, blank lines and unknown families are passed over, timestamps dropped, exemplars
too, and a family may stand in several places and in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Slot = TypeVar("Slot")

Resolve = Callable[[str, Mapping[str, str]], "Slot | None"]
"""What a sample of this name and these labels is to the caller; None: not wanted."""

_NAME: Final = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(rb'\s*([a-zA-Z_][a-zA-Z0-9_.]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_CLOSE: Final = re.compile(rb"\s*\}")
_ESCAPE: Final = re.compile(r'\\(\\|"|n)')
_ESCAPED: Final = {"\\": "\\", '"': '"', "n": "\n"}
_TYPE: Final = re.compile(rb"^# TYPE (\S+) (\w+)", re.MULTILINE)
_LONGEST_LINE: Final = 65536


@dataclass(slots=True)
class ScanStats:
    """Counts since start."""

    lines: int = 0
    malformed: int = 0
    forgotten: int = 0  # times the memory was full


class Scanner(Generic[Slot]):
    """Scans pages of one endpoint; keeps what it learned between them."""

    def __init__(self, resolve: Resolve[Slot], *, most_known: int = 50_000) -> None:
        self.stats = ScanStats()
        self._resolve = resolve
        self._most_known = most_known
        self._known: dict[bytes, Slot | None] = {}

    def scan(self, page: bytes) -> Iterator[tuple[Slot, float]]:
        """The wanted samples in the page's order. A line that is none is counted and passed over."""
        known = self._known
        lines = page.split(b"\n")
        self.stats.lines += len(lines)
        for line in lines:
            if line[:1] in (b"#", b""):
                continue
            prefix, _, value = line.rpartition(b" ")
            try:
                slot = known[prefix]
            except KeyError:
                found = self._learn(line)
                if found is not None:
                    yield found
                continue
            if slot is not None:
                try:
                    yield slot, float(value)
                except ValueError:
                    self.stats.malformed += 1

    def _learn(self, line: bytes) -> tuple[Slot, float] | None:
        parts = split_sample(line) if len(line) <= _LONGEST_LINE else None
        if parts is None:
            if line.strip():
                self.stats.malformed += 1
            return None
        name, labels, value, plain = parts
        slot = self._resolve(name, labels)
        if plain:
            if len(self._known) >= self._most_known:
                self._known.clear()
                self.stats.forgotten += 1
            self._known[line.rpartition(b" ")[0]] = slot
        return None if slot is None else (slot, value)


def split_sample(line: bytes) -> tuple[str, dict[str, str], float, bool] | None:
    """(name, labels, value, whether the value is all that follows the labels); None where it is no sample."""
    match = _NAME.match(line)
    if match is None:
        return None
    labels: dict[str, str] = {}
    at = match.end()
    if line[at : at + 1] == b"{":
        at += 1
        while (label := _LABEL.match(line, at)) is not None:
            labels[label[1].decode()] = _unescaped(label[2].decode("utf-8", "replace"))
            at = label.end()
        end = _CLOSE.match(line, at)
        if end is None:
            return None
        at = end.end()
    rest = line[at:].split()
    try:
        value = float(rest[0])
    except (IndexError, ValueError):
        return None
    return match[0].decode(), labels, value, len(rest) == 1 and line[at:] == b" " + rest[0]


def families_of(page: bytes) -> dict[str, str]:
    """Type by family name, of the families that have a ``# TYPE`` line; the first of equal names."""
    found: dict[str, str] = {}
    for match in _TYPE.finditer(page):
        found.setdefault(match[1].decode("utf-8", "replace"), match[2].decode())
    return found


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED[match[1]], text) if "\\" in text else text
