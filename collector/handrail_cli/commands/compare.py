"""Compare two or three arms: does splitting prefill from decode pay?

The answer says what differs and how certain that is.

An arm is a period of what --api or --data names, a recorded run (a data folder), or a period of one (DIR@FROM..TO).
Several with commas make one arm of several runs, such as one at each request rate.
The first arm is the baseline. Names are free. An arm whose requests show hand-offs counts as split.

examples:
  handrail compare -2h..-1h -1h..now
  handrail compare before=14:00..14:30 after=15:00..15:30 --api http://collector:4380
  handrail compare plain=runs/plain chunked=runs/chunked split=runs/split --ttft 1s --itl 50ms --attain 0.9
  handrail compare plain=p-0.4,p-1,p-2 split=s-0.4,s-1,s-2 --gpus 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from handrail.durations import TimeError, parse_duration_ns
from handrail_cli.client import HttpBackend, add_source_flags, row_source, store_root
from handrail_cli.compare_args import ARM_RULE, TypedArm, parse_arms, parse_gpus
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.sanitize import print_document
from handrail_collector.compare.report import (
    DEFAULT_ATTAIN,
    DEFAULT_ITL_NS,
    DEFAULT_TTFT_NS,
    ITL_OF,
    Comparison,
    SloTargets,
    from_plain,
    to_plain,
)
from handrail_collector.store.filters import SCOPES

if TYPE_CHECKING:
    from handrail_collector.compare.load import StorePeriod

_PIPE_WIDTH: Final = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail compare``."""
    parser.add_argument("arms", metavar="ARM", nargs="+", help="two or three: [NAME=]FROM..TO, [NAME=]DIR or [NAME=]DIR@FROM..TO")
    add_source_flags(parser)
    ttft, itl = DEFAULT_TTFT_NS // 10**6, DEFAULT_ITL_NS // 10**6
    parser.add_argument("--ttft", metavar="DURATION", default=f"{ttft}ms", help=f"objective for TTFT (default {ttft}ms)")
    parser.add_argument("--itl", metavar="DURATION", default=f"{itl}ms", help=f"objective for the gaps (default {itl}ms)")
    parser.add_argument(
        "--itl-of",
        choices=ITL_OF,
        default=ITL_OF[0],
        help="what of a request's gaps --itl is about: their p99 (default), the largest, or the mean time per output token, "
        "as DistServe defines goodput, which is shown in any case",
    )
    parser.add_argument(
        "--attain",
        metavar="SHARE",
        type=float,
        default=DEFAULT_ATTAIN,
        help=f"share of requests that has to meet both (default {DEFAULT_ATTAIN})",
    )
    parser.add_argument(
        "--gpus", metavar="N|NAME=N", action="append", default=[], help="GPUs of each arm (default: engines seen, one GPU each)"
    )
    parser.add_argument(
        "--scope", choices=SCOPES, help="compare only what was observed from there (default: edge where all have it)"
    )
    parser.add_argument("--model", metavar="NAME", help="the model, exactly")
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also for 'cannot tell': that is an answer."""
    from handrail_cli.console import answer_console, waiting
    from handrail_cli.sanitize import cleaned

    objectives = objectives_of(arguments)
    arms = parse_arms(arguments.arms, time.time_ns())
    gpus = parse_gpus(arguments.gpus, [arm.name for arm in arms])
    with waiting(f"comparing {', '.join(arm.name for arm in arms)}"):
        comparison = compared(arguments, arms, gpus, objectives)
    if arguments.json:
        print_document(to_plain(comparison))
        return EXIT_OK
    from handrail_cli.render.comparison import render_comparison

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(render_comparison(cleaned(comparison), console.width))
    return EXIT_OK


def objectives_of(arguments: argparse.Namespace) -> SloTargets:
    """Return the objectives that the flags describe.

    Raises ``CliError``.
    """
    try:
        times = parse_duration_ns(arguments.ttft), parse_duration_ns(arguments.itl)
    except TimeError as error:
        raise CliError(what=str(error), exit_code=EXIT_USAGE) from None
    objectives = SloTargets(ttft_ns=times[0], itl_ns=times[1], itl_of=arguments.itl_of, attain=arguments.attain)
    if problems := objectives.validate():
        raise CliError(what="; ".join(problems), exit_code=EXIT_USAGE)
    return objectives


def compared(
    arguments: argparse.Namespace, arms: Sequence[TypedArm], gpus: Mapping[str, int], objectives: SloTargets
) -> Comparison:
    """Compare in the collector, or here from the folders.

    The collector answers where every arm is a period of what it holds. Raises ``CliError``.
    """
    folders = [part.folder is not None or arguments.data is not None for arm in arms for part in arm.parts]
    if all(folders):
        return _here(arguments, arms, gpus, objectives)
    if any(folders):
        valid = "folders alone, or periods alone; with --data DIR, periods are of that folder"
        raise CliError(what="a period of a collector cannot be set beside a folder", valid=valid, exit_code=EXIT_USAGE)
    source = row_source(arguments)
    assert isinstance(source, HttpBackend)
    try:
        return from_plain(Comparison, source.compare(api_parameters(arguments, arms, gpus, objectives)))
    except ValueError as error:
        raise CliError(what=f"the collector's answer is not understood: {error}", where=source.where) from None


def api_parameters(
    arguments: argparse.Namespace, arms: Sequence[TypedArm], gpus: Mapping[str, int], objectives: SloTargets
) -> dict[str, str]:
    """Return the query of ``GET /api/v1/compare``.

    Times are absolute, so that the collector's clock does not matter.
    """
    query = {
        letter: f"{arm.name}=" + ",".join(f"{part.since_unix_ns}..{part.until_unix_ns}" for part in arm.parts)
        for letter, arm in zip("abc", arms, strict=False)
    }
    query |= {"ttft_ns": str(objectives.ttft_ns), "itl_ns": str(objectives.itl_ns)}
    query |= {"itl_of": objectives.itl_of, "attain": str(objectives.attain)}
    chosen = {"gpus": ",".join(f"{name}={count}" for name, count in gpus.items())}
    chosen |= {"scope": arguments.scope, "model": arguments.model}
    return query | {name: value for name, value in chosen.items() if value}


def _here(arguments: argparse.Namespace, arms: Sequence[TypedArm], gpus: Mapping[str, int], objectives: SloTargets) -> Comparison:
    from handrail_collector.compare.arm import Arm
    from handrail_collector.compare.comparison import CompareError, compare
    from handrail_collector.store.manifest import StoreDamagedError

    made = [Arm(name=arm.name, stretches=_stretches(arm, arguments.data), gpus=gpus.get(arm.name, 0)) for arm in arms]
    try:
        return compare(made, objectives, scope=arguments.scope, model=arguments.model)
    except CompareError as error:
        raise CliError(what=error.what, where=error.where, valid=error.valid) from None
    except StoreDamagedError as error:
        raise CliError(what=str(error)) from None


def _stretches(arm: TypedArm, data: Path | None) -> tuple[StorePeriod, ...]:
    from handrail_collector.compare.formatting import period
    from handrail_collector.compare.load import StorePeriod

    found = []
    for part in arm.parts:
        folder = part.folder if part.folder is not None else data
        assert folder is not None
        if not folder.exists():
            raise CliError(what="no such folder, and no period", where=part.text, valid=ARM_RULE, exit_code=EXIT_USAGE)
        since, until = part.since_unix_ns, part.until_unix_ns
        where = part.text if part.folder is not None or since is None or until is None else period(since, until)
        found.append(StorePeriod(root=store_root(folder), where=where, since_unix_ns=since, until_unix_ns=until))
    return tuple(found)
