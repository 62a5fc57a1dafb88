"""List requests: the newest first, or the slowest.

--sort ranks by TTFT, by total time, by stream gap or by any phase.

examples:
  handrail requests --since -15m --sort ttft
  handrail requests --sort kv_transfer --scope edge --limit 10
  handrail requests --outcome stream_error --since 14:03 --json
  handrail requests --data /var/lib/handrail --sort gap_max
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import Final

from handrail.durations import format_duration, format_time
from handrail.printable import printable_lines
from handrail.records import Outcome
from handrail_cli.client import Backend, add_source_flags, row_source
from handrail_cli.errors import EXIT_OK
from handrail_cli.formatting import counted
from handrail_cli.sanitize import print_document
from handrail_cli.time_flags import add_limit_flag, add_period_flags, duration_ns, query_of
from handrail_collector.store.filters import DEFAULT_LIMIT, MAX_LIMIT, SCOPES, SORTS, RequestFilter

_PIPE_WIDTH: Final = 220  # another program reads it, so no column is left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail requests``."""
    add_source_flags(parser)
    add_period_flags(parser, "requests that started")
    parser.add_argument(
        "--sort",
        metavar="NAME",
        choices=SORTS,
        default="started",
        help=f"sort by {', '.join(SORTS[:-1])} or {SORTS[-1]} (default started)",
    )
    parser.add_argument("--ascending", action="store_true", help="list the smallest or oldest first")
    add_limit_flag(parser, "requests", DEFAULT_LIMIT, MAX_LIMIT)
    parser.add_argument("--scope", choices=SCOPES, help="place where the request was measured")
    parser.add_argument("--outcome", metavar="NAME", choices=[outcome.value for outcome in Outcome], help="how the request ended")
    parser.add_argument("--model", metavar="NAME", help="exact name of the model")
    parser.add_argument("--instance", metavar="HOST:PORT", help="a process on the path")
    parser.add_argument("--min-ttft", metavar="DURATION", help="TTFT of at least this, such as 500ms")
    parser.add_argument("--finding", metavar="KIND", help="requests with this finding, such as wrong_request")
    parser.add_argument("--text", metavar="TEXT", help="text in the ids, model, addresses, error type or findings")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also when there are none: an empty list is an answer."""
    now_unix_ns = time.time_ns()
    query = request_filter(arguments, now_unix_ns)
    from handrail_cli.console import answer_console, remark, waiting
    from handrail_cli.sanitize import cleaned

    with closing(row_source(arguments)) as source:
        with waiting(f"querying {source.where}"):
            rows = source.requests(query)
        if not rows and not arguments.json:
            print(printable_lines(nothing_found(query, source, now_unix_ns)))
    if arguments.json:
        from handrail_collector.api.schema import row_to_json

        for row in rows:
            print_document(row_to_json(row))
    if arguments.json or not rows:
        return EXIT_OK
    from handrail_cli.render.requests import render_requests

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(render_requests(cleaned(rows), console.width, sort=query.sort, now_unix_ns=now_unix_ns))
    more = "; there may be more (--limit)" if len(rows) == query.limit else ""
    remark(f"{counted(len(rows), 'request')} by {query.sort}{more}. 'handrail trace ID' shows one.")
    return EXIT_OK


def request_filter(arguments: argparse.Namespace, now_unix_ns: int) -> RequestFilter:
    """Return the filter that the flags describe.

    Raises ``CliError``.
    """
    return query_of(
        RequestFilter,
        arguments,
        now_unix_ns,
        scope=arguments.scope,
        outcome=arguments.outcome,
        model=arguments.model,
        instance=arguments.instance,
        min_ttft_ns=None if arguments.min_ttft is None else duration_ns("--min-ttft", arguments.min_ttft),
        finding=arguments.finding,
        text=arguments.text,
        sort=arguments.sort,
        descending=not arguments.ascending,
        limit=arguments.limit,
    )


def nothing_found(query: RequestFilter, source: Backend, now_unix_ns: int) -> str:
    """Describe what was searched, and what to try next."""
    searched = f"No request matches: {described(query, now_unix_ns)}. Searched {source.where}."
    latest = source.requests(RequestFilter(limit=1))
    if not latest:
        hint = "check that there is traffic, and that the sidecars send there (handrail sidecar --collector URL)"
        return f"{searched}\nIt holds no request: {hint}."
    when = format_time(latest[0].started_unix_ns, now_unix_ns)
    return f"{searched}\nThe latest request there started at {when}: try an earlier --since, or fewer filters."


def described(query: RequestFilter, now_unix_ns: int) -> str:
    """Describe the filters in words."""
    times = {"since": query.since_unix_ns, "until": query.until_unix_ns}
    lines = [f"{name} {format_time(at, now_unix_ns)}" for name, at in times.items() if at is not None]
    for name in ("scope", "outcome", "model", "instance", "finding", "text"):
        value = getattr(query, name)
        lines += [f"{name} {value}"] if value is not None else []
    lines += [f"TTFT at least {format_duration(query.min_ttft_ns)}"] if query.min_ttft_ns is not None else []
    return ", ".join(lines) or "no filter"
