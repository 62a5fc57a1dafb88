"""A bare relay: copy bytes to one upstream and stamp the first token.

It does nothing else.
The difference between a client's TTFT and a relay's, beside the same engines on the same cores, is what any proxy must show.
Handrail's edge is compared with it.
Run as ``python -m vllm.relay --upstream HOST:PORT --log FILE --ready-file FILE``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import time
from pathlib import Path

from vllm.client import Chunk, read_stream
from vllm.proxy import write_ready

_REQUEST_ID = re.compile(rb"^x-request-id:[ \t]*([^\r\n]+)", re.IGNORECASE | re.MULTILINE)
_READ_BYTES = 1 << 16


class Relay:
    """One connection: upstream bytes go to the client first and are parsed afterwards."""

    def __init__(self, host: str, port: int, log: Path) -> None:
        self._host, self._port, self._log = host, port, log

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        exchanges = _Exchanges(self._log)
        answers = asyncio.create_task(self._answers(upstream_reader, writer, exchanges))
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_READ_BYTES):
                    exchanges.add(time.monotonic_ns(), data)
                    upstream_writer.write(data)
                    await upstream_writer.drain()
        finally:
            answers.cancel()
            exchanges.close()
            upstream_writer.close()
            writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, exchanges: _Exchanges) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                at_ns = time.monotonic_ns()
                writer.write(data)
                exchanges.answered(at_ns, data)
                await writer.drain()


class _Exchanges:
    """The exchanges of one kept-alive connection, one after the other.

    The next request closes the one before.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._began_ns = 0
        self._request_id = ""
        self._chunks: list[Chunk] = []

    def add(self, at_ns: int, data: bytes) -> None:
        if data.startswith((b"POST ", b"GET ")):
            self.close()
            found = _REQUEST_ID.search(data)
            self._began_ns, self._request_id, self._chunks = at_ns, found.group(1).decode() if found else "", []

    def answered(self, at_ns: int, data: bytes) -> None:
        self._chunks.append(Chunk(at_ns - self._began_ns, data))

    def close(self) -> None:
        if self._chunks and self._request_id:
            # the head and the chunk sizes are lines of their own, so they are no events
            line = {"request_id": self._request_id, "ttft_token_ns": read_stream(self._chunks).ttft_token_ns}
            with self._log.open("a") as log:
                log.write(json.dumps(line) + "\n")
        self._chunks = []


def read_log(path: Path) -> dict[str, int]:
    """Return the TTFT by request id, in ns since the request reached the relay."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["request_id"]: line["ttft_token_ns"] for line in lines if line["ttft_token_ns"] is not None}


async def run(upstream: str, log: Path, ready_file: Path) -> None:
    host, _, port = upstream.rpartition(":")
    server = await asyncio.start_server(Relay(host, int(port), log).serve, "127.0.0.1", 0)
    bound_host, bound_port = server.sockets[0].getsockname()[:2]
    write_ready(ready_file, {"proxy": f"{bound_host}:{bound_port}"})
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm.relay")
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(run(options.upstream, options.log, options.ready_file))


if __name__ == "__main__":
    main()
