"""Show how fast KV moves over each link from P to D, and what slows it.

For each link it shows the rate, the transport (NVLink, PCIe, RDMA, TCP) and the line rate.

Without times: the last hour, or the hour before the latest hand-off where that is older.
The rate is over the time in which a transfer was running.
The transport comes from counters of both hosts and from the engines' logs; without their evidence it is unknown.

examples:
  handrail links
  handrail links --since -15m --peer 10.0.0.7:8000
  handrail links --data /var/lib/handrail --json
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import Final

from handrail.durations import TIME_RULE, TimeError, parse_time
from handrail_cli.client import add_source_flags, row_source
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.sanitize import print_document
from handrail_collector.links.question import DEFAULT_LIMIT, MAX_LIMIT, LinksQuestion

_PIPE_WIDTH: Final = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail links``."""
    add_source_flags(parser)
    parser.add_argument("--since", metavar="TIME", help=f"hand-offs that began at or after: {TIME_RULE}")
    parser.add_argument("--until", metavar="TIME", help="that began before")
    parser.add_argument("--peer", metavar="HOST[:PORT]", help="of either engine, its host, or the side channel's address")
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=DEFAULT_LIMIT,
        help=f"so many links, those that moved most; the others as one line (default {DEFAULT_LIMIT}, at most {MAX_LIMIT})",
    )
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also where no hand-off is known: that is an answer."""
    now_unix_ns = time.time_ns()
    question = links_query(arguments, now_unix_ns)
    from handrail_cli.console import answer_console, waiting

    with closing(row_source(arguments)) as source, waiting(f"asking {source.where}"):
        answer = source.links(question, now_unix_ns)
    if arguments.json:
        print_document(answer)
        return EXIT_OK
    from handrail_cli.render.links import render_links
    from handrail_cli.sanitize import cleaned

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(render_links(cleaned(answer), console.width, now_unix_ns))
    return EXIT_OK


def links_query(arguments: argparse.Namespace, now_unix_ns: int) -> LinksQuestion:
    """Return the question that the flags describe.

    Raises ``CliError``.
    """
    try:
        question = LinksQuestion(
            since_unix_ns=None if arguments.since is None else parse_time(arguments.since, now_unix_ns),
            until_unix_ns=None if arguments.until is None else parse_time(arguments.until, now_unix_ns),
            peer=arguments.peer,
            limit=arguments.limit,
        )
    except TimeError as error:
        raise CliError(what=str(error), exit_code=EXIT_USAGE) from None
    if problems := question.validate():
        raise CliError(what="; ".join(problems), exit_code=EXIT_USAGE)
    return question
