"""Open more streams at once than a sidecar may have descriptors for.

The streams that the sidecar takes are whole, the others get 503.
As a program this is the upstream alone: ``python streams.py``. It prints ``PORT n`` once it listens, ends every stream when it
reads a line, and ends at the end of its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from handrail.runtime.descriptors import raise_limit
from handrail_cli.subprocesses import Child

WITHIN_S: Final = 300.0
BODY: Final = b'{"model":"m","stream":true,"prompt":"x"}'
REQUEST: Final = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
_CAPPED: Final = 'ulimit -Sn "$1" && ulimit -Hn "$2" && shift 2 && exec "$@"'
_NAMED: Final = re.compile(r"^(handrail_\w+)(?:\{[^}]*\})? (\S+)$", re.M)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(number: int, finish: str | None) -> bytes:
    choice = {"index": 0, "text": f"t{number}", "finish_reason": finish}
    return _chunk(b"data: " + json.dumps({"id": "cmpl-x", "model": "m", "choices": [choice]}).encode() + b"\n\n")


FIRST: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n" + _event(0, None)
)
REST: Final = (
    b"".join(_event(number, None) for number in range(1, 20)) + _event(20, "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
)


# --- the upstream ---------------------------------------------------------------------------------------------------------


class _Stream(asyncio.Protocol):
    """Begins an answer at once and ends it when all streams are to end."""

    waiting: set[_Stream] = set()  # noqa: RUF012 - shared by the whole program
    ending = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._seen = b""

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if self._seen.endswith(BODY):
            self._seen = b""
            self._transport.write(FIRST)
            if _Stream.ending:
                self._transport.write(REST)
            else:
                self.waiting.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.discard(self)

    @classmethod
    def end_all(cls) -> None:
        cls.ending = True
        for each in cls.waiting:
            each._transport.write(REST)
        cls.waiting.clear()


async def _serve() -> None:
    raise_limit()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Stream, "127.0.0.1", 0, backlog=4096)
    print("PORT", server.sockets[0].getsockname()[1], flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        _Stream.end_all()


@contextlib.asynccontextmanager
async def _upstream() -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(Path(__file__)), stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), WITHIN_S)
        yield int(line.split()[1]), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# --- the clients ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Client:
    """One request, from its connection to its end."""

    head: bytes = b""
    body: bytes = b""
    error: str = ""
    decided: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def whole(self) -> bool:
        return self.head + self.body == FIRST + REST

    @property
    def refused(self) -> bool:
        return self.head.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: " in self.head and b'"overloaded"' in self.body

    async def run(self, port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            self.error = f"connect: {error}"
            self.decided.set()
            return
        try:
            writer.write(REQUEST)
            self.head = await reader.readuntil(b"\r\n\r\n")
            if not self.head.startswith(b"HTTP/1.1 200 "):
                self.body = await reader.read(-1)
                return
            self.body = await reader.readuntil(b"\n\n\r\n")
            self.decided.set()
            self.body += await reader.readuntil(b"\r\n0\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError) as error:
            self.error = f"{type(error).__name__} after {len(self.head)} and {len(self.body)} bytes"
        finally:
            self.decided.set()
            writer.transport.abort()


async def _page(address: str, path: str) -> tuple[int, str]:
    """Return status and text; 0 and the reason without an answer."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 60.0)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
            head, _, body = (await asyncio.wait_for(reader.read(-1), 60.0)).partition(b"\r\n\r\n")
        finally:
            writer.transport.abort()
    except (OSError, asyncio.TimeoutError) as error:
        return 0, f"{type(error).__name__}: {error}"
    return int(head.split()[1]), body.decode().strip()


async def _sum(address: str, name: str) -> float:
    _, text = await _page(address, "/metrics")
    return sum(float(found[2]) for found in _NAMED.finditer(text) if found[1] == name)


