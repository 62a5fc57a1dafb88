"""Run a small prefill/decode fleet under Handrail and show where the time went.

Every process has a sidecar beside it, and a collector joins their records.

examples:
  handrail demo
    emulated engines; the fleet stays until Ctrl-C
  handrail demo --once --json
    for a script: ends at once, the last line is one JSON object
  handrail demo --fault 'slow_link:p0>d0:8'
    with a fault: shows what Handrail measured beside what truly happened
  handrail demo --engine vllm
    real vLLM engines on this machine's CPUs (from a source checkout)
  handrail demo --scenario split --requests 20000 --data run
    virtual time: no sockets, 20,000 requests in seconds, into a folder
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from handrail_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.formatting import counted
from handrail_cli.subprocesses import HOST, Child, ChildError, Children, free_ports
from handrail_collector.api.schema import RequestAnswer
from handrail_collector.rows import RequestRow
from handrail_sim.demo import faults as demo_faults
from handrail_sim.demo import scenario
from handrail_sim.demo.figures import ClientRequest, DemoSummary, figures, is_joined, slowest_row
from handrail_sim.emulator.faults import Fault

ENGINES: Final = ("emulated", "vllm")
_HANDRAIL: Final = (sys.executable, "-m", "handrail_cli.main")
_FLEET: Final = (sys.executable, "-m", "handrail_sim.emulator")
_ANY_PORT: Final = f"{HOST}:0"
_START_S: Final = 60.0
_VLLM_START_S: Final = 300.0
_END_S: Final = 10.0
_VLLM_END_S: Final = 45.0  # serve_pair.py gives each engine 20 s
_REQUEST_S: Final = 120.0  # the load generator's own limit for one request
_JOIN_S: Final = 60.0
_POLL_API_S: Final = 0.2
_EXIT_TERMINATED: Final = 128 + signal.SIGTERM
_ENGINE_ENV: Final = {"OTEL_BSP_SCHEDULE_DELAY": "200"}  # ms; the SDK's default of 5 s would only make the demo wait
# the engines export often, so the wait for late spans can be short
_SOON: Final = ("--flush-interval", "1s", "--decision-engine-wait", "3s")
_MAX_ROWS: Final = 10_000  # the API's own limit
_REQUESTS: Final = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail demo``."""
    parser.add_argument("--engine", choices=ENGINES, default="emulated", help="emulated (default) or real vLLM on CPUs")
    parser.add_argument(
        "--once", action="store_true", help="end after the result instead of staying until Ctrl-C, as --scenario does"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line, nothing else")
    parser.add_argument("--requests", type=int, metavar="N", help=f"how many to send (default {_REQUESTS}; with --scenario 2000)")
    parser.add_argument("--concurrency", type=_count, default=8, metavar="C", help="how many at the same time (default 8)")
    parser.add_argument("--profile", help="llm-d latencies for the emulated engines: a bundled name or a file")
    parser.add_argument(
        "--fault",
        metavar="NAME:PLACE:SIZE[@FROM-TO]",
        action="append",
        default=[],
        help="such as slow_link:p0>d0:8, seconds of the fleet or the run after @; may come again (docs/fleet.md); "
        "without --scenario the hosts are p0, p1, d0, d1",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the load and of the emulated latencies (default 0)")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="work in DIR (new or empty) and keep logs and data there")
    scenario.add_arguments(parser)
    parser.set_defaults(flag_defaults={action.dest: action.default for action in parser._actions})


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= _MAX_ROWS:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and {_MAX_ROWS}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit code.

    0: every request is answered and joined, and no row contradicts the client. 1: otherwise.
    """
    scenario.check(arguments, arguments.flag_defaults)
    if arguments.scenario is not None:
        return scenario.run(arguments)
    arguments.requests = _REQUESTS if arguments.requests is None else arguments.requests
    if not 1 <= arguments.requests <= _MAX_ROWS:
        what = f"--requests {arguments.requests} is not between 1 and {_MAX_ROWS}"
        raise CliError(what=what, where="command line", valid="more of them in virtual time: --scenario", exit_code=EXIT_USAGE)
    if arguments.profile is not None:
        _check_profile(arguments.profile)
    faults = demo_faults.checked(arguments.fault)
    if faults and arguments.engine == "vllm":
        raise CliError(
            what="--fault is for emulated engines", where="command line", valid="--engine emulated", exit_code=EXIT_USAGE
        )
    if arguments.engine == "vllm":
        _install_vllm()
    progress = Console(stderr=True)
    with _work_folder(arguments.keep) as work, _ended_by_signals() as requested_to_end:
        stage = _Demo(arguments, faults, Children(work.path, requested_to_end), progress)
        try:
            code = stage.run()
            if code == EXIT_FAILED:
                work.keep()
            return code
        except ChildError as error:
            work.keep()
            first, *lines = str(error).splitlines()
            logs = "the folder has the logs of all parts"
            raise CliError(what=first, lines=tuple(lines), where=str(work.path), valid=logs) from None
        except CliError as error:
            work.keep()
            raise replace(error, lines=(*error.lines, f"the logs of all parts: {work.path}")) from None
        except KeyboardInterrupt:
            return EXIT_OK if stage.shown else EXIT_INTERRUPTED
        finally:
            with _uninterrupted():
                stage.end()


def _check_profile(name: str) -> None:
    """Check the profile before any process starts.

    An engine with a bad profile would only fail with the same message later.
    """
    from handrail_sim.emulator.profile import ProfileError, bundled, load

    try:
        load(name)
    except ProfileError as error:
        near = tuple(get_close_matches(name, bundled(), n=3))
        valid = "a file of latencies as llm-d's simulator has them, or a bundled name"
        raise CliError(what=str(error), where="--profile", valid=valid, nearest=near, exit_code=EXIT_USAGE) from None


@dataclass(slots=True)
class _DemoRun:
    path: Path
    kept: bool

    def keep(self) -> None:
        self.kept = True


@contextlib.contextmanager
def _work_folder(chosen: Path | None) -> Iterator[_DemoRun]:
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        if any(chosen.iterdir()):
            what = "--keep: the folder is not empty"
            raise CliError(what=what, where=str(chosen), valid="a new or an empty folder", exit_code=EXIT_USAGE)
    work = _DemoRun(chosen.resolve() if chosen else Path(tempfile.mkdtemp(prefix="handrail-demo-")), kept=chosen is not None)
    try:
        yield work
    finally:
        if not work.kept:
            shutil.rmtree(work.path, ignore_errors=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Turn SIGTERM into an exception, as Ctrl-C is, so that the children are ended.

    Yields a function that raises again for a signal that arrived.
    An exception that a signal raises inside an interpreter callback (``logging`` has some at each fork) is lost.
    The next look at the children then raises it.
    """
    came: list[BaseException] = []

    def end(number: int, frame: FrameType | None) -> NoReturn:
        came.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(_EXIT_TERMINATED))
        raise came[-1]

    def again() -> None:
        if came:
            raise came[-1]

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield again
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore signals while the children are being ended.

    That takes moments and is bounded. A second Ctrl-C must not leave half of them running.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class _Place:
    """The addresses of one engine and of the sidecar in front of it."""

    role: str
    name: str
    port: int
    host: str  # its name in the fleet's scenario

    @property
    def instance(self) -> str:
        return f"{HOST}:{self.port}"


class _Demo:
    """One demo run, from the first child process to the last."""

    def __init__(
        self, arguments: argparse.Namespace, faults: Sequence[tuple[str, Fault]], children: Children, console: Console
    ) -> None:
        self._arguments = arguments
        self._faults = faults
        self._began_unix_ns = time.time_ns()
        self._load_after_ns = 0
        self._children = children
        self._console = console
        self._tag = f"demo-{uuid4().hex[:6]}"
        self._collector: Child | None = None
        self._sidecars: list[Child] = []
        self._engines: list[Child] = []
        self._routers: list[Child] = []
        self._loads: list[Child] = []
        self.shown = False

    def run(self) -> int:
        with self._shown_progress() as progress:
            entrance = self._start(progress, each=1 if self._arguments.engine == "vllm" else 2)
            sent = self._send(progress, entrance)
            rows = self._joined(progress, sent)
        result = figures(sent, rows)
        self._report(result, rows)
        if not (result.good or (self._faults and result.joined == result.requests and not result.wrong)):
            self._complain(result, sent)
            return EXIT_FAILED
        if not self._arguments.once:
            self._stay()
        return EXIT_OK

    def end(self) -> None:
        """End the senders before the receivers, so that the last spans arrive."""
        collector = [self._collector] if self._collector else []
        grace_s = _VLLM_END_S if self._arguments.engine == "vllm" else _END_S
        self._children.end([self._loads, self._routers, self._engines, self._sidecars, collector], grace_s)

    # --- starting -------------------------------------------------------------------------------------------------------

    def _start(self, progress: Progress, each: int) -> str:
        """Start all parts and return the URL that clients use."""
        vllm = self._arguments.engine == "vllm"
        task = progress.add_task("starting the collector", total=None)
        data = str(self._children.folder / "data")
        ports = ("--otlp-grpc", _ANY_PORT, "--otlp-http", _ANY_PORT, "--api", _ANY_PORT)
        self._collector = self._handrail("collector", "collector", *ports, "--data", data, *_SOON)
        self._children.wait_ready([self._collector], _START_S)
        progress.update(task, description="starting sidecars")
        names = [(role, number) for role in ("prefill", "decode") for number in range(each)]
        places = [
            _Place(role, f"{role}-{number + 1}", port, f"{role[0]}{number}")
            for (role, number), port in zip(names, free_ports(len(names)), strict=True)
        ]
        beside = {place.name: self._sidecar(place.role, place.name, place.instance) for place in places}
        self._sidecars += beside.values()
        self._children.wait_ready(self._sidecars, _START_S)
        progress.update(task, description="starting vLLM, which takes about a minute" if vllm else "starting engines")
        self._start_engines(places, beside)
        prefill, decode = (
            [_http(beside[place.name], "proxy") for place in places if place.role == role] for role in ("prefill", "decode")
        )
        relay = ("--listen", _ANY_PORT, "--prefill", *prefill, "--decode", *decode, *self._shared("router"))
        router = self._fleet("router", "router", *relay)
        self._routers.append(router)
        self._children.wait_ready([router], _START_S)
        edge = self._sidecar("edge", "edge", router.addresses["http"])
        self._sidecars.append(edge)
        self._children.wait_ready([edge] if vllm else [edge, *self._engines], _START_S)
        if vllm:
            up = "vLLM did not start"
            self._children.wait_for(up, lambda: all(_healthy(place) for place in places), _VLLM_START_S, poll_s=0.5)
        progress.remove_task(task)
        return _http(edge, "proxy")

    def _start_engines(self, places: Sequence[_Place], beside: dict[str, Child]) -> None:
        taps = {place.name: f"grpc://{beside[place.name].addresses['otlp_grpc']}" for place in places}
        if self._arguments.engine == "vllm":
            command = [sys.executable, str(_test_bed() / "serve_pair.py"), "--logs", str(self._children.folder)]
            for place in places:
                command += [f"--{place.role}-port", str(place.port), f"--{place.role}-otlp", taps[place.name]]
            self._engines.append(self._children.start("vllm", command))
            return
        for number, place in enumerate(places):
            arguments = ["--role", place.role, "--host", place.host, "--listen", place.instance, *self._shared(place.host)]
            arguments += ["--profile", self._arguments.profile] if self._arguments.profile is not None else []
            arguments += ["--seed", str(self._arguments.seed * len(places) + number), "--otlp-endpoint", taps[place.name]]
            self._engines.append(self._fleet(f"engine-{place.name}", "engine", *arguments, env=_ENGINE_ENV))

    def _shared(self, name: str) -> list[str]:
        """Return the arguments that every process of the emulated fleet gets."""
        lines = ["--scenario", demo_faults.SCENARIO, "--began-unix-ns", str(self._began_unix_ns)]
        for text, _ in self._faults:
            lines += ["--fault", text]
        return [*lines, "--truth", str(self._children.folder / f"{name}.truth")] if self._faults else lines

    def _sidecar(self, role: str, name: str, instance: str) -> Child:
        assert self._collector is not None, "the collector is started first"
        tap = () if role == "edge" else ("--otlp-grpc", _ANY_PORT)
        return self._handrail(
            *("sidecar", f"sidecar-{name}", "--role", role),
            *("--listen", _ANY_PORT, "--upstream", f"http://{instance}", "--instance", instance, *tap),
            *("--collector", _http(self._collector, "otlp_http"), "--drain", "2s"),
        )

    def _handrail(self, command: str, name: str, *arguments: str) -> Child:
        ready = ("--ready-file", str(self._children.ready_file(name)))
        return self._children.start(name, [*_HANDRAIL, command, *arguments, *ready])

    def _fleet(self, name: str, *arguments: str, env: dict[str, str] | None = None) -> Child:
        return self._children.start(name, [*_FLEET, *arguments, "--ready-file", str(self._children.ready_file(name))], env)

    # --- running --------------------------------------------------------------------------------------------------------

    def _send(self, progress: Progress, url: str) -> list[ClientRequest]:
        arguments = self._arguments
        task = progress.add_task("sending requests", total=arguments.requests)
        command = [*_FLEET, "load", "--url", url, "--seed", str(arguments.seed), "--id-prefix", self._tag]
        command += ["--requests", str(arguments.requests), "--concurrency", str(arguments.concurrency)]
        command += [part for fault in arguments.fault for part in ("--fault", fault)]
        if arguments.engine == "vllm":
            command += ["--prompt-words", "20", "120"]  # the tiny model takes 2048 tokens, and its words are many
        self._load_after_ns = time.time_ns() - self._began_unix_ns
        load = self._children.start("load", command, may_end=True)
        self._loads.append(load)

        def over() -> bool:
            progress.update(task, completed=len(_lines(load.log)))
            return load.poll() is not None

        rounds = -(-arguments.requests // arguments.concurrency)
        self._children.wait_for("the load did not end", over, rounds * _REQUEST_S)
        self._children.check()
        progress.remove_task(task)
        return [ClientRequest.of(line) for line in _lines(load.log)]

    def _joined(self, progress: Progress, sent: Sequence[ClientRequest]) -> list[RequestRow]:
        """Return the rows of the sent requests as soon as every request is joined.

        When the time is up, returns the rows that there are.
        """
        ours = {each.request_id for each in sent}
        task = progress.add_task("waiting for the collector to join them", total=len(ours))
        rows: list[RequestRow] = []

        def complete() -> bool:
            rows[:] = [row for row in self._rows() if row.client_request_id in ours]
            joined = len({row.client_request_id for row in rows if is_joined(row)})
            progress.update(task, completed=joined)
            return joined == len(ours)

        deadline_s = time.monotonic() + _JOIN_S
        while not complete() and time.monotonic() < deadline_s:
            self._children.check()
            time.sleep(_POLL_API_S)
        progress.remove_task(task)
        return rows

    def _rows(self) -> list[RequestRow]:
        """Return the decided rows only, since a provisional row may still change."""
        from handrail_collector.api.schema import row_from_json

        answer = _get_json(f"{self._api}/api/v1/requests?limit={_MAX_ROWS}")
        return [row_from_json(row) for row in answer["requests"] if not row.get("provisional")]

    @property
    def _api(self) -> str:
        assert self._collector is not None
        return _http(self._collector, "api")

    def _stay(self) -> None:
        try:
            while True:
                self._children.check()
                time.sleep(0.5)
        except KeyboardInterrupt:
            self._console.print("ending the fleet")

    # --- showing --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _shown_progress(self) -> Iterator[Progress]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as progress:
            yield progress

    def _report(self, result: DemoSummary, rows: Sequence[RequestRow]) -> None:
        self.shown = True
        struck = self._struck(rows)
        if self._arguments.json:
            fields = {**asdict(result), "engine": self._arguments.engine, "api": self._api}
            if self._faults:
                fields |= {"load_after_s": self._load_after_ns / 1e9, "faults": [demo_faults.plain(one) for one in struck]}
            print(json.dumps(fields), flush=True)
            return
        from handrail_cli.render.phases import main_id
        from handrail_cli.render.waterfall import render_waterfall

        console = Console()
        slowest = slowest_row(rows)
        if slowest is not None:
            console.print(f"[bold]The slowest of {counted(result.requests, 'request')}[/bold]\n", highlight=False)
            console.print(render_waterfall(self._with_spans(slowest), console.width))
        console.print()
        console.print(_summary(result))
        for one in struck:
            console.print()
            console.print(demo_faults.render(one))
        if struck:
            console.print(Text(demo_faults.caption(self._load_after_ns), style="dim"))
        example = main_id(slowest) if slowest is not None else "ID"
        if not self._arguments.once:
            console.print(f"\nThe collector's API: {self._api}   Try, in another terminal:", highlight=False)
            command = "handrail" if shutil.which("handrail") else sys.argv[0]  # not on PATH in a venv that is not activated
            console.print(f"  {command} requests --api {self._api}", highlight=False, soft_wrap=True)
            console.print(f"  {command} trace {example} --api {self._api}", highlight=False, soft_wrap=True)
            console.print("Ctrl-C ends the fleet.")
        elif self._arguments.keep is not None:
            data = self._children.folder / "data"
            console.print(f"\nKept; look at it with: handrail requests --data {data}", highlight=False, soft_wrap=True)

    def _struck(self, rows: Sequence[RequestRow]) -> list[demo_faults.Struck]:
        if not self._faults:
            return []
        truths = demo_faults.read_truths(self._children.folder, self._loads[0].log, self._began_unix_ns)
        return [demo_faults.struck(text, fault, truths, rows) for text, fault in self._faults]

    def _with_spans(self, row: RequestRow) -> RequestAnswer:
        from handrail_cli.client import HttpBackend

        found = HttpBackend(self._api).find(row.request_id).found
        return RequestAnswer(row=row, spans=found.spans if found is not None else ())

    def _complain(self, result: DemoSummary, sent: Sequence[ClientRequest]) -> None:
        failed = [each for each in sent if each.error is not None]
        parts = []
        if failed:
            first = f"{failed[0].request_id}: {failed[0].error}"
            parts.append(f"{len(failed)} of {counted(result.requests, 'request')} failed (the first is {first})")
        if result.joined < result.requests:
            parts.append(f"only {result.joined} of {result.requests} were joined with both engines within {_JOIN_S:g} s")
        if result.wrong:
            parts.append(f"{result.wrong} rows contradict the client")
        print(f"handrail demo: {'; '.join(parts)}\n  logs: {self._children.folder}", file=sys.stderr)


def _summary(result: DemoSummary) -> Table:
    table = Table(title="All requests", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_row("joined", f"{result.joined} of {result.requests}, {result.wrong} wrongly; coverage {result.coverage:.0%}")
    table.add_row("time to first token", f"p50 {_shown(result.ttft_p50_ms)}, p99 {_shown(result.ttft_p99_ms)} at the edge")
    text = f"p50 {_shown(result.client_ttft_p50_ms)}; median difference {_shown(result.ttft_difference_p50_ms)}"
    table.add_row("the client's own", text)
    if result.unattributed_share is not None:
        table.add_row("unattributed", f"{result.unattributed_share:.1%} of all time to first token")
    for name, value in result.phases_p50_ms.items():
        table.add_row(f"  {name}", f"p50 {_shown(value)}")
    return table


def _shown(value_ms: float | None) -> str:
    return "unknown" if value_ms is None else f"{value_ms:.1f} ms"


def _http(child: Child, name: str) -> str:
    return f"http://{child.addresses[name]}"


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete JSON lines of a child's output.

    A line that is still being written is left for the next call.
    """
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
        return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]
    return []


# Proxy settings of the environment are for the outside world, not for this machine's own ports.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get_json(url: str) -> Any:
    """Fetch JSON from the collector.

    Raises ``ChildError`` when there is no answer: the collector is a child and should be running.
    """
    try:
        with _OPENER.open(url, timeout=30) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ChildError(f"the collector's API does not answer {url}: {error}") from None


def _healthy(place: _Place) -> bool:
    try:
        with _OPENER.open(f"http://{place.instance}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


# --- real engines ---------------------------------------------------------------------------------------------------------


def _test_bed() -> Path:
    """Find the checkout's own scripts for real engines.

    Raises ``CliError`` when Handrail was installed from a wheel.
    """
    folder = Path(__file__).resolve().parents[4] / "tests/vllm"
    if not all((folder / name).is_file() for name in ("install.sh", "serve_pair.py")):
        raise CliError(
            what="--engine vllm needs a source checkout: its scripts for real engines are not part of the wheel",
            where=str(folder),
            valid="git clone the repository and run 'make demo ENGINE=vllm' there, or use --engine emulated",
        )
    return folder


def _install_vllm() -> None:
    """Install vLLM unless it is already installed.

    The script's output goes to standard error. Raises ``CliError`` when it fails.
    """
    script = _test_bed() / "install.sh"
    if subprocess.run(["bash", str(script)], stdout=sys.stderr, check=False).returncode != 0:
        raise CliError(what="vLLM could not be installed", where=str(script), valid="see what the script said, above")
