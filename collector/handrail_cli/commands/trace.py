"""Show one request as a waterfall.

It shows where the time went, how certain that is, and how the evidence was
joined.

ID is any id of the request: the client's X-Request-Id, a response id, an
engine's or router's id, a trace id, Handrail's own id, or the first characters
of one (at least six).

examples:
  handrail trace user-42-7
  handrail trace chatcmpl-lab-0002-b6e1c6fd --json
  handrail trace 4bf92f3577b3 --data /var/lib/handrail
"""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Final

from handrail_cli.client import add_source_flags, not_found, row_source
from handrail_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.sanitize import print_document
from handrail_collector.api.schema import candidates_to_json

_PIPE_WIDTH: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail trace``."""
    parser.add_argument("id", metavar="ID", help="any id of the request")
    add_source_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the whole answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 1 when the id is unknown or fits several requests."""
    from handrail_cli.console import answer_console, waiting
    from handrail_cli.render.requests import render_requests
    from handrail_cli.render.waterfall import render_waterfall
    from handrail_cli.sanitize import cleaned

    any_id = arguments.id.strip().rstrip("…")  # the table shortens ids with an ellipsis
    if not any_id:
        raise CliError(what="the ID is empty", valid="any id of a request, or its first 6 characters", exit_code=EXIT_USAGE)
    with closing(row_source(arguments)) as source, waiting(f"querying {source.where}"):
        view = source.find(any_id)
    console = answer_console(in_pipe=_PIPE_WIDTH)
    if view.found is not None:
        if arguments.json:
            print_document(view.found.to_json())
        else:
            console.print(render_waterfall(cleaned(view.found), console.width))
        return EXIT_OK
    if not view.candidates:
        raise not_found(any_id, source.where, view.nearest)
    if arguments.json:
        print_document(candidates_to_json(view.candidates))
        return EXIT_FAILED
    print(f"{len(view.candidates)} requests have the id {any_id!r}; choose one by its request id (first column):\n")
    console.print(render_requests(cleaned(view.candidates), console.width, own_ids=True))
    return EXIT_FAILED
