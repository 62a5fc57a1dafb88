"""Simulate a fleet in virtual time, then stitch, explain and store its records.

Serves ``handrail demo --scenario``. It uses no sockets and does not wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from handrail.durations import TIME_RULE, TimeError, format_duration, format_time, parse_time
from handrail.runtime.process import freeze_gc
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.formatting import counted
from handrail_cli.render.phases import main_id
from handrail_collector.batch import STORE, publish, publish_samples, rows_of
from handrail_collector.rows import ClockPairRow, FetchRow, RequestRow, StallRow
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.publish import StoreLockedError
from handrail_sim.emulator import faults, scenario, virtual_run
from handrail_sim.emulator.faults import Fault, FaultError
from handrail_sim.emulator.scenario import Scenario, ScenarioError
from handrail_sim.emulator.simulate import over_ns
from handrail_sim.emulator.virtual_run import SimulationError, VirtualRunSettings
from handrail_sim.virtual.engines import gpu_evidence
from handrail_sim.virtual.links import link_evidence
from handrail_sim.virtual.observers import TimedRecord, arrivals, engine_arrivals

_REQUESTS: Final = 2000
_MOST: Final = 1_000_000
_PROGRESS_EVERY: Final = 500  # records, out of those that are stitched
_ONLY_OVER_SOCKETS: Final = {
    "keep": "--data DIR keeps what is made",
    "concurrency": "the scenario says when requests come; --requests, --trace and --rate change it",
    "profile": "latencies are those of the scenario; for others give a scenario file",
}
"""Flags that need a fleet over sockets, and what to use instead.

``--once`` is not among them, since a run in virtual time ends by itself.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run in virtual time."""
    group = parser.add_argument_group(
        "in virtual time", "a fleet without sockets: thousands of requests in seconds, into a store"
    )
    group.add_argument("--scenario", metavar="NAME", help=f"a file or one of: {', '.join(scenario.bundled())}; needs --data")
    group.add_argument("--data", metavar="DIR", type=Path, help="new or empty folder, for --data of the other commands")
    group.add_argument("--trace", metavar="FILE", type=Path, help="arrivals and lengths: Azure's .csv or Mooncake's .jsonl")
    group.add_argument("--rate", metavar="X", type=_positive, help="2: the trace twice as fast")
    group.add_argument("--plugin", action="store_true", help="the engines have the plugin, and sidecars read links and clocks")
    group.add_argument("--start", metavar="TIME", help=f"when the run began (default: so that it ended just now): {TIME_RULE}")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def check(arguments: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Reject flags that do not go together. Raises ``CliError``."""
    virtually = ("data", "trace", "rate", "start")
    given = [f"--{name}" for name in virtually if getattr(arguments, name) is not None]
    given += ["--plugin"] if arguments.plugin else []
    if arguments.scenario is None and given:
        raise _usage(f"{given[0]} needs --scenario", f"--scenario NAME, one of {', '.join(scenario.bundled())}")
    if arguments.scenario is not None and arguments.data is None:
        raise _usage("--scenario needs --data DIR, where its requests are stored", "--data DIR, a new or an empty folder")
    odd = [(f"--{name}", how) for name, how in _ONLY_OVER_SOCKETS.items() if getattr(arguments, name) != defaults[name]]
    odd += [("--engine vllm", "its engines are emulated; leave one of the two out")] if arguments.engine == "vllm" else []
    if arguments.scenario is not None and odd:
        flag, instead = odd[0]
        raise _usage(f"{flag} is for a fleet over sockets, not for --scenario", instead)


