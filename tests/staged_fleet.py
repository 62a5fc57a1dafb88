"""A whole fleet with real sidecars, a real collector and a real Prometheus, for what is looked at through Prometheus.

Engines are emulated (``handrail_fleet``): two prefill, two decode, a router, an edge. Beside each engine its sidecar proxies,
taps OTLP, reads its metrics page, hears what its plugin would say, and has GPUs and ports from doubles at the lowest layer (the
NVML double, a folder as sysfs has it).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fake_sysfs import FakeSysfs
from handrail.cli.children import HOST, Child, Children, free_ports
from nvml.build import CannotBuild, build
from nvml.child import Double
from nvml.scenario import Scenario, h100

SCRAPE_S: Final = 2
SCENARIO: Final = "split"
_ANY: Final = f"{HOST}:0"
_HANDRAIL: Final = (sys.executable, "-m", "handrail.cli.main")
_FLEET: Final = (sys.executable, "-m", "handrail_fleet")
_START_S: Final = 90.0
_LOAD: Final = 6000  # more than is sent: the load is ended with the rest
_PORT_BYTES_PER_S: Final = {"p": (6.0e9, 0.4e9), "d": (0.4e9, 6.0e9)}


@dataclass(frozen=True, slots=True)
class Stage:
    """What runs: where Prometheus answers, since when it scrapes, where the collector answers, what the load wrote."""

    prometheus: str
    started_s: float
    api: str
    load: Path

    def ask(self, query: str) -> list[dict[str, Any]]:
        """What an instant query answers now."""
        url = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=10) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return found

    def sent(self) -> list[dict[str, Any]]:
        """Requests that are over, as the load generator saw them."""
        *lines, _ = self.load.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextlib.contextmanager
def staged(folder: Path, faults: Sequence[str] = ()) -> Iterator[Stage]:
    """Runs from here on. Raises ``ChildError`` where a part does not start, ``FileNotFoundError`` without Prometheus."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        raise FileNotFoundError("prometheus")
    children = Children(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(children.end, [], 10.0)
        ports = ("--otlp-grpc", _ANY, "--otlp-http", _ANY, "--api", _ANY)
        soon = ("--flush-interval", "1s", "--decision-engine-wait", "3s")
        collector = _handrail(children, "collector", "collector", *ports, "--data", str(folder / "data"), *soon)
        children.wait_ready([collector], _START_S)
        hosts = {host: f"{HOST}:{port}" for host, port in zip(("p0", "p1", "d0", "d1"), free_ports(4), strict=True)}
        sidecars = {host: _beside(children, folder, host, address, collector) for host, address in hosts.items()}
        children.wait_ready(list(sidecars.values()), _START_S)
        began = str(time.time_ns())
        engines = [_engine(children, folder, host, address, sidecars[host], began, faults) for host, address in hosts.items()]
        proxies = {host: f"http://{sidecars[host].addresses['proxy']}" for host in hosts}
        relay = ("--listen", _ANY, "--prefill", proxies["p0"], proxies["p1"], "--decode", proxies["d0"], proxies["d1"])
        router = _start(children, "router", *_FLEET, "router", *relay, *_shared(began, faults))
        children.wait_ready([router, *engines], _START_S)
        edge = _sidecar(children, "edge", "edge", router.addresses["http"], collector, None)
        children.wait_ready([edge], _START_S)
        address = _prometheus(children, folder, prometheus, [*sidecars.values(), edge], collector)
        started_s = time.time()
        stack.enter_context(_moving_ports(folder, list(hosts)))
        url = f"http://{edge.addresses['proxy']}"
        load = [*_FLEET, "load", "--url", url, "--requests", str(_LOAD), "--rate", "6", "--answer-tokens", "20", "120"]
        sender = children.start("load", [*load, *(part for fault in faults for part in ("--fault", fault))])
        yield Stage(address, started_s, f"http://{collector.addresses['api']}", sender.log)
        children.check()


def _start(children: Children, name: str, *command: str, env: Mapping[str, str] | None = None) -> Child:
    return children.start(name, [*command, "--ready-file", str(children.ready_file(name))], env)


def _handrail(children: Children, command: str, name: str, *flags: str, env: Mapping[str, str] | None = None) -> Child:
    return _start(children, name, *_HANDRAIL, command, *flags, env=env)


def _sidecar(
    children: Children, role: str, name: str, upstream: str, collector: Child, env: Mapping[str, str] | None, *more: str
) -> Child:
    flags = ("--role", role, "--listen", _ANY, "--upstream", f"http://{upstream}", "--instance", upstream)
    to = ("--collector", f"http://{collector.addresses['otlp_http']}", "--drain", "1s")
    return _handrail(children, "sidecar", f"sidecar-{name}", *flags, *to, *more, env=env)


def _gpus(host: str) -> Scenario:
    """Two of a host: compute-bound at P, memory-bound at D; those of d1 get hot, and one of them reports an error."""
    tensor, dram = (71, 24) if host[0] == "p" else (9, 83)
    scenario = h100(2).add(f"gpu * set gpm.5 {tensor}", f"gpu * set gpm.10 {dram}", f"gpu * set gpm.2 {tensor + 15}")
    for number in range(8):
        scenario.add(f"at {number * 15} gpu * set power {380_000 + (number * 97 + ord(host[1]) * 31) % 300 * 1000}")
    if host == "d1":
        scenario.add("at 30 gpu 1 set temperature.0 89", "at 30 gpu 1 set reasons 64", "at 40 gpu 1 xid 31")
    return scenario


def _beside(children: Children, folder: Path, host: str, address: str, collector: Child) -> Child:
    below = folder / host
    below.mkdir()
    ports = FakeSysfs(below / "sys")
    ports.add_port("mlx5_0")
    try:
        (library := below / "nvml").mkdir()
        environment = Double(build(library), below).environment(_gpus(host))
    except CannotBuild:
        environment = None
    more = (
        "--otlp-grpc",
        _ANY,
        "--metrics-url",
        f"http://{address}/metrics",
        "--metrics-interval",
        "1s",
        "--metrics-timeout",
        "900ms",
    )
    seen = ("--plugin-socket", str(folder / f"{host}.sock"), "--links-sysfs", str(below / "sys"), "--kv-hung-after", "10s")
    return _sidecar(children, "prefill" if host[0] == "p" else "decode", host, address, collector, environment, *more, *seen)


def _shared(began: str, faults: Sequence[str]) -> list[str]:
    return ["--scenario", SCENARIO, "--began-unix-ns", began, *(part for fault in faults for part in ("--fault", fault))]


def _engine(
    children: Children, folder: Path, host: str, address: str, sidecar: Child, began: str, faults: Sequence[str]
) -> Child:
    role = "prefill" if host[0] == "p" else "decode"
    flags = ("--role", role, "--host", host, "--listen", address, "--otlp-endpoint", f"grpc://{sidecar.addresses['otlp_grpc']}")
    env = {"OTEL_BSP_SCHEDULE_DELAY": "200", "HANDRAIL_SOCKET": str(folder / f"{host}.sock")}
    return _start(children, f"engine-{host}", *_FLEET, "engine", *flags, *_shared(began, faults), env=env)


def _prometheus(children: Children, folder: Path, program: str, sidecars: Sequence[Child], collector: Child) -> str:
    def scraped(job: str, *addresses: str) -> dict[str, Any]:
        return {"job_name": job, "static_configs": [{"targets": list(addresses), "labels": {"cluster": "demo"}}]}

    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
        "scrape_configs": [
            scraped("handrail-sidecar", *(sidecar.addresses["admin"] for sidecar in sidecars)),
            scraped("handrail-collector", collector.addresses["api"]),
        ],
    }
    (file := folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    (port,) = free_ports(1)
    address = f"{HOST}:{port}"
    where = (f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}")
    children.start("prometheus", [program, *where, "--enable-feature=exemplar-storage"])
    children.wait_for("prometheus is not ready", lambda: _answers(f"http://{address}/-/ready"), _START_S)
    return f"http://{address}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def _moving_ports(folder: Path, hosts: Sequence[str]) -> Iterator[None]:
    """Counters of ports go on: P sends, D receives."""
    stop = threading.Event()
    began = time.monotonic()
    ports = {host: FakeSysfs(folder / host / "sys") for host in hosts}

    def move() -> None:
        while not stop.wait(0.1):
            passed = time.monotonic() - began
            for host, port in ports.items():
                sent, received = _PORT_BYTES_PER_S[host[0]]
                port.move_port(int(sent * passed), int(received * passed))

    thread = threading.Thread(target=move, name="ports")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
