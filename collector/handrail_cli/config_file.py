"""Read a configuration on the command line and print its problems.

Flags are ``--config FILE`` and one for each key. The problems are printed or raised.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from handrail.config.schema import ConfigError, Problem, add_flags, given_flags, load
from handrail_cli.errors import EXIT_USAGE, CliError

_Config = TypeVar("_Config")


def add_config_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add ``--config``, ``--json`` and a flag for every key of ``cls``."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file (docs/configuration.md); a flag wins over it")
    parser.add_argument("--json", action="store_true", help="write logs and problems as JSON, one object a line")
    add_flags(parser.add_argument_group("configuration"), cls)


def configuration(arguments: argparse.Namespace, cls: type[_Config]) -> _Config:
    """Return the configuration of parsed arguments.

    Raises ``ConfigError``.
    """
    return load(cls, arguments.config, given_flags(vars(arguments), cls))


def print_problems(error: ConfigError, *, as_json: bool) -> None:
    """Print every problem on standard error."""
    if as_json:
        print(json.dumps({"valid": False, "problems": [asdict(problem) for problem in error.problems]}), file=sys.stderr)
    else:
        print(error, file=sys.stderr)


@dataclass(kw_only=True, eq=False)
class InvalidFileError(CliError):
    """A command cannot answer because a file that it reads is not valid.

    The message has a line for every problem of the file.
    """

    problems: tuple[Problem, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the error with its problems as ``handrail config check --json`` does."""
        fields = super().to_json()
        fields.pop("lines", None)
        return {**fields, "problems": [asdict(problem) for problem in self.problems]}


def invalid_file(error: ConfigError, valid: str) -> InvalidFileError:
    """Return the error for an invalid file; ``valid``: what to do about it."""
    first, *lines = str(error).splitlines()
    return InvalidFileError(
        what=first,
        lines=tuple(line.removeprefix("  ") for line in lines),
        valid=valid,
        exit_code=EXIT_USAGE,
        problems=error.problems,
    )
