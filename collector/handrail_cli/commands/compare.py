"""Compare two or three arms: does splitting prefill from decode pay?

The answer says what differs and how certain that is.

An arm is a period (FROM..TO) of the collector or folder that --api or --data
names, a data folder (DIR), or a period of one (DIR@FROM..TO). Several of them
with commas make one arm of several runs, such as one for each request rate.
The first arm is the baseline. An arm whose requests show hand-offs counts as
split.

examples:
  handrail compare -2h..-1h -1h..now
  handrail compare before=14:00..14:30 after=15:00..15:30
  handrail compare plain=runs/plain split=runs/split --ttft 1s --itl 50ms
  handrail compare plain=p-0.4,p-1,p-2 split=s-0.4,s-1,s-2 --gpus 2
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from handrail.durations import PERIOD_RULE, TimeError, parse_period
from handrail_cli.client import HttpBackend, add_source_flags, row_source, store_root
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.sanitize import print_document
from handrail_cli.time_flags import duration_ns
from handrail_collector.compare.report import (
    DEFAULT_ATTAIN,
    DEFAULT_ITL_NS,
    DEFAULT_TTFT_NS,
    ITL_OF,
    Comparison,
    SloTargets,
    to_plain,
)
from handrail_collector.store.filters import SCOPES

if TYPE_CHECKING:
    from handrail_collector.compare.load import StorePeriod

_PIPE_WIDTH: Final = 110
ARM_RULE: Final = (
    f"[NAME=]WHAT, where WHAT is a period ({PERIOD_RULE}), a data folder, DIR@FROM..TO, or several of these with commas"
)
_LETTERS: Final = "ABC"

_NAMED: Final = re.compile(r"([A-Za-z][\w-]*)=(.+)", re.DOTALL)
_PERIOD: Final = re.compile(r"[^/\\.][^/\\]*\.\..*[^/\\.]", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail compare``."""
    parser.add_argument(
        "arms", metavar="ARM", nargs="+", help="two or three of [NAME=]FROM..TO, [NAME=]DIR or [NAME=]DIR@FROM..TO"
    )
    add_source_flags(parser)
    ttft, itl = DEFAULT_TTFT_NS // 10**6, DEFAULT_ITL_NS // 10**6
    parser.add_argument("--ttft", metavar="DURATION", default=f"{ttft}ms", help=f"objective for the TTFT (default {ttft}ms)")
    parser.add_argument(
        "--itl", metavar="DURATION", default=f"{itl}ms", help=f"objective for the gaps of a stream (default {itl}ms)"
    )
    parser.add_argument(
        "--itl-of",
        choices=ITL_OF,
        default=ITL_OF[0],
        help="the figure of a request that --itl limits: p99 of its gaps (default), its largest gap, or its mean time per output "
        "token, as DistServe defines goodput",
    )
    parser.add_argument(
        "--attain",
        metavar="SHARE",
        type=float,
        default=DEFAULT_ATTAIN,
        help=f"share of requests that must meet both objectives (default {DEFAULT_ATTAIN})",
    )
    parser.add_argument(
        "--gpus",
        metavar="N|NAME=N",
        action="append",
        default=[],
        help="number of GPUs of each arm (default: one for each engine)",
    )
    parser.add_argument(
        "--scope", choices=SCOPES, help="place where the requests were measured (default: edge if all arms have it)"
    )
    parser.add_argument("--model", metavar="NAME", help="exact name of the model")
    parser.add_argument("--json", action="store_true", help="print the whole answer as one JSON object")


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
    objectives = SloTargets(
        ttft_ns=duration_ns("--ttft", arguments.ttft),
        itl_ns=duration_ns("--itl", arguments.itl),
        itl_of=arguments.itl_of,
        attain=arguments.attain,
    )
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
        valid = "only folders, or only periods; with --data DIR, periods are of that folder"
        raise CliError(what="a period of a collector cannot be compared with a folder", valid=valid, exit_code=EXIT_USAGE)
    source = row_source(arguments)
    assert isinstance(source, HttpBackend)
    return source.compare(api_parameters(arguments, arms, gpus, objectives))


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
    from handrail_collector.compare.comparison import Arm, CompareError, compare
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
            raise CliError(what="this is neither a folder nor a period", where=part.text, valid=ARM_RULE, exit_code=EXIT_USAGE)
        since, until = part.since_unix_ns, part.until_unix_ns
        where = part.text if part.folder is not None or since is None or until is None else period(since, until)
        found.append(StorePeriod(root=store_root(folder), where=where, since_unix_ns=since, until_unix_ns=until))
    return tuple(found)


