"""Start, stop, kill and query Handrail's processes for the trials.

Each is ended by its own pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from handrail_cli.subprocesses import Child
from harness.acknowledged import until
from harness.ports import held_port

HANDRAIL: Final = (sys.executable, "-m", "handrail_cli.main")
STARTS_S: Final = 60.0
QUICK: Final = (
    *("--flush-interval", "200ms", "--decision-engine-wait", "1s", "--decision-settle", "100ms"),
    *("--store-compact-after", "0s", "--store-upkeep-interval", "1s", "--store-grace", "60s"),
)
"""Settings of a collector that decides and publishes within a second or two."""


@dataclass(slots=True, kw_only=True)
class Running:
    """A process that can be restarted at the same addresses.

    ``before``: words in front of the command.
    """

    name: str
    folder: Path
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    child: Child | None = None
    starts: int = 0

    @property
    def addresses(self) -> dict[str, str]:
        assert self.child is not None
        return self.child.addresses

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    @property
    def status(self) -> int | None:
        """Return its exit status; negative: the signal; None while it runs."""
        assert self.child is not None
        return self.child.poll()

    def launch(self) -> Child:
        """Start it, without waiting until it is ready."""
        ready = self.folder / f"{self.name}.ready.json"
        ready.unlink(missing_ok=True)
        self.starts += 1
        command = (*self.before, *self.command, "--ready-file", str(ready))
        self.child = Child(self.name, command, folder=self.folder, env=self.env)
        return self.child

    async def start(self, timeout_s: float = STARTS_S) -> None:
        """Start it and return when it is ready.

        Raises ``RuntimeError`` when it ends instead, ``TimeoutError`` when it takes too long.
        """
        child = self.launch()

        def ready() -> bool:
            if child.poll() is not None:
                raise RuntimeError(f"{self.name} ended with status {child.poll()}: {self.last_line()}")
            return child.read_ready()

        await until(ready, lambda: f"{self.name} is not ready", timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.child is not None
        if self.child.poll() is None:
            os.kill(self.child.pid, number)

    async def ended(self, timeout_s: float = 60.0) -> int:
        """Wait for its end and return the status. Raises ``TimeoutError``."""
        await until(lambda: not self.alive, lambda: f"{self.name} does not end", timeout_s)
        assert self.status is not None
        return self.status

    async def finish(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM and return its status."""
        self.kill(signal.SIGTERM)
        return await self.ended(timeout_s)

    def end(self) -> None:
        """End it at once, even when it is stopped."""
        if self.child is not None:
            self.kill(signal.SIGKILL)
            self.child.join(10.0)

    def log(self) -> str:
        path = self.folder / f"{self.name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def last_line(self) -> str:
        lines = [line for line in self.log().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no output"

    def tracebacks(self) -> int:
        return self.log().count("Traceback (most recent call last)")

    def descriptors(self) -> int:
        """Return how many descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def collector(
    folder: Path,
    *flags: str,
    data: Path | None = None,
    host: str = "127.0.0.1",
    env: Mapping[str, str] | None = None,
    before: tuple[str, ...] = (),
    quick: Sequence[str] = QUICK,
) -> Iterator[Running]:
    """Prepare a collector that keeps its ports over all its starts; do not start it.

    ``data``: by default ``folder/data``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held_port() as otlp, held_port() as api:
        where = data if data is not None else folder / "data"
        ends = ("--otlp-http", f"{host}:{otlp}", "--otlp-grpc", "off", "--api", f"{host}:{api}")
        command = (*HANDRAIL, "collector", "--data", str(where), *ends, *quick, *flags)
        running = Running(name="collector", folder=folder, command=command, env=env or {}, before=before)
        try:
            yield running
        finally:
            running.end()


@contextlib.contextmanager
def sidecar(
    folder: Path,
    role: str,
    upstream: str,
    collector_url: str,
    *flags: str,
    name: str = "sidecar",
    env: Mapping[str, str] | None = None,
    before: tuple[str, ...] = (),
) -> Iterator[Running]:
    """Prepare an inline proxy that keeps its ports over all its starts.

    It is not started yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held_port() as proxy, held_port() as admin:
        ends = ("--listen", f"127.0.0.1:{proxy}", "--admin", f"127.0.0.1:{admin}", "--upstream", f"http://{upstream}")
        more = ("--collector", collector_url, "--links-sample", "off", "--gpu-sample", "off", "--drain", "2s")
        command = (*HANDRAIL, "sidecar", "--role", role, *ends, *more, *flags)
        running = Running(name=name, folder=folder, command=command, env=env or {}, before=before)
        try:
            yield running
        finally:
            running.end()


def url(running: Running, address: str = "otlp_http") -> str:
    return f"http://{running.addresses[address]}"


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def get(address: str, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """Return status and text of one page; 0 and the reason without an answer."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(f"http://{address}{path}") as response,
        ):
            return response.status, await response.text()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        return 0, f"{type(error).__name__}: {error}"


async def metrics(address: str) -> dict[str, float]:
    """Return every sample of a metrics page, summed over its labels.

    Labelled samples are there too, as ``name{label="value"}``. The result is empty without an answer.
    """
    status, text = await get(address, "/metrics")
    found: dict[str, float] = {}
    if status != 200:
        return found
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
            if sample.labels:
                words = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{words}}}"] = sample.value
    return found


@contextlib.asynccontextmanager
async def standing_still(*running: Running) -> AsyncIterator[None]:
    """Send SIGSTOP, and SIGCONT at the end."""
    for each in running:
        each.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        for each in running:
            each.kill(signal.SIGCONT)


async def pause(seconds: float) -> None:
    """Let a fault last for the given time; wait for nothing else."""
    await asyncio.sleep(seconds)