def _usage(what: str, valid: str, nearest: Iterable[str] = ()) -> CliError:
    return CliError(what=what, where="command line", valid=valid, nearest=tuple(nearest), exit_code=EXIT_USAGE)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, stitch and store a run, and print the commands to type next."""
    began = time.monotonic()
    settings = _settings(arguments)
    now_unix_ns = time.time_ns()
    start_unix_ns = _start(arguments.start, now_unix_ns)
    _claim(arguments.data)
    freeze_gc(young=50_000)
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        try:
            done = _store(settings, arguments.data, start_unix_ns, now_unix_ns, progress, plugin=arguments.plugin)
        except BaseException:
            with contextlib.suppress(OSError):  # not empty: part of the run is stored
                (arguments.data / STORE).rmdir()
            raise
    if arguments.json:
        print(json.dumps(_plain(arguments, settings, done, time.monotonic() - began)))
    else:
        _report(arguments, settings, done, now_unix_ns, time.monotonic() - began)
    return EXIT_OK


def _settings(arguments: argparse.Namespace) -> VirtualRunSettings:
    requests = _REQUESTS if arguments.requests is None else arguments.requests
    if not 1 <= requests <= _MOST:
        raise _usage(f"--requests {requests} is not between 1 and {_MOST}", "such as --requests 20000")
    try:
        chosen = scenario.load(arguments.scenario)
    except ScenarioError as error:
        raise _usage(str(error), "a file or a bundled name", get_close_matches(arguments.scenario, scenario.bundled())) from None
    return VirtualRunSettings(
        scenario=chosen,
        requests=requests,
        seed=arguments.seed,
        faults=tuple(_fault(text, chosen) for text in arguments.fault),
        trace=arguments.trace,
        rate=1.0 if arguments.rate is None else arguments.rate,
    )


def _fault(text: str, chosen: Scenario) -> Fault:
    try:
        return faults.parse(text, chosen.hosts())
    except FaultError as error:
        near = get_close_matches(text.partition(":")[0], faults.FAULTS)
        raise _usage(str(error), "--fault NAME:PLACE:SIZE[@FROM-TO] (docs/fleet.md)", near) from None


def _start(text: str | None, now_unix_ns: int) -> int | None:
    if text is None:
        return None
    try:
        return parse_time(text, now_unix_ns)
    except TimeError as error:
        raise _usage(f"--start: {error}", TIME_RULE) from None


def _claim(folder: Path) -> None:
    """Claim an empty folder. Of two runs at once, only one succeeds."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
        if not used:
            try:
                (folder / STORE).mkdir()
            except FileExistsError:  # created between the two checks by another run
                used = True
    except OSError as error:
        raise CliError(what=f"--data: {error.strerror}", where=str(folder), valid="a new or an empty folder") from None
    if used:
        raise CliError(
            what="--data: the folder is not empty", where=str(folder), valid="a new or an empty folder", exit_code=EXIT_USAGE
        )


@dataclass(slots=True)
class _ScenarioCounts:
    """Counts of what passed on its way to the store."""

    outcomes: dict[str, int] = field(default_factory=dict)
    slowest: RequestRow | None = None

    def watch(self, rows: Iterable[RequestRow]) -> Iterator[RequestRow]:
        for row in rows:
            if row.version == 1:
                self.outcomes[row.outcome] = self.outcomes.get(row.outcome, 0) + 1
            if self.slowest is None or (row.ttft_token_ns or 0) > (self.slowest.ttft_token_ns or 0):
                self.slowest = row
            yield row


@dataclass(frozen=True, slots=True)
class _Done:
    started_unix_ns: int
    virtual_ns: int
    rows: int
    seen: _ScenarioCounts


