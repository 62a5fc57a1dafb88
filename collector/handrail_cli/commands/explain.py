"""Explain why the slowest 1 % of a period waited longer than the middle half.

The answer names the phases, hosts, links and outcomes that they have more of.

Without times: the last hour, or the hour before the latest request where that is older.
Whole hours are answered at once from their rollups. On a terminal, that first answer shows while the exact one is read from the
rows.

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

from handrail.durations import TIME_RULE, TimeError, parse_time
from handrail_cli.access import access_flags
from handrail_cli.client import Backend, add_source_flags, row_source
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.sanitize import print_document
from handrail_collector.explain.period.question import Question
from handrail_collector.store.filters import SCOPES

_PIPE_WIDTH: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail explain``."""
    add_source_flags(parser)
    parser.add_argument("--since", metavar="TIME", help=f"started at or after: {TIME_RULE}")
    parser.add_argument("--until", metavar="TIME", help="started before")
    parser.add_argument("--scope", choices=SCOPES, help="where it was observed from (default: each, never mixed)")
    parser.add_argument("--model", metavar="NAME", help="the model, exactly")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--fast", action="store_true", help="the first answer alone: from rollups, times within 1 %%")
    speed.add_argument(
        "--exact", action="store_true", help="the exact answer alone (in a pipe and with --json this is so anyway)"
    )
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also when there is nothing to explain: that is an answer."""
    now_unix_ns = time.time_ns()
    question = period_query(arguments, now_unix_ns)
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
            with waiting(f"asking {source.where}"):
                answer = source.explain(question, now_unix_ns)
    answer = cleaned(answer)
    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(render(answer, console.width, now_unix_ns))
    if answer["scopes"]:
        # not through the console: people copy a command, so it must not be wrapped or cut
        print(
            "\nLook further",
            *next_commands(answer, (*source_flags(arguments.data, arguments.api), *access_flags(arguments))),
            sep="\n  ",
        )
    return EXIT_OK


def period_query(arguments: argparse.Namespace, now_unix_ns: int) -> Question:
    """Return the question that the flags describe.

    Raises ``CliError``.
    """
    try:
        question = Question(
            since_unix_ns=None if arguments.since is None else parse_time(arguments.since, now_unix_ns),
            until_unix_ns=None if arguments.until is None else parse_time(arguments.until, now_unix_ns),
            scope=arguments.scope,
            model=arguments.model,
            fast=arguments.fast,
        )
    except TimeError as error:
        raise CliError(what=str(error), exit_code=EXIT_USAGE) from None
    if problems := question.validate():
        raise CliError(what="; ".join(problems), exit_code=EXIT_USAGE)
    return question


def _first_then_exact(source: Backend, question: Question, now_unix_ns: int) -> Mapping[str, Any]:
    """Return the exact answer; show the first answer's sentences meanwhile."""
    from rich.live import Live

    from handrail_cli.console import answer_console, waiting
    from handrail_cli.render.period import render_first
    from handrail_cli.sanitize import cleaned

    with waiting(f"asking {source.where}"):
        first = source.explain(replace(question, fast=True), now_unix_ns)
    if first["exact"]:
        return first
    console = answer_console(in_pipe=_PIPE_WIDTH)
    with Live(render_first(cleaned(first)), console=console, transient=True):
        # the same period, although time passes
        period = replace(question, since_unix_ns=first["since_unix_ns"], until_unix_ns=first["until_unix_ns"])
        return source.explain(period, now_unix_ns)
