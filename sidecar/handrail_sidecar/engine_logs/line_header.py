"""Split a line of an engine's log into its head and its message.

Formats: vLLM (``(EngineCore pid=1) WARNING 11-29 17:42:36 [file.py:1] ...``, coloured or not, and as JSON), SGLang
(``[2026-02-27 15:01:51 TP3] ...``), LMCache, glog and Abseil (Mooncake, NIXL), UCX, Dynamo's text and JSON lines, and around any
of them what Kubernetes, Docker or journald wrote.
The engine need not be known; a line of unknown format is all message.

Standard library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any, Final

from handrail.records import LineClock


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a log line, and its message.

    ``prefix`` is equal for lines of one statement: the lines of a traceback repeat it.
    """

    message: str
    level: str = ""
    at_unix_ns: int | None = None
    clock: LineClock = LineClock.RECEIPT
    resolution_ns: int = 0
    process: str = ""  # as the line names it: Worker_TP1, DP0 TP0
    prefix: str = ""


_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CRI: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) (?:stdout|stderr) [FP] ")
_JOURNAL: Final = re.compile(r"[^\W\d]{3,5}\.? [ \d]?\d \d\d:\d\d:\d\d [^ ]+ [^ :]+\[\d+\]: ")
_PROCESS: Final = re.compile(r"[^(\[]{0,40}?\(([A-Za-z]\w*)(?: rank=(\d+))?(?: [a-z_]+=\d+)*? pid=\d+\) ?")
_LEVEL: Final = r"(?P<level>TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL|DIAG)"
_FORMATS: Final = (
    # vLLM; fault tests print no file
    re.compile(
        rf"{_LEVEL} (?P<month>\d\d)-(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)(?P<fraction>) (?:\[[^\]\s]{{1,200}}:\d+\] ?)?"
    ),
    # LMCache
    re.compile(
        rf"\[(?P<year>\d{{4}})-(?P<month>\d\d)-(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d),(?P<fraction>\d+)\] \w+ {_LEVEL}: ?"
    ),
    # SGLang
    re.compile(
        r"\[(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<fraction>\d+))?"
        rf"(?P<process>(?: [A-Z]+\d+)*)\] (?:{_LEVEL}: +)?"
    ),
    # glog and Abseil, with or without the year
    re.compile(
        r"(?P<letter>[IWEF])(?P<year>\d{4})?(?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<fraction>\d+)"
        r" +\d+ [^\]\s]{1,200}:\d+\] ?"
    ),
    # UCX
    re.compile(rf"(?:\[(?P<unix>\d{{9,10}}\.\d{{1,9}})\] \[[^\]]{{1,200}}\] +)?[\w./-]{{1,100}}\.c:\d+ +UCX +{_LEVEL} +"),
    # Dynamo and other Rust: ISO stamp, level, target
    re.compile(
        r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)T(?P<clock>\d\d:\d\d:\d\d)(?:\.(?P<fraction>\d+))?(?P<zone>Z|[+-]\d\d:\d\d)"
        rf" +{_LEVEL} +[\w.:]{{1,200}}: "
    ),
    # Abseil before its start, and excerpts that a person cut out of a log
    re.compile(r"(?P<letter>[IWEF]) [\w.]{1,100}:\d+\] "),
    re.compile(r"(?P<clock>\d\d:\d\d:\d\d)\.(?P<fraction>\d+) "),
)
_BEGINS: Final = re.compile(r"[\[(\dA-Z]")
_LETTERS: Final = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL"}
_LEVELS: Final = {"WARN": "WARNING", "FATAL": "CRITICAL"}


