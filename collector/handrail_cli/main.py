"""Run the command line.

It picks the command, loads only that one, and turns every ending into an exit code.
Importing this module and ``handrail --version`` load the standard library only, so the command answers in the base install too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NoReturn

import handrail
from handrail.config.masking import MASK, shown_value
from handrail.printable import printable
from handrail_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_PIPE, EXIT_USAGE, CliError

PROGRAM: Final = "handrail"
_TIME_FLAGS: Final = frozenset({"--since", "--until", "--start"})
_AGO: Final = re.compile(r"-\d")
_PERIOD_AGO: Final = re.compile(r"-\d[^.]*(\.\d[^.]*)?\.\.")
_COLLECTOR_MODULES: Final = frozenset({"duckdb", "numpy", "pyarrow"})  # not in the sidecar extra


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    ``module``: has ``add_arguments(parser)`` and ``run(args) -> int``.
    ``extra``: the extra that installs what the module imports.
    """

    module: str
    help: str
    extra: str


COMMANDS: Final = {
    "sidecar": Command("handrail_cli.commands.sidecar", "observe one router or engine process", "sidecar"),
    "collector": Command(
        "handrail_cli.commands.collector", "receive spans, join them into requests, explain and store them", "collector"
    ),
    "demo": Command("handrail_sim.demo.command", "run a small fleet and show where its TTFT went", "collector"),
    "requests": Command("handrail_cli.commands.requests", "list requests: the slowest, the failed, by phase", "sidecar"),
    "trace": Command("handrail_cli.commands.trace", "show one request as a waterfall", "sidecar"),
    "fetches": Command("handrail_cli.commands.fetches", "list KV fetches: failed, open, slowest, by peer", "sidecar"),
    "events": Command("handrail_cli.commands.events", "list events of the engines: stopped, dead, hung, restarted", "sidecar"),
    "links": Command(
        "handrail_cli.commands.links",
        "show how fast KV moves between engines, and what slows it",
        "sidecar",
    ),
    "explain": Command("handrail_cli.commands.explain", "show why the slowest requests of a period are slow", "sidecar"),
    "compare": Command("handrail_cli.commands.compare", "compare two or three arms: does splitting pay?", "collector"),
    "metrics": Command(
        "handrail_cli.commands.metrics", "read an engine's metrics page in one schema, and name its gaps", "sidecar"
    ),
    "gpus": Command("handrail_cli.commands.gpus", "show the GPUs of this host, and the counters that they lack", "sidecar"),
    "kv-size": Command("handrail_cli.commands.kv_size", "compute the size of a model's KV, and its time on a link", "sidecar"),
    "doctor": Command("handrail_cli.commands.doctor", "check a prefill/decode pair before traffic", "sidecar"),
    "alerts": Command(
        "handrail_cli.commands.alerts", "check a file of objectives and make Prometheus alert rules from it", "alerts"
    ),
    "dashboards": Command("handrail_cli.commands.dashboards", "write the Grafana dashboards as files", "sidecar"),
    "config": Command("handrail_cli.commands.config", "check a configuration file", "sidecar"),
}


class Parser(argparse.ArgumentParser):
    """Parser that accepts exact flags only.

    It suggests the nearest known name for an unknown one. With ``--json``, errors are JSON too.
    """

    as_json: ClassVar[bool] = False  # of the current command line: argparse itself makes the parsers of sub-commands

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        near = self._nearest(message)
        message = _without_secrets(message)
        if self.as_json:
            valid = f"{self.prog} --help"
            error = CliError(
                what=message, where="command line", valid=valid, nearest=(near,) if near else (), exit_code=EXIT_USAGE
            )
            raise error
        hint = f"; did you mean {near}?" if near else ""
        print(f"{self.prog}: {message}{hint}\nTry '{self.prog} --help'.", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)

    def _nearest(self, message: str) -> str | None:
        from handrail.config.types import nearest

        near = None
        if unknown := re.search(r"unrecognized arguments: (--[^\s=]+)", message):
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            near = nearest(unknown[1], flags)
        elif choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = nearest(choice[1], [each.strip(" '") for each in choice[2].split(",")])
        return near


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (see docs/cli.md)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except SystemExit as end:  # argparse: --help is 0, a usage error 2
        return end.code if isinstance(end.code, int) else EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    finally:
        Parser.as_json = False
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return EXIT_OK if arguments else EXIT_USAGE
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version"):
        print(f"{PROGRAM} {handrail.__version__}")
        return EXIT_OK
    command = COMMANDS.get(name)
    if command is None:
        from handrail.config.types import nearest

        near = nearest(name, COMMANDS)
        hint = f"; did you mean {near}?" if near else ""
        print(
            f"{PROGRAM}: unknown command {name!r}{hint}\nCommands: {', '.join(COMMANDS)}. Try '{PROGRAM} --help'.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        module = importlib.import_module(command.module)
        parser = Parser(
            prog=f"{PROGRAM} {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(parser)
        Parser.as_json = "--json" in rest
        parsed = parser.parse_args(_joined_times(rest))
        return int(module.run(parsed))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in sys.stdlib_module_names or missing.startswith("handrail"):
            raise
        extra = "collector" if missing in _COLLECTOR_MODULES else command.extra
        print(f"{PROGRAM} {name}: needs {missing}, which is not installed: pip install 'handrail[{extra}]'", file=sys.stderr)
        return EXIT_FAILED
    except CliError as error:
        as_json = "--json" in rest
        print(json.dumps({"error": error.to_json()}) if as_json else f"{PROGRAM} {name}: {error}", file=sys.stderr)
        return error.exit_code


def _without_secrets(message: str) -> str:
    """Mask secrets in a message of argparse.

    The message quotes its input: the value of an unknown flag may be a header or a token.
    """
    beginning, unknown, rest = message.partition("unrecognized arguments: ")
    words = rest.split(" ") if unknown else [message]
    shown = []
    flagged = False
    for word in words:
        flag, equals, _ = word.partition("=")
        is_flag = bool(unknown) and word.startswith("-")
        shown.append(f"{flag}={MASK}" if is_flag and equals else MASK if flagged and not is_flag else shown_value(word))
        flagged = is_flag and not equals
    return printable(f"{beginning}{unknown}{' '.join(shown)}")


def _usage() -> str:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        f"usage: {PROGRAM} COMMAND [OPTIONS]\n\n"
        "Show where the time to first token (TTFT) went in disaggregated LLM serving.\n\n"
        f"{listed}\n\n"
        f"'{PROGRAM} COMMAND --help' shows the options of a command.\n'{PROGRAM} --version' shows the version."
    )


def _joined_times(arguments: Sequence[str]) -> list[str]:
    """Join times that begin with a dash to their flag.

    ``--since -15m`` becomes ``--since=-15m``, and ``-2h..-1h`` gets a minus sign.
    Reason: argparse takes a text that begins with a dash for a flag.
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in _TIME_FLAGS and _AGO.match(argument):
            joined[-1] = f"{joined[-1]}={argument}"
        elif _PERIOD_AGO.match(argument):
            joined.append(f"−{argument[1:]}")  # a time may also begin with a minus sign, which begins no flag
        else:
            joined.append(argument)
    return joined


if __name__ == "__main__":
    raise SystemExit(main())
