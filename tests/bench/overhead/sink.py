"""Receive OTLP and discard it.

The sidecars of the benchmark send here, so that no collector takes part of the cores.
Run as ``python -m bench.overhead.sink --ready-file FILE``.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from aiohttp import web

from vllm.proxy import write_ready


async def _take(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=b"", content_type="application/x-protobuf")


async def _run(ready_file: Path) -> None:
    app = web.Application(client_max_size=1 << 27)
    app.router.add_post("/{path:.*}", _take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    write_ready(ready_file, {"otlp_http": f"{host}:{port}"})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.overhead.sink")
    parser.add_argument("--ready-file", type=Path, required=True)
    asyncio.run(_run(parser.parse_args().ready_file))
