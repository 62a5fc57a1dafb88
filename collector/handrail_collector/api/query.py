"""Parse query strings into filters and questions.

Pure: the caller passes the present time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from handrail.durations import DURATION_RULE, TIME_RULE, parse_duration_ns, parse_time
from handrail.printable import is_printable
from handrail_collector.api.errors import ApiError, nearest
from handrail_collector.api.events import HappenedFilter
from handrail_collector.explain.period.question import Question
from handrail_collector.links.question import MAX_LIMIT as MOST_LINKS
from handrail_collector.links.question import LinksQuestion
from handrail_collector.store.filters import (
    DIRECTIONS,
    FETCH_SORTS,
    MAX_LIMIT,
    OUTCOMES,
    SCOPES,
    SORTS,
    FetchFilter,
    RequestFilter,
)

WHERE = "query string"
_TRUE_FALSE = {"true": True, "1": True, "false": False, "0": False}
_INTEGER = "an integer of nanoseconds"


def parse_query(pairs: Iterable[tuple[str, str]], now_unix_ns: int) -> RequestFilter:
    """Parse a filter of requests.

    Raises ``ApiError`` (400) for the first parameter that is wrong.
    """
    wanted = RequestFilter(**fields_of(pairs, PARAMETERS, now_unix_ns))
    _refuse(wanted.validate())
    return wanted


def parse_question(pairs: Iterable[tuple[str, str]], now_unix_ns: int) -> Question:
    """Parse the question of ``GET /api/v1/explain``.

    Raises as ``parse_query``.
    """
    question = Question(**fields_of(pairs, EXPLAIN_PARAMETERS, now_unix_ns))
    _refuse(question.validate())
    return question


def parse_fetches(pairs: Iterable[tuple[str, str]], now_unix_ns: int) -> FetchFilter:
    """Parse the filter of ``GET /api/v1/fetches``.

    Raises as ``parse_query``.
    """
    wanted = FetchFilter(**fields_of(pairs, FETCH_PARAMETERS, now_unix_ns))
    _refuse(wanted.validate())
    return wanted


def parse_links(pairs: Iterable[tuple[str, str]], now_unix_ns: int) -> LinksQuestion:
    """Parse the question of ``GET /api/v1/links``.

    Raises as ``parse_query``.
    """
    wanted = LinksQuestion(**fields_of(pairs, LINK_PARAMETERS, now_unix_ns))
    _refuse(wanted.validate())
    return wanted


def parse_events(pairs: Iterable[tuple[str, str]], now_unix_ns: int) -> HappenedFilter:
    """Parse the filter of ``GET /api/v1/events``.

    Raises as ``parse_query``.
    """
    wanted = HappenedFilter(**fields_of(pairs, EVENT_PARAMETERS, now_unix_ns))
    _refuse(wanted.validate())
    return wanted


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ApiError(status=400, what="; ".join(problems), where=WHERE, valid="values that fit each other")


def fields_of(pairs: Iterable[tuple[str, str]], parameters: Mapping[str, Reading], now_unix_ns: int) -> dict[str, Any]:
    """Parse the parameters into values by field.

    Raises ``ApiError`` (400) for the first that is wrong.
    """
    found: dict[str, Any] = {}
    for name, text in pairs:
        if name not in parameters:
            raise ApiError(
                status=400,
                what=f"unknown parameter {name!r}",
                where=WHERE,
                valid=", ".join(parameters),
                nearest=nearest(name, tuple(parameters)),
            )
        field, read, valid, words = parameters[name]
        if field in found:
            raise ApiError(status=400, what=f"{name}: given twice", where=WHERE, valid="one value")
        try:
            found[field] = read(text, now_unix_ns)
        except (KeyError, ValueError):
            raise ApiError(
                status=400, what=f"{name}: {text!r} is not valid", where=WHERE, valid=valid, nearest=nearest(text, words)
            ) from None
    return found


def text_of(text: str, _: int) -> str:
    """Read printable text."""
    if not text or not is_printable(text):
        raise ValueError(text)
    return text


def one_of(words: tuple[str, ...]) -> Callable[[str, int], str]:
    """Return a reader of one of these words."""

    def read(text: str, _: int) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return read


def _limit(text: str, _: int) -> int:
    limit = int(text)
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(text)
    return limit


Reading = tuple[str, Callable[[str, int], Any], str, tuple[str, ...]]
"""Field of the filter, reader, what is valid, and the known words.

