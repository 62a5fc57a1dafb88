"""Read datagrams of the plugin.

Whatever arrives on the socket becomes a ``Packet`` or a ValueError. Format: plugin/events.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from handrail.plugin.events import FIELDS, LONG, MAX_DATAGRAM_BYTES, MAX_LINE_CHARS, MAX_PART_CHARS, MAX_TEXT_CHARS, VERSION

_MOST_NS: Final = 2**63
_MOST_ITEMS: Final = 256
_LONGEST: Final = max(MAX_LINE_CHARS, MAX_PART_CHARS)
_HEAD_FIELDS: Final = 8


@dataclass(frozen=True, slots=True)
class PluginDatagramEvent:
    """One event: its name, its time and its fields.

    The time is on the host's monotonic clock. The fields (``guest.events.FIELDS``) are by name, each of its type.
    """

    name: str
    at_ns: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Packet:
    """One datagram.

    ``unread``: number of its events that are not known here (a later version's, or damage).
    """

    boot: str
    pid: int
    kind: str
    sequence: int
    monotonic_ns: int
    unix_ns: int
    lost: int
    events: tuple[PluginDatagramEvent, ...]
    unread: int = 0


def read_packet(data: bytes) -> Packet:
    """Read one datagram.

    Raises ValueError for anything that is no datagram of this version. An event that cannot be read is counted, not fatal.
    """
    if len(data) > MAX_DATAGRAM_BYTES:
        raise ValueError("too long")
    try:
        text = data.decode()  # json.loads would let surrogates through
        found = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            found = _escaped(found)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(found, list) or len(found) < _HEAD_FIELDS + 1 or found[0] != VERSION or isinstance(found[0], bool):
        raise ValueError("not a datagram of this version")
    _, boot, pid, kind, sequence, monotonic_ns, unix_ns, lost, events = found[: _HEAD_FIELDS + 1]
    if not _is_text(boot) or not boot or not _is_text(kind) or not isinstance(events, list):
        raise ValueError("head of wrong types")
    if not all(_is_count(value) for value in (pid, sequence, monotonic_ns, unix_ns, lost)):
        raise ValueError("head of wrong types")
    # A record's wall clock time is an event's own time plus their difference: no record has one before 1970 or after 2262.
    if unix_ns < monotonic_ns:
        raise ValueError("the wall clock is before the host's start")
    latest_ns = _MOST_NS - (unix_ns - monotonic_ns)
    read = [
        plugin_datagram_event
        for event in events
        if (plugin_datagram_event := _read_event(event)) is not None and plugin_datagram_event.at_ns < latest_ns
    ]
    unread = len(events) - len(read)
    return Packet(boot, pid, kind, sequence, monotonic_ns, unix_ns, lost, tuple(read), unread)


def _escaped(value: Any) -> Any:
    """Escape lone surrogates in ``value``, as ``export.attributes.clean_text`` does.

    No record and no hash takes a lone surrogate.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return {_escaped(key): _escaped(item) for key, item in value.items()} if isinstance(value, dict) else value


def _read_event(event: object) -> PluginDatagramEvent | None:
    """Read one event.

    It takes 2 us besides the JSON (1.6 us); with a generator over ``FIELDS`` it took 3.4 us (a stream's event, median).
    """
    if not isinstance(event, list) or len(event) < 2 or not isinstance(event[0], str):
        return None
    wanted = _FITS.get(event[0])
    if wanted is None or not _is_count(event[1]):
        return None
    fields: dict[str, Any] = {}
    given = len(event)
    for at, (field, fits) in enumerate(wanted, 2):
        value = event[at] if at < given else None  # a later version may add fields at the end
        if not fits(value):
            return None
        fields[field] = value
    return PluginDatagramEvent(event[0], event[1], fields)


def _checked(kind: str, limit: int) -> Callable[[object], bool]:
    """Whether a value fits this type of ``FIELDS``."""
    fits: Callable[[object], bool]
    if kind[0] == "i":
        fits = _is_count
    elif kind[0] == "s":
        fits = partial(_is_text, limit=limit)
    elif kind[0] == "b":
        fits = _is_flag
    else:
        fits = _is_mapping
    return (lambda value: value is None or fits(value)) if kind.endswith("?") else fits


def _is_flag(value: object) -> bool:
    return value is True or value is False


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= _MOST_ITEMS and all(_is_plain(item) for item in value.values())


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= _MOST_ITEMS and all(_is_text(item) for item in value)
    return value is None or isinstance(value, bool) or _is_number(value) or _is_text(value, MAX_LINE_CHARS)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_MOST_NS <= value < _MOST_NS


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_NS


def _is_text(value: object, limit: int = MAX_TEXT_CHARS) -> bool:
    return isinstance(value, str) and len(value) <= limit


_FITS: Final = {
    name: tuple((field, _checked(kind, _LONGEST if field in LONG else MAX_TEXT_CHARS)) for field, kind in fields.items())
    for name, fields in FIELDS.items()
}
