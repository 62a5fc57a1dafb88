"""Flags for a period, a limit and durations, and the query that they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from handrail.durations import TimeError, parse_duration_ns, parse_time
from handrail_cli.errors import EXIT_USAGE, CliError


class Query(Protocol):
    """A query to a store.

    Its class takes ``since_unix_ns``, ``until_unix_ns`` and its own fields by name.
    """

    def validate(self) -> list[str]: ...


_TIMES: Final = "such as -15m, 14:03 or 2026-11-29T14:03:07Z"
QueryT = TypeVar("QueryT", bound=Query)


def add_period_flags(parser: argparse.ArgumentParser, what: str, default: str = "") -> None:
    """Add ``--since`` and ``--until``.

    ``what`` names what began or happened in the period.
    """
    more = f" (default: {default})" if default else ""
    parser.add_argument("--since", metavar="TIME", help=f"{what} at or after TIME, {_TIMES}{more}")
    parser.add_argument("--until", metavar="TIME", help=f"{what} before TIME")


def add_limit_flag(parser: argparse.ArgumentParser, what: str, default: int, most: int) -> None:
    """Add ``--limit``."""
    parser.add_argument(
        "--limit", metavar="N", type=int, default=default, help=f"list at most N {what} (default {default}, at most {most})"
    )


def query_of(kind: Callable[..., QueryT], arguments: argparse.Namespace, now_unix_ns: int, **given: object) -> QueryT:
    """Return the query that ``--since``, ``--until`` and ``given`` describe.

    ``given``: fields of the query.
    Raises ``CliError`` for a time or a field that is not valid.
    """
    query = kind(
        since_unix_ns=_time("--since", arguments.since, now_unix_ns),
        until_unix_ns=_time("--until", arguments.until, now_unix_ns),
        **given,
    )
    if problems := query.validate():
        raise CliError(what="; ".join(problems), exit_code=EXIT_USAGE)
    return query


def duration_ns(flag: str, text: str, *, example: str = "500ms") -> int:
    """Return the duration that a flag gives.

    Raises ``CliError``.
    """
    try:
        return parse_duration_ns(text)
    except TimeError as error:
        raise CliError(what=f"{flag}: {error}", valid=f"{flag} {example}", exit_code=EXIT_USAGE) from None


def _time(flag: str, text: str | None, now_unix_ns: int) -> int | None:
    try:
        return None if text is None else parse_time(text, now_unix_ns)
    except TimeError as error:
        raise CliError(what=f"{flag}: {error}", exit_code=EXIT_USAGE) from None