The reader raises ``KeyError`` or ``ValueError`` for a wrong text.
"""

PARAMETERS: dict[str, Reading] = {
    "since": ("since_unix_ns", parse_time, TIME_RULE, ()),
    "until": ("until_unix_ns", parse_time, TIME_RULE, ()),
    "since_unix_ns": ("since_unix_ns", lambda text, _: int(text), _INTEGER, ()),
    "until_unix_ns": ("until_unix_ns", lambda text, _: int(text), _INTEGER, ()),
    "scope": ("scope", one_of(SCOPES), ", ".join(SCOPES), SCOPES),
    "outcome": ("outcome", text_of, "an outcome", ()),
    "model": ("model", text_of, "a model's name", ()),
    "instance": ("instance", text_of, "host:port of a process", ()),
    "min_ttft": ("min_ttft_ns", lambda text, _: parse_duration_ns(text), DURATION_RULE, ()),
    "min_ttft_ns": ("min_ttft_ns", lambda text, _: int(text), _INTEGER, ()),
    "finding": ("finding", text_of, "a finding or its kind", ()),
    "text": ("text", text_of, "printable text", ()),
    "sort": ("sort", one_of(SORTS), ", ".join(SORTS), SORTS),
    "descending": ("descending", lambda text, _: _TRUE_FALSE[text.lower()], "true or false", ("true", "false")),
    "limit": ("limit", _limit, f"1 to {MAX_LIMIT}", ()),
}
"""Every parameter of a request filter.

``*_unix_ns`` and ``*_ns`` are for programs, the others for people.
"""

EXPLAIN_PARAMETERS: dict[str, Reading] = {
    **{name: PARAMETERS[name] for name in ("since", "until", "since_unix_ns", "until_unix_ns", "scope", "model")},
    "fast": ("fast", lambda text, _: _TRUE_FALSE[text.lower()], "true or false", ("true", "false")),
}
"""Every parameter of ``/api/v1/explain``."""

EVENT_PARAMETERS: dict[str, Reading] = {
    name: PARAMETERS[name] for name in ("since", "until", "since_unix_ns", "until_unix_ns", "instance", "limit")
}
"""Every parameter of ``/api/v1/events``."""

_YES_NO = (lambda text, _: _TRUE_FALSE[text.lower()], "true or false", ("true", "false"))

FETCH_PARAMETERS: dict[str, Reading] = {
    **{name: PARAMETERS[name] for name in ("since", "until", "since_unix_ns", "until_unix_ns", "descending", "limit")},
    "outcome": ("outcome", one_of(OUTCOMES), ", ".join(OUTCOMES), OUTCOMES),
    "failed": ("failed", *_YES_NO),
    "open": ("open", *_YES_NO),
    "direction": ("direction", one_of(DIRECTIONS), ", ".join(DIRECTIONS), DIRECTIONS),
    "peer": ("peer", text_of, "host:port or host of either engine, or the side channel's address", ()),
    "sort": ("sort", one_of(tuple(FETCH_SORTS)), ", ".join(FETCH_SORTS), tuple(FETCH_SORTS)),
}
"""Every parameter of ``/api/v1/fetches``."""

LINK_PARAMETERS: dict[str, Reading] = {
    **{name: PARAMETERS[name] for name in ("since", "until", "since_unix_ns", "until_unix_ns")},
    "peer": ("peer", text_of, "host:port or host of either engine, or the side channel's address", ()),
    "limit": ("limit", lambda text, _: int(text), f"1 to {MOST_LINKS}", ()),
}
"""Every parameter of ``/api/v1/links``."""