def _store(
    settings: VirtualRunSettings, folder: Path, start_unix_ns: int | None, now_unix_ns: int, progress: Progress, *, plugin: bool
) -> _Done:
    task = progress.add_task("simulating", total=settings.requests)
    try:
        ran = virtual_run.ran(settings, lambda ended: progress.update(task, completed=ended))
    except (SimulationError, OSError) as error:
        raise CliError(what=str(error), where=str(settings.trace or settings.scenario.name)) from None
    flights = ran.flights
    virtual_ns = over_ns(flights)
    started = now_unix_ns - virtual_ns if start_unix_ns is None else start_unix_ns
    progress.update(task, description="writing down what each host saw", completed=settings.requests)
    made: list[TimedRecord[Any]] = []
    made += arrivals(settings.scenario, flights, settings.faults, seed=settings.seed, started_unix_ns=started, plugin=plugin)
    if plugin:
        made += engine_arrivals(settings.scenario, ran, settings.faults, seed=settings.seed, started_unix_ns=started)
        made.sort(key=lambda one: one.received_unix_ns)
    progress.update(task, description="stitching and explaining", total=len(made), completed=0)
    seen = _ScenarioCounts()
    stalls: list[StallRow] = []
    clocks: list[ClockPairRow] = []
    try:
        fetches: list[FetchRow] | None = [] if plugin else None
        rows = publish(
            folder,
            seen.watch(rows_of(_taken(made, progress), fetches=fetches, stalls=stalls, clocks=clocks)),
            fetches,
            stalls,
            clocks,
        )
        if plugin:
            links, facts = link_evidence(settings.scenario, flights, settings.faults, settings.seed, started)
            gpus = gpu_evidence(settings.scenario, ran, settings.faults, started, virtual_ns)
            publish_samples(folder, [*links, *gpus], facts)
    except (StoreLockedError, StoreDamagedError, OSError) as error:
        raise CliError(what=str(error), where=str(folder), valid="a new or an empty folder that nobody else writes to") from None
    return _Done(started, virtual_ns, rows, seen)


def _taken(made: Sequence[TimedRecord[Any]], progress: Progress) -> Iterator[tuple[int, Any]]:
    (task,) = progress.task_ids
    for number, one in enumerate(made):
        if number % _PROGRESS_EVERY == 0:
            progress.update(task, completed=number)
        yield one.received_unix_ns, one.record


def _plain(arguments: argparse.Namespace, settings: VirtualRunSettings, done: _Done, took_s: float) -> dict[str, Any]:
    return {
        "scenario": settings.scenario.name,
        "faults": arguments.fault,
        "seed": settings.seed,
        "requests": settings.requests,
        "rows": done.rows,
        "outcomes": done.seen.outcomes,
        "started_unix_ns": done.started_unix_ns,
        "ended_unix_ns": done.started_unix_ns + done.virtual_ns,
        "data": str(arguments.data),
        "took_s": round(took_s, 3),
    }


def _report(arguments: argparse.Namespace, settings: VirtualRunSettings, done: _Done, now_unix_ns: int, took_s: float) -> None:
    from handrail_cli.main import COMMANDS  # that module imports this one

    console = Console(highlight=False)
    counts = sorted(done.seen.outcomes.items(), key=lambda item: -item[1])
    outcomes = ", ".join(f"{count} {name}" for name, count in counts)
    began, lasted = format_time(done.started_unix_ns, now_unix_ns), format_duration(done.virtual_ns)
    with_faults = f" with {', '.join(arguments.fault)}" if arguments.fault else ", healthy"
    made = f"{counted(settings.requests, 'request')}, seed {settings.seed}"
    console.print(f"[bold]{settings.scenario.name}[/bold]{with_faults}: {made}")
    console.print(f"{lasted} from {began} on, made in {took_s:.1f} s: {outcomes}.")
    console.print("\nLook at it with:")
    program = "handrail" if shutil.which("handrail") else sys.argv[0]
    data, slowest = shlex.quote(str(arguments.data)), done.seen.slowest
    commands = [f"explain --data {data}", f"requests --data {data} --sort ttft"]
    commands += [f"trace {main_id(slowest)} --data {data}"] if slowest is not None else []
    commands += [f"links --data {data}"] if arguments.plugin else []
    commands.append(f"compare {data} OTHER")
    for command in commands:
        if command.partition(" ")[0] in COMMANDS:
            console.print(f"  {program} {command}", soft_wrap=True)
