"""Parse the arms of a comparison from the command line.

An arm is ``NAME=DIR@FROM..TO,DIR``, a period of one source, or a recorded run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from handrail.durations import PERIOD_RULE, TimeError, parse_period
from handrail_cli.errors import EXIT_USAGE, CliError

ARM_RULE: Final = (
    f"[NAME=]WHAT, where WHAT is a period ({PERIOD_RULE}), a data folder, DIR@FROM..TO, or several of these with commas"
)
LETTERS: Final = "ABC"

_NAMED: Final = re.compile(r"([A-Za-z][\w-]*)=(.+)", re.DOTALL)
_PERIOD: Final = re.compile(r"[^/\\.][^/\\]*\.\..*[^/\\.]", re.DOTALL)


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
    names = [name or _own_name(part) or LETTERS[at] for at, ((name, _), part) in enumerate(zip(named, parts, strict=True))]
    if len(set(names)) < len(names):
        names = [name or LETTERS[at] for at, (name, _) in enumerate(named)]
    if len(set(names)) < len(names):
        raise CliError(what=f"two arms have one name: {', '.join(names)}", valid="names that differ", exit_code=EXIT_USAGE)
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
