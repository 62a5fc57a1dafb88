"""List KV fetches: the newest first, or by age, time or bytes.

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

from handrail.durations import format_time
from handrail.kv_outcomes import FetchOutcome
from handrail.printable import printable_lines
from handrail_cli.client import Backend, add_source_flags, row_source
from handrail_cli.errors import EXIT_OK
from handrail_cli.formatting import counted
from handrail_cli.sanitize import cleaned, print_document
from handrail_cli.time_flags import add_limit_flag, add_period_flags, query_of
from handrail_collector.rows import FetchRow
from handrail_collector.store.filters import DEFAULT_LIMIT, DIRECTIONS, FETCH_SORTS, MAX_LIMIT, OUTCOMES, FetchFilter

_PIPE_WIDTH: Final = 220  # another program reads it, so no column is left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail fetches``."""
    add_source_flags(parser)
    add_period_flags(parser, "KV fetches that began")
    sorts = tuple(FETCH_SORTS)
    parser.add_argument(
        "--sort",
        metavar="NAME",
        choices=sorts,
        default="started",
        help=f"sort by {', '.join(sorts[:-1])} or {sorts[-1]} (default started)",
    )
    parser.add_argument("--ascending", action="store_true", help="list the smallest or oldest first")
    add_limit_flag(parser, "KV fetches", DEFAULT_LIMIT, MAX_LIMIT)
    parser.add_argument("--outcome", metavar="NAME", choices=OUTCOMES, help=f"how the fetch ended: {', '.join(OUTCOMES)}")
    parser.add_argument("--failed", action="store_true", help="only failed fetches, whatever the outcome")
    parser.add_argument("--open", action="store_true", help="only open fetches; --sort duration lists the oldest first")
    parser.add_argument("--direction", choices=DIRECTIONS, help="p_to_d, or d_to_p: P fetches back the KV of an earlier turn")
    parser.add_argument("--peer", metavar="HOST[:PORT]", help="one of the engines, its host, or its side channel")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also when there are none: an empty list is an answer."""
    now_unix_ns = time.time_ns()
    query = fetch_filter(arguments, now_unix_ns)
    from handrail_cli.console import answer_console, remark, waiting

    with closing(row_source(arguments)) as source:
        with waiting(f"querying {source.where}"):
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
    remark(
        f"{counted(len(rows), 'KV fetch', 'KV fetches')} by {query.sort}{more}. 'handrail trace ID' shows one with its request."
    )
    return EXIT_OK


def fetch_filter(arguments: argparse.Namespace, now_unix_ns: int) -> FetchFilter:
    """Return the filter that the flags describe.

    Raises ``CliError``.
    """
    return query_of(
        FetchFilter,
        arguments,
        now_unix_ns,
        outcome=arguments.outcome,
        failed=True if arguments.failed else None,
        open=True if arguments.open else None,
        direction=arguments.direction,
        peer=arguments.peer,
        sort=arguments.sort,
        descending=not arguments.ascending,
        limit=arguments.limit,
    )


def nothing_found(query: FetchFilter, source: Backend, now_unix_ns: int) -> str:
    """Describe what was searched.

    The text also counts the KV fetches that match except for how they ended.
    """
    sought = [text for name, text in _SOUGHT.items() if getattr(query, name)]
    sought += [f"has the outcome {query.outcome}"] if query.outcome is not None else []
    reported_text = described(query, now_unix_ns)
    among = source.fetches(replace(query, failed=None, open=None, outcome=None, limit=MAX_LIMIT)) if sought else []
    if among:
        more = "more than " if len(among) == MAX_LIMIT else ""
        of = f"{more}{counted(len(among), 'KV fetch', 'KV fetches')}{reported_text and f' ({reported_text})'}"
        return f"None of {of} {' and '.join(sought)}. Searched {source.where}.{_unsure(among)}"
    searched = f"No KV fetch matches{reported_text and f': {reported_text}'}. Searched {source.where}."
    latest = source.fetches(FetchFilter(limit=1))
    if not latest:
        hint = "the plugin in the engines reports KV fetches: pip install handrail there and set HANDRAIL_SOCKET"
        return f"{searched}\nIt holds no KV fetch: {hint}."
    when = format_time(latest[0].started_unix_ns, now_unix_ns)
    return f"{searched}\nThe latest one there began at {when}: try an earlier --since, or fewer filters."


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
    lines = [f"the end of {unknown:,} is unknown"] if unknown else []
    lines += [f"{waiting:,} are still open" if waiting > 1 else "one is still open"] if waiting else []
    return f"\nBut {' and '.join(lines)}." if lines else ""
