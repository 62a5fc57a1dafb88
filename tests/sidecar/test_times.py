"""Times and durations as typed and as shown."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone, tzinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.durations import (
    TimeError,
    format_duration,
    format_rfc3339,
    format_time,
    parse_duration_ns,
    parse_period,
    parse_time,
)

S = 10**9
MINUTE = 60 * S
CET = timezone(timedelta(hours=1))
# 2026-11-29 14:10:00 in UTC+1
NOW = int(datetime(2026, 11, 29, 14, 10, tzinfo=CET).timestamp()) * S


def at(*parts: int, zone: tzinfo = CET) -> int:
    return int(datetime(*parts, tzinfo=zone).timestamp()) * S  # type: ignore[arg-type,misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("now", NOW, id="now"),
        pytest.param("-15m", NOW - 15 * MINUTE, id="minutes-ago"),
        pytest.param("-2h", NOW - 120 * MINUTE, id="hours-ago"),
        pytest.param("-1h30m", NOW - 90 * MINUTE, id="compound-ago"),
        pytest.param("14:03", at(2026, 11, 29, 14, 3), id="time-of-day-today"),
        pytest.param("9:05", at(2026, 11, 29, 9, 5), id="one-digit-hour"),
        pytest.param("14:03:07", at(2026, 11, 29, 14, 3, 7), id="with-seconds"),
        pytest.param("14:03:07.25", at(2026, 11, 29, 14, 3, 7) + S // 4, id="with-a-fraction"),
        pytest.param("14:10", NOW, id="this-very-minute"),
        pytest.param("23:50", at(2026, 11, 28, 23, 50), id="future-means-yesterday"),
        pytest.param("2026-11-29", at(2026, 11, 29), id="a-day"),
        pytest.param("2026-11-29 14:03", at(2026, 11, 29, 14, 3), id="date-and-time"),
        pytest.param("2026-11-29T14:03:07Z", at(2026, 11, 29, 14, 3, 7, zone=timezone.utc), id="utc"),
        pytest.param("2026-11-29t14:03:07z", at(2026, 11, 29, 14, 3, 7, zone=timezone.utc), id="utc-lower-case"),
        pytest.param("2026-11-29T14:03:07.123456789+01:00", at(2026, 11, 29, 14, 3, 7) + 123456789, id="nanoseconds-and-offset"),
        pytest.param("2026-11-29T14:03:07-0530", at(2026, 11, 29, 20, 33, 7), id="offset-without-colon"),
        pytest.param("1795967477", 1795967477 * S, id="unix-s"),
        pytest.param("1795967477.5", 1795967477 * S + S // 2, id="unix-s-with-a-fraction"),
        pytest.param("1795967477697", 1795967477697 * 10**6, id="unix-ms"),
        pytest.param("1795967477697569", 1795967477697569 * 10**3, id="unix-us"),
        pytest.param("1795967477697569688", 1795967477697569688, id="unix-ns"),
    ],
)
def test_a_time_is_read(text: str, expected: int) -> None:
    assert parse_time(text, NOW, CET) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "15",
        "-15",
        "25:00",
        "14:61",
        "2026-02-31",
        "2026-11-29T14:03:07+01:99",
        "-1000d1000h99999d",
        "9" * 25,
        "14:03 Z",
    ],
)
def test_what_is_no_time_says_what_is(text: str) -> None:
    with pytest.raises(TimeError) as caught:
        parse_time(text, NOW, CET)
    assert repr(text)[1:-1] in str(caught.value) or text[1:] in str(caught.value)


def test_a_bare_small_number_is_distinguished_from_a_time() -> None:
    with pytest.raises(TimeError, match="for 15 minutes ago write -15m"):
        parse_time("15", NOW)


def test_without_a_zone_the_local_one_counts() -> None:
    local = datetime.fromtimestamp(NOW // S)
    assert parse_time(f"{local:%Y-%m-%d %H:%M:%S}", NOW) == NOW


@given(st.integers(min_value=10**17, max_value=2**62))
def test_rfc3339_is_read_back_exactly(unix_ns: int) -> None:
    assert parse_time(format_rfc3339(unix_ns), NOW) == unix_ns


@given(st.text(max_size=40))
def test_any_text_is_a_time_or_a_time_error(text: str) -> None:
    with contextlib.suppress(TimeError):
        assert parse_time(text, NOW) >= 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", S // 2),
        ("30s", 30 * S),
        ("5m", 300 * S),
        ("1.5s", S + S // 2),
        ("1h30m", 90 * MINUTE),
        ("10us", 10**4),
        ("10µs", 10**4),
        ("7ns", 7),
        ("0", 0),
        ("1 h 5 m", 65 * MINUTE),
        ("1d", 1440 * MINUTE),
    ],
)
def test_a_duration_is_read(text: str, expected: int) -> None:
    assert parse_duration_ns(text) == expected


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5 parsecs", "1e3s", "5s3", "999999999d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(TimeError):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("duration_ns", "expected"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 µs"),
        (66_312_345, "66.3 ms"),
        (1_300_000_000, "1.30 s"),
        (999_499, "999 µs"),
        (999_999, "1.00 ms"),
        (999_960_000, "1.00 s"),
        (9_994_000, "9.99 ms"),
        (9_996_000, "10.0 ms"),
        (99_960_000, "100 ms"),
        (99_940_000_000, "99.9 s"),
        (99_960_000_000, "1m 40s"),
        (123_000_000_000, "2m 03s"),
        (3_599_600_000_000, "1h 00m"),
        (7_440_000_000_000, "2h 04m"),
        (-66_300_000, "-66.3 ms"),
    ],
)
def test_a_duration_is_shown(duration_ns: int, expected: str) -> None:
    assert format_duration(duration_ns) == expected


def test_a_time_of_today_is_shown_without_its_date() -> None:
    assert format_time(NOW + 123_456_789, NOW, CET) == "14:10:00.123"
    assert format_time(NOW - 86400 * S, NOW, CET) == "2026-11-28 14:10:00.000"
    assert format_time(NOW, zone=CET) == "2026-11-29 14:10:00.000"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        pytest.param("-2h..-1h", (-7200, -3600), id="ago"),
        pytest.param("−90m..now", (-5400, 0), id="minus-sign"),
        pytest.param("-1.5h..-30m", (-5400, -1800), id="fractions"),
    ],
)
def test_a_period_has_two_times(text: str, seconds: tuple[int, int]) -> None:
    now = 1_796_000_000 * 10**9
    assert parse_period(text, now) == tuple(now + each * 10**9 for each in seconds)


def test_a_period_of_times_of_day_may_begin_yesterday() -> None:
    now = parse_time("2026-11-29T09:00:00Z", 0)
    since, until = parse_period("23:50..00:10", now, timezone.utc)
    assert until - since == 20 * 60 * 10**9


@pytest.mark.parametrize(
    ("text", "output"),
    [
        pytest.param("14:00", "is not a period: write FROM..TO", id="one-time"),
        pytest.param("-1h..-2h", "ends before it begins", id="reversed"),
        pytest.param("-1h..-1h", "ends before it begins", id="empty"),
        pytest.param("08:00..10:00", "a time of day later than now means yesterday", id="still-to-come"),
        pytest.param("..now", "is not a time", id="no-beginning"),
    ],
)
def test_what_is_no_period_is_reported(text: str, output: str) -> None:
    with pytest.raises(TimeError, match=output):
        parse_period(text, parse_time("2026-11-29T09:00:00Z", 0), timezone.utc)