# --- arms as typed --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmPart:
    """A period of a source, a whole folder, or a period of a folder.

    ``folder`` None: the source that --api or --data names.
    """

    folder: Path | None
    since_unix_ns: int | None
    until_unix_ns: int | None
    text: str  # as typed


@dataclass(frozen=True, slots=True)
class TypedArm:
    """One arm as typed."""

    name: str
    parts: tuple[ArmPart, ...]


def parse_arms(texts: Sequence[str], now_unix_ns: int) -> list[TypedArm]:
    """Parse two or three arms.

    Raises ``CliError`` for another number of arms, for equal names, and for a text that is no arm.
    """
    if not 2 <= len(texts) <= 3:
        raise CliError(
            what=f"{len(texts)} arm{'s' if len(texts) != 1 else ''} to compare",
            valid=f"two or three, each {ARM_RULE}",
            exit_code=EXIT_USAGE,
        )
    named = [(match[1], match[2]) if (match := _NAMED.fullmatch(text)) else (None, text) for text in texts]
    parts = [tuple(_part(each, now_unix_ns) for each in text.split(",")) for _, text in named]
    names = [name or _own_name(part) or _LETTERS[at] for at, ((name, _), part) in enumerate(zip(named, parts, strict=True))]
    if len(set(names)) < len(names):
        names = [name or _LETTERS[at] for at, (name, _) in enumerate(named)]
    if len(set(names)) < len(names):
        raise CliError(
            what=f"two arms have the same name: {', '.join(names)}", valid="a name of its own for each", exit_code=EXIT_USAGE
        )
    return [TypedArm(*each) for each in zip(names, parts, strict=True)]


def parse_gpus(texts: Sequence[str], names: Sequence[str]) -> Mapping[str, int]:
    """Parse the GPUs of each arm from ``2`` (each) or ``split=4``.

    Raises ``CliError``.
    """
    found: dict[str, int] = {}
    for text in ",".join(texts).split(",") if texts else ():
        name, _, number = text.rpartition("=")
        if not number.isascii() or not number.isdigit() or not int(number) or (name and name not in names):
            valid = f"a number of GPUs, for all arms or as NAME=N with a NAME of {', '.join(names)}"
            raise CliError(what=f"--gpus: {text!r} is not valid", valid=valid, exit_code=EXIT_USAGE)
        found |= {each: int(number) for each in ([name] if name else names)}
    return found


def _own_name(parts: Sequence[ArmPart]) -> str | None:
    """Return the folder's name, where the arm is one folder."""
    return parts[0].folder.resolve().name if len(parts) == 1 and parts[0].folder is not None else None


def _part(text: str, now_unix_ns: int) -> ArmPart:
    folder, separator, period = text.rpartition("@")
    if separator and ".." in period:
        return ArmPart(Path(folder), *_times(period, now_unix_ns), text)
    if _PERIOD.fullmatch(text) and not Path(text).exists():
        return ArmPart(None, *_times(text, now_unix_ns), text)
    if not text.strip():
        raise CliError(what="an arm is empty", valid=ARM_RULE, exit_code=EXIT_USAGE)
    return ArmPart(Path(text), None, None, text)


def _times(text: str, now_unix_ns: int) -> tuple[int, int]:
    try:
        return parse_period(text, now_unix_ns)
    except TimeError as error:
        raise CliError(what=str(error), exit_code=EXIT_USAGE) from None
