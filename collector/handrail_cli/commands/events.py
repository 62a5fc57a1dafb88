"""List events of the engines: started, stopped, dead, hung, restarted.

The list also holds the findings that belong to no single request.

examples:
  handrail events --since -1h
  handrail events --instance 10.0.0.7:8000
  handrail events --since 14:00 --until 14:30 --json
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import tzinfo
from typing import TYPE_CHECKING, Final

from handrail.durations import format_duration, format_time
from handrail_cli.client import add_source_flags, row_source
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.formatting import counted
from handrail_cli.sanitize import print_document
from handrail_cli.time_flags import add_limit_flag, add_period_flags, query_of
from handrail_collector.api.events import Happened, HappenedFilter, happened_to_json
from handrail_collector.store.filters import DEFAULT_LIMIT, MAX_LIMIT

if TYPE_CHECKING:
    from rich.console import RenderableType

_PIPE_WIDTH: Final = 220
_WIDE: Final = 110
_BAD: Final = frozenset({"dead", "hung", "transfers_stuck", "unreachable", "plugin_degraded", "plugin_lost"})
_GOOD: Final = frozenset({"recovered", "reachable", "transfers_moving"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail events``."""
    add_source_flags(parser)
    add_period_flags(parser, "events", "the last day")
    parser.add_argument("--instance", metavar="HOST:PORT", help="events of this engine, or between it and a peer")
    add_limit_flag(parser, "events", DEFAULT_LIMIT, MAX_LIMIT)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also when there are none: an empty list is an answer."""
    now_unix_ns = time.time_ns()
    wanted = happened_filter(arguments, now_unix_ns)
    from handrail_cli.console import answer_console, remark, waiting

    with closing(row_source(arguments)) as source:
        with waiting(f"querying {source.where}"):
            found = source.happened(wanted, now_unix_ns)
        where = source.where
    if arguments.json:
        for one in found:
            print_document(happened_to_json(one))
        return EXIT_OK
    if not found:
        print(f"No event of an engine in this period. Searched {where}.")
        print("Events come from the plugin in the engines, from their metrics pages and from their logs.")
        return EXIT_OK
    from handrail_cli.sanitize import cleaned

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(render_events(cleaned(found), console.width, now_unix_ns=now_unix_ns))
    more = "; there may be more (--limit)" if len(found) == wanted.limit else ""
    remark(f"{counted(len(found), 'event')}, newest first{more}.")
    return EXIT_OK


def happened_filter(arguments: argparse.Namespace, now_unix_ns: int) -> HappenedFilter:
    """Return the filter that the flags describe.

    Raises ``CliError``.
    """
    if not 1 <= arguments.limit <= MAX_LIMIT:
        raise CliError(what=f"--limit {arguments.limit}: not from 1 to {MAX_LIMIT}", exit_code=EXIT_USAGE)
    return query_of(HappenedFilter, arguments, now_unix_ns, instance=arguments.instance, limit=arguments.limit)


def render_events(
    found: Sequence[Happened], width: int, *, now_unix_ns: int | None = None, zone: tzinfo | None = None
) -> RenderableType:
    """Draw events and findings in their order.

    Events are of an engine's process. In a narrow terminal, the detail is on a line below.
    """
    from rich.console import Group
    from rich.text import Text

    from handrail_cli.tables import Column, table

    def when(one: Happened) -> Text:
        return Text(format_time(one.at_unix_ns, now_unix_ns, zone), style="dim")

    def kind(one: Happened) -> Text:
        tone = "red" if one.kind in _BAD else "green" if one.kind in _GOOD else "yellow" if one.finding else ""
        return Text(one.kind, style=tone)

    if width >= _WIDE:
        columns = [
            Column[Happened]("time", when),
            Column("engine", _engine),
            Column("event", kind),
            Column("from", lambda one: Text(_of(one), style="dim")),
            Column("detail", _detail),
        ]
        return table(columns, found, width)
    parts = []
    for one in found:
        parts.append(Text.assemble(when(one), f"  {_engine(one)}  ", kind(one), (f"  {_of(one)}", "dim")))
        parts += [Text(f"    {part}") for part in textwrap.wrap(_detail(one), max(20, width - 4))]
    return Group(*parts)


def _engine(one: Happened) -> str:
    return one.instance + (f" → {one.peer_instance}" if one.peer_instance else "")


def _of(one: Happened) -> str:
    process = f"{one.process_kind or 'process'} {one.pid}" if one.pid is not None else ""
    return ", ".join(filter(None, (one.role, process, one.source)))


def _detail(one: Happened) -> str:
    parts = [one.detail, f"{one.count}" if one.count else ""]
    parts.append(f"up to {format_duration(one.at_bound_ns)} before" if one.at_bound_ns >= 10**9 else "")
    return "; ".join(filter(None, parts))