def read_head(line: str, near_unix_ns: int, zone: tzinfo | None = None) -> Head:
    """Split one line into head and message.

    ``near_unix_ns``: roughly when the line was written: the file's last change or the present.
    It gives the year when the stamp has none (the latest that is not in the future), and the day when there is only a time.
    ``zone``: for stamps without one; None means this process's zone.
    """
    text = _ANSI.sub("", line) if "\x1b" in line else line
    text, wrapped_ns = _unwrapped(text.rstrip("\r\n"))
    if text.startswith("{") and (found := _json_head(text, near_unix_ns, zone)):
        return found if wrapped_ns is None else _wrapped(found, wrapped_ns)
    process = ""
    if text.startswith("(") and (match := _PROCESS.match(text)):
        process = match[1] + (f"_{match[2]}" if match[2] else "")
        rest = text[match.end() :]
    else:
        rest = text
    head = _stamped(text, rest, process, near_unix_ns, zone)
    return head if wrapped_ns is None else _wrapped(head, wrapped_ns)


def _wrapped(head: Head, at_ns: int) -> Head:
    return Head(head.message, head.level, at_ns, LineClock.WRAPPER, 1, head.process, head.prefix)


def _unwrapped(text: str) -> tuple[str, int | None]:
    """Return the line without the wrapper of a container runtime or journald.

    Also returns the runtime's time stamp, None when there is none.
    """
    if match := _CRI.match(text):
        return text[match.end() :], _iso_ns(match[1])
    if text.startswith('{"log":"') and isinstance(entry := _parsed(text), dict):
        inner, at = entry.get("log"), entry.get("time")
        if isinstance(inner, str):
            return inner.rstrip("\r\n"), _iso_ns(at) if isinstance(at, str) else None
    if match := _JOURNAL.match(text):
        return text[match.end() :], None
    return text, None


def _stamped(text: str, rest: str, process: str, near_ns: int, zone: tzinfo | None) -> Head:
    if _BEGINS.match(rest) or rest.find(" UCX ", 0, 200) > 0:
        for pattern in _FORMATS:
            match = pattern.match(rest)
            if match is None:
                continue
            parts = match.groupdict()
            level = parts.get("level") or _LETTERS.get(parts.get("letter") or "", "")
            at = _unix_ns(parts, near_ns, zone)
            fraction = parts.get("fraction") or (parts.get("unix") or "").partition(".")[2]
            return Head(
                message=rest[match.end() :],
                level=_LEVELS.get(level, level),
                at_unix_ns=at,
                clock=LineClock.RECEIPT if at is None else LineClock.LINE,
                resolution_ns=0 if at is None else 10 ** (9 - min(len(fraction), 9)),
                process=process or (parts.get("process") or "").strip(),
                prefix=text[: len(text) - len(rest) + match.end()],
            )
    return Head(message=rest, process=process, prefix=text[: len(text) - len(rest)])


def _unix_ns(parts: dict[str, str | None], near_ns: int, zone: tzinfo | None) -> int | None:
    if unix := parts.get("unix"):
        seconds, _, fraction = unix.partition(".")
        return int(seconds) * 10**9 + int(fraction.ljust(9, "0"))
    clock = parts.get("clock")
    if not clock:
        return None
    near = datetime.fromtimestamp(near_ns / 1e9, zone)
    nanos = int((parts.get("fraction") or "0").ljust(9, "0")[:9])
    hour, minute, second = (int(part) for part in clock.split(":"))
    try:
        if given := parts.get("zone"):
            return _iso_ns(f"{parts['year']}-{parts['month']}-{parts['day']}T{clock}{given}", nanos)
        if not parts.get("month"):
            at = near.replace(hour=hour, minute=minute, second=second, microsecond=0)
            at = min((at + timedelta(days=shift) for shift in (-1, 0, 1)), key=lambda each: abs(each - near))
        elif parts.get("year"):
            at = datetime(int(parts["year"] or 0), int(parts["month"] or 0), int(parts["day"] or 0), hour, minute, second)
            at = at.replace(tzinfo=near.tzinfo)
        else:
            at = _latest_year(int(parts["month"] or 0), int(parts["day"] or 0), hour, minute, second, near)
    except (ValueError, OverflowError):
        return None
    return int(at.timestamp()) * 10**9 + nanos