@contextlib.contextmanager
def _own_limit(least: int) -> Iterator[None]:
    """Set the process to as many descriptors as the clients need.

    Raises ``OSError`` when the hard limit is too low.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if raise_limit().soft < least:
        raise OSError(f"the clients need {least} descriptors: raise the hard limit (ulimit -Hn {least})")
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def _sidecar(folder: Path, upstream_port: int, soft: int, hard: int) -> Iterator[Child]:
    ready = folder / "sidecar.ready.json"
    command = [sys.executable, "-m", "handrail_cli.main", "sidecar", "--role", "edge", "--listen", "127.0.0.1:0"]
    command += ["--upstream", f"http://127.0.0.1:{upstream_port}", "--admin", "127.0.0.1:0", "--collector", "http://127.0.0.1:9"]
    command += ["--drain", "2s", "--ready-file", str(ready)]
    child = Child("sidecar", ["sh", "-c", _CAPPED, "sh", str(soft), str(hard), *command], folder=folder)
    try:
        yield child
    finally:
        child.terminate()
        child.join(30.0)


async def many_streams(count: int, soft: int, hard: int) -> dict[str, Any]:
    """Open ``count`` streams at once through a sidecar with limited descriptors.

    All are decided (begun or refused) before the first may end. Returns what became of them:
    ``whole``: every byte came. ``refused``: 503 with Retry-After. ``others``: other results, by count.
    ``open`` and ``fds``: streams and descriptors of the sidecar then.
    ``ready_during`` and ``ready_after``: status and text of /readyz.
    ``counted``: the metric of refused streams. ``logged``: log lines about them.
    ``later``: whether one more stream was whole afterwards.
    Raises ``OSError`` when this process may not have the descriptors itself.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="handrail-streams-") as folder, _own_limit(count + 200):
        async with _upstream() as (upstream_port, upstream):
            with _sidecar(Path(folder), upstream_port, soft, hard) as child:
                while not child.read_ready():
                    if child.poll() is not None or time.monotonic() - began_s > WITHIN_S:
                        raise OSError(f"the sidecar does not start:\n{child.tail()}")
                    await asyncio.sleep(0.05)
                found = await _through(count, child.addresses, upstream)
                child.terminate()
                await asyncio.to_thread(child.join, 60.0)
                log = child.log.read_text(encoding="utf-8", errors="replace")
    return found | {
        "limit": next(iter(re.findall(r"descriptors \d+ \([^)]*\)", log)), ""),
        "logged": [line for line in log.splitlines() if "refuses streams" in line or "accepts streams again" in line],
        "status": child.poll(),
        "tracebacks": log.count("Traceback"),
        "seconds": round(time.monotonic() - began_s, 1),
    }


async def _through(count: int, addresses: dict[str, str], upstream: asyncio.subprocess.Process) -> dict[str, Any]:
    proxy, admin = int(addresses["proxy"].rpartition(":")[2]), addresses["admin"]
    clients = [_Client() for _ in range(count)]
    running = [asyncio.create_task(each.run(proxy)) for each in clients]
    try:
        await asyncio.wait_for(asyncio.gather(*(each.decided.wait() for each in clients)), WITHIN_S)
        during = await _page(admin, "/readyz")
        open_streams = await _sum(admin, "handrail_sidecar_proxy_streams")
        open_fds = int(await _sum(admin, "handrail_descriptors_open"))
        assert upstream.stdin is not None
        upstream.stdin.write(b"end\n")
        await asyncio.wait_for(asyncio.gather(*running), WITHIN_S)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    after, deadline_s = await _page(admin, "/readyz"), time.monotonic() + 60.0
    while after[0] != 200 and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
        after = await _page(admin, "/readyz")
    later = _Client()
    await asyncio.wait_for(later.run(proxy), WITHIN_S)
    others = [each.error or each.head[:40].decode("latin-1") for each in clients if not each.whole and not each.refused]
    return {
        "count": count,
        "whole": sum(each.whole for each in clients),
        "refused": sum(each.refused for each in clients),
        "others": {text: others.count(text) for text in sorted(set(others))},
        "open": int(open_streams),
        "fds": open_fds,
        "counted": int(await _sum(admin, "handrail_sidecar_proxy_refused_streams_total")),
        "ready_during": list(during),
        "ready_after": list(after),
        "later": later.whole,
    }


if __name__ == "__main__":
    asyncio.run(_serve())
