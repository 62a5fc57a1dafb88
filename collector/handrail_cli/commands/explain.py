"""Explain why the slowest 1 % of a period waited longer than the middle half.

The answer names the phases, hosts, links and outcomes that the slowest have
more of.

The default period is the last hour, or the hour before the latest request if
that is older. A first answer comes at once from the rollups of whole hours. A
terminal shows it until the exact answer has been read from the rows.

examples:
  handrail explain
  handrail explain --since 14:00 --until 15:30 --scope edge
  handrail explain --since -24h --fast
  handrail explain --data /var/lib/handrail --json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from handrail_cli.access import access_flags
from handrail_cli.client import Backend, add_source_flags, row_source
from handrail_cli.errors import EXIT_OK
from handrail_cli.sanitize import print_document
from handrail_cli.time_flags import add_period_flags, query_of
from handrail_collector.explain.period.question import Question
from handrail_collector.store.filters import SCOPES

_PIPE_WIDTH: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail explain``."""
    add_source_flags(parser)
    add_period_flags(parser, "requests that started")
    parser.add_argument(
        "--scope", choices=SCOPES, help="place where the requests were measured (default: each; they are never mixed)"
    )
    parser.add_argument("--model", metavar="NAME", help="exact name of the model")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--fast", action="store_true", help="only the first answer: from rollups, times within 1 %%")
    speed.add_argument("--exact", action="store_true", help="only the exact answer, as in a pipe and in JSON")
    parser.add_argument("--json", action="store_true", help="print the whole answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also when there is nothing to explain: that is an answer."""
    now_unix_ns = time.time_ns()
    question = query_of(Question, arguments, now_unix_ns, scope=arguments.scope, model=arguments.model, fast=arguments.fast)
    with closing(row_source(arguments)) as source:
        if arguments.json:
            print_document(source.explain(question, now_unix_ns))
            return EXIT_OK
        from handrail_cli.console import answer_console, waiting
        from handrail_cli.render.period import next_commands, render, source_flags
        from handrail_cli.sanitize import cleaned

        both = not arguments.fast and not arguments.exact and sys.stdout.isatty()
        if both:
            answer = _first_then_exact(source, question, now_unix_ns)
        else:
            with waiting(f"querying {source.where}"):
                answer = source.explain(question, now_unix_ns)
    answer = cleaned(answer)
    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(render(answer, console.width, now_unix_ns))
    if answer["scopes"]:
        # not through the console: people copy a command, so it must not be wrapped or cut
        print(
            "\nNext",
            *next_commands(answer, (*source_flags(arguments.data, arguments.api), *access_flags(arguments))),
            sep="\n  ",
        )
    return EXIT_OK


def _first_then_exact(source: Backend, question: Question, now_unix_ns: int) -> Mapping[str, Any]:
    """Return the exact answer; show the first answer's sentences meanwhile."""
    from rich.live import Live

    from handrail_cli.console import answer_console, waiting
    from handrail_cli.render.period import render_first
    from handrail_cli.sanitize import cleaned

    with waiting(f"querying {source.where}"):
        first = source.explain(replace(question, fast=True), now_unix_ns)
    if first["exact"]:
        return first
    console = answer_console(in_pipe=_PIPE_WIDTH)
    with Live(render_first(cleaned(first)), console=console, transient=True):
        # the same period, although time passes
        period = replace(question, since_unix_ns=first["since_unix_ns"], until_unix_ns=first["until_unix_ns"])
        return source.explain(period, now_unix_ns)
