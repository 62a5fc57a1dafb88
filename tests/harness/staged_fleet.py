"""A fleet (``real_fleet``) with GPUs and ports, and a real Prometheus.

It has two prefill and two decode hosts. Prometheus scrapes it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from doubles.sysfs import FakeSysfs
from handrail_cli.subprocesses import HOST, Children, free_ports
from handrail_sim.emulator import scenario as scenarios
from harness.real_fleet import Fleet, Load, Shape, can_build_gpus, finish
from nvml.scenario import Scenario, h100

SCRAPE_S: Final = 2
_START_S: Final = 180.0
_LOAD: Final = Load(
    rate=6.0,
    requests=6000,
    prompt_words=(50, 400),
    answer_tokens=(20, 120),
    streaming_share=0.8,
    model=scenarios.load("split").model,
)
"""A load of more requests than are ever sent: it ends with the fleet.

It names the model as clients do, so that failures are counted under it.
"""

_PORT_BYTES_PER_S: Final = {"p": (6.0e9, 0.4e9), "d": (0.4e9, 6.0e9)}


@dataclass(frozen=True, slots=True)
class Stage:
    """The running stage.

    Holds the address of Prometheus, the start of its scrapes, the collector's address, and what the load wrote.
    """

    prometheus: str
    started_s: float
    api: str
    load: Path

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the current answer to an instant query."""
        url = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=60) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return found

    def sent(self) -> list[dict[str, Any]]:
        """Return the requests that are over, as the load generator saw them."""
        *lines, _ = self.load.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextlib.contextmanager
def staged(folder: Path, faults: Sequence[str] = ()) -> Iterator[Stage]:
    """Run the staged fleet while the context is open.

    Raises ``ChildError`` where a part does not start, ``FileNotFoundError`` without Prometheus.
    """
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        raise FileNotFoundError("prometheus")
    hosts = ("p0", "p1", "d0", "d1")
    shape = Shape(
        prefill=2,
        decode=2,
        faults=tuple(faults),
        ports=True,
        gpus={host: _gpus(host) for host in hosts} if can_build_gpus(folder / "nvml") is None else {},
        beside_flags=("--metrics-interval", "1s", "--metrics-timeout", "900ms", "--kv-hung-after", "10s"),
        collector_flags=("--flush-interval", "1s", "--decision-engine-wait", "3s"),
        load=None,
    )
    fleet = Fleet("fleet", folder / "fleet", shape)
    with contextlib.ExitStack() as stack:
        stack.callback(fleet.children.end, [], 10.0)
        finish(fleet.starting(), _START_S)
        address = _prometheus(fleet.children, folder, prometheus, list(fleet.sidecar_pages.values()), fleet.collector_api)
        started_s = time.time()
        stack.enter_context(_moving_ports(fleet))
        sender = fleet.start_load(_LOAD)
        yield Stage(address, started_s, f"http://{fleet.collector_api}", sender.log)
        fleet.children.check()


def _gpus(host: str) -> Scenario:
    """Build two GPUs per host: compute-bound at P, memory-bound at D.

    Those of d1 get hot, and one of them reports an error.
    """
    tensor, dram = (71, 24) if host[0] == "p" else (9, 83)
    scenario = h100(2).add(f"gpu * set gpm.5 {tensor}", f"gpu * set gpm.10 {dram}", f"gpu * set gpm.2 {tensor + 15}")
    for number in range(8):
        scenario.add(f"at {number * 15} gpu * set power {380_000 + (number * 97 + ord(host[1]) * 31) % 300 * 1000}")
    if host == "d1":
        scenario.add("at 30 gpu 1 set temperature.0 89", "at 30 gpu 1 set reasons 64", "at 40 gpu 1 xid 31")
    return scenario


def _prometheus(children: Children, folder: Path, program: str, sidecars: Sequence[str], collector: str) -> str:
    def scraped(job: str, *addresses: str) -> dict[str, Any]:
        return {"job_name": job, "static_configs": [{"targets": list(addresses), "labels": {"cluster": "demo"}}]}

    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
        "scrape_configs": [
            scraped("handrail-sidecar", *sidecars),
            scraped("handrail-collector", collector),
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
def _moving_ports(fleet: Fleet) -> Iterator[None]:
    """Keep the counters of ports moving: P sends, D receives."""
    stop = threading.Event()
    began = time.monotonic()
    ports = {host: FakeSysfs(fleet.host_folder(host) / "sys") for host in fleet.shape.hosts}

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
