"""Show one request as a waterfall: where its time went, how sure that is, and how the evidence was joined.

ID is any id of it: the client's X-Request-Id, a response id, an engine's or router's id, a trace id, a request's own id, or the
first characters of one (six or more).

examples:
  handrail trace user-42-7
  handrail trace chatcmpl-lab-0002-b6e1c6fd --json
  handrail trace 4bf92f3577b3 --data /var/lib/handrail
"""

from __future__ import annotations

import argparse
import json

from handrail.cli.failure import EXIT_FAILED, EXIT_OK
from handrail.cli.rowsource import add_source_flags, not_found, row_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``handrail trace``."""
    parser.add_argument("id", metavar="ID")
    add_source_flags(parser)
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """1 when the id is unknown or fits several requests."""
    from handrail.cli.table import render_requests
    from handrail.cli.terminal import answer_console, answer_width, waiting
    from handrail.cli.waterfall import render_waterfall

    source = row_source(arguments)
    with waiting(f"asking {source.where}"):
        found = source.find(arguments.id.strip().rstrip("…"))  # as the table shortens it
    if found.row is None and not found.candidates:
        raise not_found(arguments.id, source.where, found.nearest)
    if arguments.json:
        print(json.dumps(found.answer, ensure_ascii=False))
        return EXIT_OK if found.row is not None else EXIT_FAILED
    console = answer_console()
    width = answer_width(console)
    if found.row is None:
        print(f"{len(found.candidates)} requests are known by {arguments.id!r}; take one by its request id (first column):\n")
        console.print(render_requests(found.candidates, width, own_ids=True), width=width)
        return EXIT_FAILED
    console.print(render_waterfall(found.row, found.spans, width), width=width)
    return EXIT_OK
