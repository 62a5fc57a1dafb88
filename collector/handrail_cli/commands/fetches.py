"""List KV hand-offs: newest first, or by age, time or bytes.

Filters select the failed ones, the open ones, or those of one peer.

examples:
  handrail fetches --failed --since -1h
  handrail fetches --open --sort duration
  handrail fetches --peer 10.0.0.7:8000 --sort transfer --limit 10
  handrail fetches --outcome stale_read --json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from handrail.durations import TIME_RULE, TimeError, format_time, parse_time
from handrail.kv_outcomes import FetchOutcome
from handrail.printable import printable_lines
from handrail_cli.client import Backend, add_source_flags, row_source
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.formatting import counted
from handrail_cli.sanitize import cleaned, print_document
from handrail_collector.rows import FetchRow
from handrail_collector.store.filters import DEFAULT_LIMIT, DIRECTIONS, FETCH_SORTS, MAX_LIMIT, OUTCOMES, FetchFilter

_PIPE_WIDTH: Final = 220  # another program reads it, so no column is left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail fetches``."""
    add_source_flags(parser)
    parser.add_argument("--since", metavar="TIME", help=f"begun at or after: {TIME_RULE}")
    parser.add_argument("--until", metavar="TIME", help="begun before")
    sorts = tuple(FETCH_SORTS)
    parser.add_argument("--sort", metavar="NAME", choices=sorts, default="started", help=f"one of {', '.join(sorts)}")
    parser.add_argument("--ascending", action="store_true", help="smallest or oldest first")
    parser.add_argument(
        "--limit", metavar="N", type=int, default=DEFAULT_LIMIT, help=f"default {DEFAULT_LIMIT}, at most {MAX_LIMIT}"
    )
    parser.add_argument("--outcome", metavar="NAME", choices=OUTCOMES, help=f"one of {', '.join(OUTCOMES)}")
    parser.add_argument("--failed", action="store_true", help="every outcome that counts as a failure")
    parser.add_argument("--open", action="store_true", help="not ended yet; sort by duration for the oldest")
    parser.add_argument("--direction", choices=DIRECTIONS, help="p_to_d, or d_to_p: KV of an earlier turn taken back")
    parser.add_argument("--peer", metavar="HOST[:PORT]", help="either engine, its host, or the side channel's address")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also when there are none: an empty list is an answer."""
    now_unix_ns = time.time_ns()
    query = fetch_filter(arguments, now_unix_ns)
    from handrail_cli.console import answer_console, remark, waiting

    with closing(row_source(arguments)) as source:
        with waiting(f"asking {source.where}"):
            rows = source.fetches(query)
        if not rows and not arguments.json:
            print(printable_lines(nothing_found(query, source, now_unix_ns)))
    if arguments.json:
        from handrail_collector.api.schema import fetch_to_json

        for row in rows:
            print_document(fetch_to_json(row))
    if arguments.json or not rows:
        return EXIT_OK
    from handrail_cli.render.kv_fetches import render_fetches

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(render_fetches(cleaned(rows), console.width, now_unix_ns=now_unix_ns))
    more = "; there may be more (--limit)" if len(rows) == query.limit else ""
    remark(f"{counted(len(rows), 'hand-off')} by {query.sort}{more}. 'handrail trace ID' shows one with its request.")
    return EXIT_OK


def fetch_filter(arguments: argparse.Namespace, now_unix_ns: int) -> FetchFilter:
    """Return the filter that the flags describe.

    Raises ``CliError``.
    """
    try:
        query = FetchFilter(
            since_unix_ns=None if arguments.since is None else parse_time(arguments.since, now_unix_ns),
            until_unix_ns=None if arguments.until is None else parse_time(arguments.until, now_unix_ns),
            outcome=arguments.outcome,
            failed=True if arguments.failed else None,
            open=True if arguments.open else None,
            direction=arguments.direction,
            peer=arguments.peer,
            sort=arguments.sort,
            descending=not arguments.ascending,
            limit=arguments.limit,
        )
    except TimeError as error:
        raise CliError(what=str(error), exit_code=EXIT_USAGE) from None
    if problems := query.validate():
        raise CliError(what="; ".join(problems), exit_code=EXIT_USAGE)
    return query


def nothing_found(query: FetchFilter, source: Backend, now_unix_ns: int) -> str:
    """Describe what was searched.

    The text also counts the hand-offs that fit except for how they ended.
    """
    sought = [text for name, text in _SOUGHT.items() if getattr(query, name)]
    sought += [f"has the outcome {query.outcome}"] if query.outcome is not None else []
    reported_text = described(query, now_unix_ns)
    among = source.fetches(replace(query, failed=None, open=None, outcome=None, limit=MAX_LIMIT)) if sought else []
    if among:
        more = "more than " if len(among) == MAX_LIMIT else ""
        first = (
            f"None of {more}{counted(len(among), 'hand-off')}{reported_text and f' ({reported_text})'} {' and '.join(sought)}."
        )
        return f"{first} Searched {source.where}.{_unsure(among)}"
    searched = f"No hand-off fits{reported_text and f': {reported_text}'}. Searched {source.where}."
    latest = source.fetches(FetchFilter(limit=1))
    if not latest:
        hint = "hand-offs are told by the plugin in the engines (pip install handrail there, and HANDRAIL_SOCKET)"
        return f"{searched}\nIt holds none at all: {hint}."
    when = format_time(latest[0].started_unix_ns, now_unix_ns)
    return f"{searched}\nThe latest one there began at {when}: try a wider --since, or leave a filter out."


_SOUGHT: Final = {"failed": "failed", "open": "is open"}


def described(query: FetchFilter, now_unix_ns: int) -> str:
    """Describe the filters in words, except those of how it ended."""
    times = {"since": query.since_unix_ns, "until": query.until_unix_ns}
    lines = [f"{name} {format_time(at, now_unix_ns)}" for name, at in times.items() if at is not None]
    lines += [f"{name} {value}" for name in ("direction", "peer") if (value := getattr(query, name)) is not None]
    return ", ".join(lines)


def _unsure(rows: Sequence[FetchRow]) -> str:
    """Describe how many hand-offs have an end that is not known, or not yet."""
    unknown = sum(row.outcome == FetchOutcome.UNKNOWN.value and not row.open for row in rows)
    waiting = sum(row.open for row in rows)
    lines = [f"of {unknown:,} it is not known how they ended"] if unknown else []
    lines += [f"{waiting:,} are still open" if waiting > 1 else "one is still open"] if waiting else []
    return f"\nBut {' and '.join(lines)}." if lines else ""