def _latest_year(month: int, day: int, hour: int, minute: int, second: int, near: datetime) -> datetime:
    """Return the stamp in the latest year that puts it before ``near``.

    The year is not printed. A day's grace allows for clocks (case A25).
    """
    for year in range(near.year + 1, near.year - 9, -1):
        try:
            at = datetime(year, month, day, hour, minute, second, tzinfo=near.tzinfo)
        except ValueError:  # 29 February in a year without one; the nine years include a leap year
            continue
        if at <= near + timedelta(days=1):
            return at
    raise ValueError("no such day")


def _iso_ns(text: str, nanos: int | None = None) -> int | None:
    """Convert RFC 3339 to unix ns, exact to the ns.

    ``fromisoformat`` of Python 3.10 accepts neither ``Z`` nor nine digits.
    """
    body, _, fraction_zone = text.replace("Z", "+00:00").partition(".")
    zone = "+00:00"
    if fraction_zone:
        digits = re.match(r"\d*", fraction_zone)
        fraction = digits[0] if digits else ""
        zone = fraction_zone[len(fraction) :] or zone
        nanos = int(fraction.ljust(9, "0")[:9]) if nanos is None else nanos
        body += zone
    elif "+" not in body[10:] and "-" not in body[10:]:
        body += zone
    try:
        return int(datetime.fromisoformat(body).timestamp()) * 10**9 + (nanos or 0)
    except (ValueError, OverflowError):
        return None


# --- JSON lines -----------------------------------------------------------------------------------------------------------

_MESSAGE_KEYS: Final = ("message", "msg", "event")
_LEVEL_KEYS: Final = ("levelname", "level", "severity")
_TIME_KEYS: Final = ("timestamp", "time", "ts", "asctime", "created")
_PROCESS_KEYS: Final = ("vllm_process_name", "processName", "process_name")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_head(text: str, near_ns: int, zone: tzinfo | None) -> Head | None:
    entry = _parsed(text)
    if not isinstance(entry, dict):
        return None
    message = _first_text(entry, _MESSAGE_KEYS)
    if message is None:
        return None
    level = (_first_text(entry, _LEVEL_KEYS) or "").upper()
    process = _first_text(entry, _PROCESS_KEYS) or ""
    at = _json_time(entry, near_ns, zone)
    return Head(
        message=message,
        level=_LEVELS.get(level, level),
        at_unix_ns=at[0] if at else None,
        clock=LineClock.LINE if at else LineClock.RECEIPT,
        resolution_ns=at[1] if at else 0,
        process=process,
        prefix=f"{process} {at[0] if at else ''}",
    )


def _first_text(entry: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((entry[key] for key in keys if isinstance(entry.get(key), str)), None)


def _json_time(entry: dict[str, Any], near_ns: int, zone: tzinfo | None) -> tuple[int, int] | None:
    """Return (unix ns, resolution in ns) from the first key that holds a time."""
    for key in _TIME_KEYS:
        value = entry.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 1e9 < value < 1e11:
            return int(value * 1e6) * 1000, 1000 if isinstance(value, float) else 10**9
        if not isinstance(value, str):
            continue
        if re.match(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d", value):
            whole = value.replace(" ", "T", 1).replace(",", ".")
            named = re.search(r"(?:Z|[+-]\d\d:\d\d)$", whole)
            if named:
                at = _iso_ns(whole)
            else:
                local = datetime.fromisoformat(whole[:19]).replace(tzinfo=datetime.fromtimestamp(near_ns / 1e9, zone).tzinfo)
                at = int(local.timestamp()) * 10**9 + int((whole[20:] or "0").ljust(9, "0")[:9])
            if at is not None:
                return at, 10**6 if "." in whole else 10**9
        elif match := re.match(r"(?P<month>\d\d)-(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)$", value):
            at = _unix_ns({**match.groupdict()}, near_ns, zone)
            if at is not None:
                return at, 10**9
    return None
