"""Move recordings to the present: shift all absolute times by the same amount.

Every recording that is replayed into code with a clock goes through here.
Tests that only decode bytes read the files as they are.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from handrail.plugin.events import FIELDS
from handrail_sidecar.plugin_merge.stamps import BEGINS

RECORDINGS: Final = Path(__file__).parents[1] / "data/recordings"
RECORDED_YEAR: Final = 2026  # vLLM's log lines print no year
_STAMP: Final = re.compile(r"(?<= )\d\d-\d\d \d\d:\d\d:\d\d(?= )")
_UNIX: Final = "_unix_nano"

M = TypeVar("M", bound=Message)


def plugin(role: str, end_ns: int | None = None, end_unix_ns: int | None = None) -> list[bytes]:
    """Return the plugin's datagrams, the last one sent at ``end_ns`` (monotonic).

    By default both clocks end now.
    """
    packets = [json.loads(line) for line in (RECORDINGS / f"plugin/{role}.jsonl").read_bytes().splitlines()]
    last_ns, last_unix_ns = max(packet[5] for packet in packets), max(packet[6] for packet in packets)
    first_ns = min(event[1] for packet in packets for event in packet[8])
    if end_ns is None:
        end_ns = max(time.monotonic_ns(), last_ns - first_ns)  # on a host that booted seconds ago: a little ahead
    shift = end_ns - last_ns
    turned = (time.time_ns() if end_unix_ns is None else end_unix_ns) - last_unix_ns
    for packet in packets:
        packet[5] += shift
        packet[6] += turned
        for event in packet[8]:
            event[1] += shift
            for place, field in enumerate(FIELDS[event[0]], 2):
                by = shift if BEGINS.get(event[0]) == field else turned if field == "arrival_unix_ns" else 0
                if by and place < len(event) and event[place] is not None:
                    event[place] += by
    return [json.dumps(packet, separators=(",", ":")).encode() for packet in packets]


def log_lines(name: str, end_unix_ns: int | None = None, zone: tzinfo | None = None) -> list[str]:
    """Return an engine's log whose last line is at ``end_unix_ns`` (default: now).

    ``zone``: the time zone of the stamps; None means the process's.
    """
    lines = (RECORDINGS / f"log_{name}.txt").read_text(encoding="utf-8").splitlines()
    end = datetime.fromtimestamp((time.time_ns() if end_unix_ns is None else end_unix_ns) // 10**9, zone)
    shift = end.replace(tzinfo=None) - max(stamp for line in lines for stamp in stamps(line))
    return [_STAMP.sub(_moved(shift), line) for line in lines]


def stamps(line: str, year: int = RECORDED_YEAR) -> Iterator[datetime]:
    """Yield the times that a line of a recorded log shows, without a zone."""
    return (datetime.strptime(f"{year}-{found[0]}", "%Y-%m-%d %H:%M:%S") for found in _STAMP.finditer(line))


def _moved(shift: timedelta) -> Callable[[re.Match[str]], str]:
    def move(found: re.Match[str]) -> str:
        at = datetime.strptime(f"{RECORDED_YEAR}-{found[0]}", "%Y-%m-%d %H:%M:%S") + shift
        return at.strftime("%m-%d %H:%M:%S")

    return move


def otlp(payload: bytes, kind: type[M], end_unix_ns: int | None = None) -> bytes:
    """Return an export request whose latest time is ``end_unix_ns`` (default: now).

    ``kind``: the request's class.
    """
    request = kind.FromString(payload)
    times = [(message, field, getattr(message, field)) for message, field in _times(request)]
    shift = (time.time_ns() if end_unix_ns is None else end_unix_ns) - max((at for _, _, at in times), default=0)
    for message, field, at in times:
        setattr(message, field, at + shift)
    return request.SerializeToString()


def _times(message: Message) -> Iterator[tuple[Message, str]]:
    for field, value in message.ListFields():
        if field.name.endswith(_UNIX):
            yield message, field.name
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner: Any = value if isinstance(value, Message) else iter(value)
            for each in (inner,) if isinstance(inner, Message) else inner:
                if isinstance(each, Message):
                    yield from _times(each)
