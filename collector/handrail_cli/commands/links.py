"""Show how fast KV moves over each link from P to D, and what slows it.

For each link it shows the transfer rate, the transport (NVLink, PCIe, RDMA,
TCP) and the line rate. The transfer rate counts only the time in which a
transfer ran. The transport comes from counters of both hosts and from the
engines' logs; without them it is unknown.

The default period is the last hour, or the hour before the latest KV fetch if
that is older.

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

from handrail_cli.client import add_source_flags, row_source
from handrail_cli.errors import EXIT_OK
from handrail_cli.sanitize import print_document
from handrail_cli.time_flags import add_limit_flag, add_period_flags, query_of
from handrail_collector.links.question import DEFAULT_LIMIT, MAX_LIMIT, LinksQuestion

_PIPE_WIDTH: Final = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail links``."""
    add_source_flags(parser)
    add_period_flags(parser, "KV fetches that began")
    parser.add_argument("--peer", metavar="HOST[:PORT]", help="one of the engines, its host, or its side channel")
    add_limit_flag(parser, "links, those that moved most bytes", DEFAULT_LIMIT, MAX_LIMIT)
    parser.add_argument("--json", action="store_true", help="print the whole answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also where no hand-off is known: that is an answer."""
    now_unix_ns = time.time_ns()
    question = query_of(LinksQuestion, arguments, now_unix_ns, peer=arguments.peer, limit=arguments.limit)
    from handrail_cli.console import answer_console, waiting

    with closing(row_source(arguments)) as source, waiting(f"querying {source.where}"):
        answer = source.links(question, now_unix_ns)
    if arguments.json:
        print_document(answer)
        return EXIT_OK
    from handrail_cli.render.links import render_links
    from handrail_cli.sanitize import cleaned

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(render_links(cleaned(answer), console.width, now_unix_ns))
    return EXIT_OK
