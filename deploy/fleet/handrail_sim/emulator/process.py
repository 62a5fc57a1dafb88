"""One process of a fleet over real sockets: clock, start, announcement, stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from handrail_sim.emulator.faults import Active, Fault
from handrail_sim.emulator.observe import HostClock, clock


@dataclass(frozen=True, slots=True)
class RunClock:
    """The clock of one process.

    ``began_ns``: the fleet's start on this process's monotonic clock. ``shows``: its host's clock with its faults.
    """

    began_unix_ns: int
    began_ns: int
    shows: HostClock

    @classmethod
    def of(cls, host: str, faults: Sequence[Fault], began_unix_ns: int | None) -> RunClock:
        """Build the clock; ``began_unix_ns``: None is now."""
        now_unix_ns, now_ns = time.time_ns(), time.monotonic_ns()
        began = now_unix_ns if began_unix_ns is None else began_unix_ns
        return cls(began, now_ns - (now_unix_ns - began), clock(host, faults))

    def active(self, faults: Sequence[Fault]) -> Active:
        """Return the faults with their times on the monotonic clock instead of the run's."""
        return Active(
            replace(
                fault,
                from_ns=fault.from_ns + self.began_ns,
                to_ns=None if fault.to_ns is None else fault.to_ns + self.began_ns,
            )
            for fault in faults
        )

    def run_ns(self, monotonic_ns: int) -> int:
        """Return the true time since the fleet's start."""
        return monotonic_ns - self.began_ns

    def unix_ns(self, true_unix_ns: int) -> int:
        """Return what the host's wall clock shows at that moment."""
        run_ns = true_unix_ns - self.began_unix_ns
        return true_unix_ns + self.shows.offset_ns + self.shows.elapsed_ns(run_ns) - run_ns


def address(text: str) -> tuple[str, int]:
    """Parse ``127.0.0.1:0`` into host and port.

    Raises ``ValueError``, which argparse shows.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def write(path: Path, addresses: dict[str, str]) -> None:
    """Write the addresses for the parent process.

    The write is atomic: the file is either absent or complete.
    """
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps({"pid": os.getpid(), "addresses": addresses}), encoding="utf-8")
    draft.replace(path)


async def serve(app: web.Application, listen: tuple[str, int], ready: Path | None) -> None:
    """Serve ``app`` until SIGTERM or SIGINT, then give running requests a second.

    A client that leaves cancels its handler. ``ready``: the file for the parent process.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # set before the ready file exists: the parent may end this process at once
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, *listen).start()
        host, port = runner.addresses[0][:2]
        if ready is not None:
            write(ready, {"http": f"{host}:{port}"})
        await stop.wait()
    finally:
        await runner.cleanup()
