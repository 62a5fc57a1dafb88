"""A real OpenTelemetry collector as its own process: OTLP in, OTLP out.

It is rotel, in Rust, from PyPI.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import subprocess
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.ports import held_port


def binary() -> Path | None:
    """Return the agent inside the installed wheel.

    None where rotel has no wheel for this machine.
    """
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        return None
    agent = Path(found.origin).parent / "rotel-agent"
    return agent if agent.exists() else None


def environment() -> dict[str, str]:
    """Return an environment in which the agent finds libpython.

    The agent is linked against the shared libpython of this interpreter's version, which may lie outside the linker's path.
    """
    return {"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR") or "")}


@functools.cache
def missing() -> str:
    """Return why rotel cannot run here; '' when it can."""
    agent = binary()
    if agent is None:
        return "rotel has no wheel for this machine"
    tried = subprocess.run([str(agent), "--help"], env=environment(), capture_output=True, text=True, timeout=300, check=False)
    return "" if tried.returncode == 0 else f"rotel does not run here: {tried.stderr.strip()[-200:]}"


@dataclass(frozen=True)
class Rotel:
    grpc_port: int
    http_port: int


@asynccontextmanager
async def rotel(folder: Path, export_to: str, protocol: str) -> AsyncIterator[Rotel]:
    """Run rotel exporting to ``export_to`` by ``protocol`` (grpc or http).

    It is ready when it listens, and is stopped by its own pid.
    """
    with held_port() as grpc_port, held_port() as http_port:
        async with _running(folder, export_to, protocol, Rotel(grpc_port, http_port)) as ports:
            yield ports


@asynccontextmanager
async def _running(folder: Path, export_to: str, protocol: str, ports: Rotel) -> AsyncIterator[Rotel]:
    agent = binary()
    assert agent is not None
    log = folder / "rotel.log"
    arguments = {
        "otlp-grpc-endpoint": f"127.0.0.1:{ports.grpc_port}",
        "otlp-http-endpoint": f"127.0.0.1:{ports.http_port}",
        "exporter": "otlp",
        "otlp-exporter-endpoint": export_to,
        "otlp-exporter-protocol": protocol,
        "otlp-exporter-retry-initial-backoff": "100ms",
        "batch-timeout": "50ms",
        "pid-file": str(folder / "rotel.pid"),
        "log-file": str(log),
    }
    with (folder / "rotel.out").open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            str(agent),
            "start",
            *(part for name, value in arguments.items() for part in (f"--{name}", value)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment(),
        )
    try:
        for port in (ports.grpc_port, ports.http_port):
            await _listening(port, process, folder / "rotel.out")
        yield ports
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 60)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()


async def _listening(port: int, process: asyncio.subprocess.Process, out: Path) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        assert process.returncode is None, f"rotel ended; see {out}"
        assert asyncio.get_running_loop().time() < deadline, "rotel does not listen"
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await writer.wait_closed()
            return
        await asyncio.sleep(0.02)
