"""Start, announce and stop a process of the fleet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from aiohttp import web


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


async def serve(
    app: web.Application, listen: tuple[str, int], ready: Path | None, more: dict[str, str] | None = None, drain_s: float = 1.0
) -> None:
    """Serve ``app`` until SIGTERM or SIGINT, then give running requests ``drain_s``.

    A client that leaves cancels its handler. ``more``: further addresses for the ready file; the app's start-up fills them in.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # set before the ready file exists: the parent may end this process at once
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=drain_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, *listen).start()
        host, port = runner.addresses[0][:2]
        if ready is not None:
            write(ready, {"http": f"{host}:{port}", **(more or {})})
        await stop.wait()
    finally:
        await runner.cleanup()
