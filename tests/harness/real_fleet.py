"""A fleet of processes: emulated engines and router, real sidecars and collector.

They start as a user starts them.
Beside each engine a sidecar taps OTLP, reads the metrics page and the log, receives what the plugin would send and, on request,
has GPUs and ports from doubles at the lowest layer.
An edge sidecar is in front of the router.
``starting`` starts them in the order in which nothing is lost. It waits between its steps without blocking, so that many fleets
can start side by side.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from doubles.sysfs import FakeSysfs
from handrail_cli.subprocesses import HOST, Child, Children, free_ports
from nvml.build import CannotBuild, build
from nvml.child import Double
from nvml.scenario import Scenario

ANY: Final = f"{HOST}:0"
_HANDRAIL: Final = (sys.executable, "-m", "handrail_cli.main")
_FLEET: Final = (sys.executable, "-m", "handrail_sim.emulator")
_TOGETHER: Final = {"OMP_NUM_THREADS": "1", "OTEL_BSP_SCHEDULE_DELAY": "200"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The clients' load.

    ``rate`` requests per second, or ``concurrency`` requests at any time. ``model`` None: the requests name no model.
    """

    rate: float | None = 1.0
    concurrency: int = 1
    requests: int = 4000
    prompt_words: tuple[int, int] = (100, 300)
    answer_tokens: tuple[int, int] = (8, 16)
    timeout_s: float = 120.0
    streaming_share: float = 1.0
    model: str | None = None

    def flags(self, seed: int) -> list[str]:
        pace = ["--concurrency", str(self.concurrency)] if self.rate is None else ["--rate", str(self.rate)]
        sizes = ("--prompt-words", *map(str, self.prompt_words), "--answer-tokens", *map(str, self.answer_tokens))
        more = ("--streaming-share", str(self.streaming_share), "--seed", str(seed), "--timeout", str(self.timeout_s))
        named = [] if self.model is None else ["--model", self.model]
        return ["--requests", str(self.requests), *pace, *more, *sizes, *named]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a fleet.

    ``proxied``: requests go through the engines' sidecars; otherwise these only listen.
    ``spans``: the engines export spans.
    ``apart``: every host reports that it is a host of its own.
    ``gpus``: host to the answers of its NVML, from the start of its sidecar.
    ``behind``: the collector's address as a host's sidecar gets it, by the collector's real address.
    ``router``: a module that runs instead of the fleet's router.
    """

    prefill: int = 1
    decode: int = 1
    scenario: str = "split"
    faults: tuple[str, ...] = ()
    proxied: bool = True
    spans: bool = True
    apart: bool = False
    ports: bool = False
    gpus: Mapping[str, Scenario] = field(default_factory=dict)
    behind: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
    router: str = "handrail_sim.emulator"
    load: Load | None = field(default_factory=Load)
    beside_flags: tuple[str, ...] = ()
    collector_flags: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return (*(f"p{number}" for number in range(self.prefill)), *(f"d{number}" for number in range(self.decode)))


class Fleet:
    """A fleet of processes; run ``starting`` to its end before any other use.

    ``children``: all its processes.
    """

    def __init__(self, name: str, folder: Path, shape: Shape, *, seed: int = 0) -> None:
        folder.mkdir(parents=True)
        self.name = name
        self.shape = shape
        self.children = Children(folder)
        self.began_s: float | None = None  # monotonic: when the faults' times began
        self._folder = folder
        self._seed = seed
        self._began_unix_ns = 0
        self._addresses = dict(zip(shape.hosts, (f"{HOST}:{port}" for port in free_ports(len(shape.hosts))), strict=True))
        self._named: dict[str, Child] = {}

    def __getitem__(self, name: str) -> Child:
        """Return the process of this name.

        Names: ``collector``, ``edge``, ``router``, ``load``, ``engine-d0``, ``sidecar-d0``.
        """
        return self._named[name]

    @property
    def collector_api(self) -> str:
        return self["collector"].addresses["api"]

    @property
    def sidecar_pages(self) -> dict[str, str]:
        """Return the name of each sidecar -> the address of its metrics page."""
        named = ("edge", *(f"sidecar-{host}" for host in self.shape.hosts))
        return {name: self[name].addresses["admin"] for name in named}

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"http://{self['edge'].addresses['proxy']}"

    def host_folder(self, host: str) -> Path:
        return self._folder / host

    def starting(self) -> Iterator[str]:
        """Start the fleet; yield what it waits for, again and again until that is there."""
        shape = self.shape
        ports = ("--otlp-grpc", ANY, "--otlp-http", ANY, "--api", ANY, "--data", str(self._folder / "data"))
        self._run("collector", *_HANDRAIL, "collector", *ports, *shape.collector_flags)
        yield from self._until_ready("collector")
        for host in shape.hosts:
            self._beside(host)
        yield from self._until_ready(*(f"sidecar-{host}" for host in shape.hosts))
        self._began_unix_ns, self.began_s = time.time_ns(), time.monotonic()
        for host in shape.hosts:
            self.start_engine(host)
        workers = {role: [self._worker(host) for host in shape.hosts if host[0] == role[0]] for role in ("prefill", "decode")}
        ends = (part for role, urls in workers.items() for part in (f"--{role}", *urls))
        self._run("router", sys.executable, "-m", shape.router, "router", "--listen", ANY, *ends, *self._shared())
        yield from self._until_ready("router", *(f"engine-{host}" for host in shape.hosts))
        self._sidecar("edge", "edge", self["router"].addresses["http"], "edge", "--listen", ANY, env=self._identity("edge"))
        yield from self._until_ready("edge")
        if shape.load is not None:
            self.start_load(shape.load)

    def start_engine(self, host: str) -> Child:
        """Start an engine; also restart it, once the one before has ended."""
        role, sidecar = "prefill" if host[0] == "p" else "decode", self[f"sidecar-{host}"]
        flags = ["--role", role, "--host", host, "--listen", self._addresses[host], *self._shared()]
        if self.shape.spans:
            flags += ["--otlp-endpoint", f"grpc://{sidecar.addresses['otlp_grpc']}"]
        env = {**_TOGETHER, "HANDRAIL_SOCKET": str(self._folder / f"{host}.sock")}
        return self._run(f"engine-{host}", *_FLEET, "engine", *flags, env=env)

    def start_load(self, load: Load) -> Child:
        faults = [part for fault in self.shape.faults if fault.startswith("client_slow") for part in ("--fault", fault)]
        command = (*_FLEET, "load", "--url", self.url, *load.flags(self._seed), *faults)
        self._named["load"] = self.children.start("load", command, may_end=True)
        return self["load"]

    def end(self, grace_s: float) -> None:
        """End all processes at once: the order no longer matters."""
        self.children.end([list(self._named.values())], grace_s)

    def _beside(self, host: str) -> None:
        folder, shape, address = self.host_folder(host), self.shape, self._addresses[host]
        folder.mkdir()
        env = self._identity(host)
        if host in shape.gpus:
            (library := folder / "nvml").mkdir()
            env |= Double(build(library), folder).environment(shape.gpus[host])
        flags = ["--otlp-grpc", ANY, "--metrics-url", f"http://{address}/metrics"]
        flags += ["--plugin-socket", str(self._folder / f"{host}.sock"), "--log-file", str(self._folder / f"engine-{host}.log")]
        if shape.ports:
            FakeSysfs(folder / "sys").add_port("mlx5_0")
            flags += ["--links-sysfs", str(folder / "sys")]
        else:
            flags += ["--links-sample", "off"]
        if shape.proxied:
            flags += ["--listen", ANY]
        flags += shape.beside_flags
        self._sidecar(f"sidecar-{host}", "prefill" if host[0] == "p" else "decode", address, host, *flags, env=env)

    def _sidecar(self, name: str, role: str, upstream: str, host: str, *flags: str, env: Mapping[str, str]) -> None:
        collector = self["collector"].addresses["otlp_http"]
        if host in self.shape.behind:
            collector = self.shape.behind[host](collector)
        common = ("--role", role, "--instance", upstream, "--collector", f"http://{collector}", "--drain", "1s")
        to = ("--upstream", f"http://{upstream}") if "--listen" in flags else ()
        self._run(name, *_HANDRAIL, "sidecar", *common, *to, *flags, env=env)

    def _identity(self, host: str) -> dict[str, str]:
        return {"OTEL_RESOURCE_ATTRIBUTES": f"host.id={self.name}-{host},host.name={host}"} if self.shape.apart else {}

    def _worker(self, host: str) -> str:
        return f"http://{self[f'sidecar-{host}'].addresses['proxy'] if self.shape.proxied else self._addresses[host]}"

    def _shared(self) -> list[str]:
        began = ("--scenario", self.shape.scenario, "--began-unix-ns", str(self._began_unix_ns))
        return [*began, *(part for fault in self.shape.faults for part in ("--fault", fault))]

    def _run(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> Child:
        ready = self.children.ready_file(name)
        ready.unlink(missing_ok=True)
        child = self.children.start(name, [*command, "--ready-file", str(ready)], env)
        self._named[name] = child
        return child

    def _until_ready(self, *names: str) -> Iterator[str]:
        while not all(self[name].read_ready() for name in names):
            self.children.check()
            yield f"{self.name}: {', '.join(name for name in names if not self[name].addresses)}"


def finish(starting: Iterator[str], timeout_s: float) -> None:
    """Run one start to its end. Raises ``TimeoutError``."""
    until_s = time.monotonic() + timeout_s
    for waits_for in starting:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{waits_for}: not ready within {timeout_s:g} s")
        time.sleep(0.05)


def can_build_gpus(folder: Path) -> str | None:
    """Return None, or why the NVML double is not available here."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        build(folder)
    except CannotBuild as why:
        return str(why)
    return None
