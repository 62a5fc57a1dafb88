"""Parse and format times and durations as people write them.

``parse_*`` take text from a command line, a URL or a configuration file and return integer nanoseconds; ``format_*`` make text
for people. The caller passes the present and the time zone; without a zone, the process's local one is used.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from fractions import Fraction
from typing import Final

UNITS_NS: Final = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,
}
DURATION_RULE: Final = "a number with a unit of ns, us, ms, s, m, h or d, such as 500ms, 30s or 1h30m"
TIME_RULE: Final = (
    "-15m, -2h, now, 14:03, 14:03:07, 2026-11-29, 2026-11-29 14:03, 2026-11-29T14:03:07Z, 2026-11-29T14:03:07.5+01:00, "
    "or a unix time in s, ms, us or ns"
)

_PART = r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d)"
_DURATION = re.compile(rf"(?:{_PART})+")
_PARTS = re.compile(_PART)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:[.,](?P<fraction>\d{1,9}))?)?"
_DATE = r"(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})"
_ZONE = r"(?P<zone>Z|z|[+-]\d{2}:?\d{2})"
_TIME_OF_DAY = re.compile(_CLOCK)
_DATE_TIME = re.compile(rf"{_DATE}(?:[Tt ]{_CLOCK}\s?{_ZONE}?)?")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MAX_NS: Final = 2**63 - 1
# A bare number below 1973 in seconds is a typed "15", not a time; above that, each thousandfold is the next smaller unit.
_UNIX_UNITS: Final = ((10**8, 10**11, 10**9), (10**11, 10**14, 10**6), (10**14, 10**17, 10**3), (10**17, _MAX_NS, 1))

PERIOD_RULE: Final = "FROM..TO, each a time, such as 14:00..14:30, -2h..-1h or 2026-11-29T14:00:00Z..2026-11-29T14:30:00Z"


class TimeError(ValueError):
    """Invalid time or duration; the message names the text and the valid forms."""


def parse_duration_ns(text: str) -> int:
    """Nanoseconds of ``500ms``, ``1.5s`` or ``1h30m``, exactly.

    Raises ``TimeError``, also for a number without a unit.
    """
    squeezed = text.strip().replace(" ", "")
    if squeezed == "0":
        return 0
    if not _DURATION.fullmatch(squeezed):
        raise TimeError(f"{text!r} is not a duration: write {DURATION_RULE}")
    total = sum((Fraction(number) * UNITS_NS[unit] for number, unit in _PARTS.findall(squeezed)), Fraction(0))
    if total > _MAX_NS:
        raise TimeError(f"{text!r} is longer than 292 years")
    return int(total)


def parse_time(text: str, now_unix_ns: int, zone: tzinfo | None = None) -> int:
    """Unix ns of a time as a person types it.

    A time of day is today's, or yesterday's when today's is still to come. ``zone`` applies to a time without an offset;
    ``None`` means the process's local zone. Raises ``TimeError``.
    """
    wanted = text.strip()
    if wanted.lower() == "now":
        return now_unix_ns
    if wanted.startswith(("-", "−")):
        return _at_least_epoch(text, now_unix_ns - parse_duration_ns(wanted[1:]))
    if _NUMBER.fullmatch(wanted):
        return _unix_number(text, Fraction(wanted))
    try:
        if match := _TIME_OF_DAY.fullmatch(wanted):
            return _time_of_day(match, now_unix_ns, zone)
        if match := _DATE_TIME.fullmatch(wanted):
            return _at_least_epoch(text, _date_time(match, zone))
    except TimeError:
        raise
    except (ValueError, OverflowError, OSError) as error:  # the 31st of February, hour 25, a year that the C library refuses
        raise TimeError(f"{text!r} is not a time ({error}); valid: {TIME_RULE}") from None
    raise TimeError(f"{text!r} is not a time; valid: {TIME_RULE}")


def parse_period(text: str, now_unix_ns: int, zone: tzinfo | None = None) -> tuple[int, int]:
    """Unix ns of both ends of a period like ``14:00..14:30``.

    Raises ``TimeError``, also where the end is not after the start.
    """
    first, separator, last = text.partition("..")
    if not separator:
        raise TimeError(f"{text!r} is not a period: write {PERIOD_RULE}")
    since, until = parse_time(first, now_unix_ns, zone), parse_time(last, now_unix_ns, zone)
    if until <= since:
        hint = "a time of day later than now means yesterday" if _TIME_OF_DAY.fullmatch(last.strip()) else PERIOD_RULE
        raise TimeError(f"{text!r} ends before it begins: {hint}")
    return since, until


def _unix_number(text: str, number: Fraction) -> int:
    for low, high, unit_ns in _UNIX_UNITS:
        if low <= number < high:
            return int(number * unit_ns)
    raise TimeError(
        f"{text!r} is not a Unix time of this century in s, ms, us or ns; for {text} minutes ago write "
        f"-{text}m; valid: {TIME_RULE}"
    )


def _at_least_epoch(text: str, unix_ns: int) -> int:
    if unix_ns < 0:
        raise TimeError(f"{text!r} is before 1970")
    return unix_ns


def _clock_of(match: re.Match[str]) -> tuple[time, int]:
    """Time of day to the second, and the nanoseconds above it.

    ``datetime`` keeps microseconds only.
    """
    found = match.groupdict()
    return time(int(found["hour"]), int(found["minute"]), int(found["second"] or 0)), int(
        (found["fraction"] or "0").ljust(9, "0")
    )


def _time_of_day(match: re.Match[str], now_unix_ns: int, zone: tzinfo | None) -> int:
    clock, extra_ns = _clock_of(match)
    today = datetime.fromtimestamp(now_unix_ns // 10**9, zone).date()
    unix_ns = _unix_ns(today, clock, zone) + extra_ns
    return unix_ns if unix_ns <= now_unix_ns else _unix_ns(today - timedelta(days=1), clock, zone) + extra_ns


def _date_time(match: re.Match[str], zone: tzinfo | None) -> int:
    found = match.groupdict()
    day = date(int(found["year"]), int(found["month"]), int(found["day"]))
    if found["hour"] is None:
        return _unix_ns(day, time(0), zone)
    clock, extra_ns = _clock_of(match)
    return _unix_ns(day, clock, _offset(found["zone"]) if found["zone"] else zone) + extra_ns


def _offset(text: str) -> tzinfo:
    if text in "Zz":
        return timezone.utc
    hours, minutes = int(text[1:3]), int(text[-2:])
    if minutes > 59:
        raise ValueError(f"offset {text}")
    offset = timedelta(hours=hours, minutes=minutes)
    return timezone(-offset if text[0] == "-" else offset)


def _unix_ns(day: date, clock: time, zone: tzinfo | None) -> int:
    local = datetime.combine(day, clock)
    # astimezone() on a naive time asks the C library for the local rules of that day, so daylight saving is right.
    aware = local.astimezone() if zone is None else local.replace(tzinfo=zone)
    return (aware - _EPOCH) // timedelta(seconds=1) * 10**9


def format_duration(duration_ns: int) -> str:
    """Format with three significant digits and a unit: ``66.3 ms``, ``1.30 s``.

    From 100 s on the form is ``2m 03s``, from an hour on ``1h 04m``.
    """
    if duration_ns < 0:
        return f"-{format_duration(-duration_ns)}"
    for unit_ns, unit in ((1, "ns"), (10**3, "µs"), (10**6, "ms"), (10**9, "s")):
        digits = _three_digits(duration_ns, unit_ns)
        if digits is not None:
            return f"{digits} {unit}"
    seconds = (duration_ns + 5 * 10**8) // 10**9
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    minutes = (seconds + 30) // 60
    return f"{minutes // 60}h {minutes % 60:02d}m"


def _three_digits(duration_ns: int, unit_ns: int) -> str | None:
    """Format in one unit with three significant digits.

    None where the value rounds to 1000 of the unit (100 for seconds).
    """
    if unit_ns == 1:
        return str(duration_ns) if duration_ns < 1000 else None
    limit = 100 if unit_ns == 10**9 else 1000
    for decimals, below in ((2, 10), (1, 100), (0, 1000)):
        scaled = (duration_ns * 10**decimals + unit_ns // 2) // unit_ns
        if scaled < below * 10**decimals and below <= limit:
            whole, part = divmod(scaled, 10**decimals)
            return f"{whole}.{part:0{decimals}d}" if decimals else str(whole)
    return None


def format_time(unix_ns: int, now_unix_ns: int | None = None, zone: tzinfo | None = None) -> str:
    """Format as ``14:03:07.123`` in ``zone`` or the local zone.

    The date is added unless the time is on the day of ``now_unix_ns``.
    """
    seconds, rest_ns = divmod(unix_ns, 10**9)
    moment = datetime.fromtimestamp(seconds, zone)
    clock = f"{moment:%H:%M:%S}.{rest_ns // 10**6:03d}"
    if now_unix_ns is not None and datetime.fromtimestamp(now_unix_ns // 10**9, zone).date() == moment.date():
        return clock
    return f"{moment:%Y-%m-%d} {clock}"


def format_rfc3339(unix_ns: int) -> str:
    """Format as UTC with nanoseconds for machines: ``2026-11-29T14:03:07.123456789Z``.

    ``parse_time`` reads it back exactly.
    """
    seconds, rest_ns = divmod(unix_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest_ns:09d}Z"
