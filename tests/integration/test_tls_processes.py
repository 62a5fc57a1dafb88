"""A sidecar and a collector as processes with TLS on every port.

Certificates and tokens change while requests run.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp

from handrail.security.tls import client_identity
from handrail_cli.subprocesses import Child, Children
from harness.certs import Authority, Files, replace
from harness.proxy import DONE, END, SSE_HEAD, Peer, Upstream, chunk, event

OLD, NEW = "old-token-0123456789", "new-token-0123456789"
WITHIN_S = 180.0
ANSWER = SSE_HEAD + b"".join(chunk(each) for each in (event("a"), event("b", finish="stop"), DONE)) + END


class Setup:
    """Files of both sides, and a client's context that all of them trust."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.collector: Files = self.ca.files("collector")
        self.sidecar: Files = self.ca.files("sidecar")
        mine = self.ca.files("mine")
        self.tokens, self.token = folder / "tokens", folder / "token"
        replace(self.tokens, OLD.encode())
        replace(self.token, OLD.encode())
        self.context: ssl.SSLContext = client_identity(self.ca.file, mine.cert, mine.key, use="test").value.context

    def tls(self, files: Files) -> str:
        return f"tls: {{cert_file: {files.cert}, key_file: {files.key}, client_ca_file: {self.ca.file}}}\n"


@contextmanager
def children(folder: Path) -> Iterator[Children]:
    found = Children(folder)
    try:
        yield found
    finally:
        found.end([], 60.0)


def start(started: Children, name: str, config: str) -> Child:
    file = started.folder / f"{name}.yaml"
    file.write_text(f"{config}ready_file: {started.ready_file(name)}\n")
    command = [sys.executable, "-m", "handrail_cli.main", name, "--config", str(file)]
    child = started.start(name, command, {"PYTHONUNBUFFERED": "1", "HOME": os.environ.get("HOME", "/")})
    started.wait_ready([child], WITHIN_S)
    return child


@asynccontextmanager
async def engine() -> AsyncIterator[Upstream]:
    async def handler(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(ANSWER)

    async with Upstream(handler) as upstream:
        yield upstream


class Asking:
    """Questions to both processes over TLS."""

    def __init__(self, session: aiohttp.ClientSession, setup: Setup, collector: Child, sidecar: Child) -> None:
        self._session, self._setup, self._collector, self._sidecar = session, setup, collector, sidecar
        self.sent = 0

    async def complete(self) -> None:
        """Complete one request through the sidecar's proxy."""
        url = f"https://{self._sidecar.addresses['proxy']}/v1/completions"
        headers = {"X-Request-Id": f"tls-{self.sent:04d}"}
        body = {"model": "m", "stream": True, "prompt": "x"}
        async with self._session.post(url, json=body, headers=headers, ssl=self._setup.context) as answer:
            assert answer.status == 200
            assert b"[DONE]" in await answer.read()
        self.sent += 1

    async def metric(self, child: str, sample: str, token: str) -> float:
        address = self._collector.addresses["api"] if child == "collector" else self._sidecar.addresses["admin"]
        headers = {"Authorization": f"Bearer {token}"}
        async with self._session.get(f"https://{address}/metrics", ssl=self._setup.context, headers=headers) as answer:
            if answer.status == 401:
                return -1.0
            values = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if not line.startswith("#"))
        return float(values.get(sample, "0"))

    async def until(self, child: str, sample: str, token: str, least: float) -> None:
        """Send requests until a condition holds."""
        deadline = time.monotonic() + WITHIN_S
        while await self.metric(child, sample, token) < least:
            assert time.monotonic() < deadline, f"{child}: {sample} below {least} for {WITHIN_S:g} s"
            await self.complete()
            await asyncio.sleep(0.05)

    async def rows_once(self, wanted: set[str], token: str) -> set[str]:
        """Return the rows as soon as all ``wanted`` are there."""
        deadline = time.monotonic() + WITHIN_S
        while (found := await self.rows(token)) != wanted and time.monotonic() < deadline:  # noqa: ASYNC110 - a process's state
            await asyncio.sleep(0.2)
        return found

    async def rows(self, token: str) -> set[str]:
        address = self._collector.addresses["api"]
        headers = {"Authorization": f"Bearer {token}"}
        async with self._session.get(
            f"https://{address}/api/v1/requests?limit=10000", ssl=self._setup.context, headers=headers
        ) as answer:
            assert answer.status == 200
            return {row["client_request_id"] for row in (await answer.json())["requests"]}


def reloads(use: str) -> str:
    return f'handrail_secret_reloads_total{{outcome="taken",use="{use}"}}'


async def test_everything_is_changed_while_requests_run_and_no_request_is_lost(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    with children(tmp_path) as started:
        collector = await asyncio.to_thread(
            start,
            started,
            "collector",
            f"otlp_grpc: 127.0.0.1:0\notlp_http: 127.0.0.1:0\napi: 127.0.0.1:0\ndata: {tmp_path / 'data'}\n"
            f"flush_interval: 200ms\ndecision: {{settle: 100ms, engine_wait: 200ms}}\n"
            f"{setup.tls(setup.collector)}auth: {{token_file: {setup.tokens}}}\n",
        )
        async with engine() as upstream, aiohttp.ClientSession() as session:
            mine = setup.sidecar
            sidecar = await asyncio.to_thread(
                start,
                started,
                "sidecar",
                f"role: edge\nlisten: 127.0.0.1:0\nupstream: http://127.0.0.1:{upstream.port}\nadmin: 127.0.0.1:0\n"
                f"collector: {{endpoint: grpcs://{collector.addresses['otlp_grpc']}, ca_file: {setup.ca.file}, "
                f"cert_file: {mine.cert}, key_file: {mine.key}, token_file: {setup.token}}}\n"
                f"{setup.tls(mine)}auth: {{token_file: {setup.tokens}}}\n",
            )
            ask = Asking(session, setup, collector, sidecar)
            await ask.complete()
            setup.collector.put(setup.ca.leaf())
            setup.sidecar.put(setup.ca.leaf())
            replace(setup.tokens, f"{NEW}\n{OLD}\n".encode())
            for child in ("collector", "sidecar"):
                await ask.until(child, reloads("server"), OLD, 1)
                await ask.until(child, reloads("tokens"), OLD, 1)
            await ask.until("sidecar", reloads("collector"), OLD, 1)
            replace(setup.token, NEW.encode())
            await ask.until("sidecar", reloads("collector_token"), NEW, 1)
            replace(setup.tokens, NEW.encode())
            for child in ("collector", "sidecar"):
                await ask.until(child, reloads("tokens"), NEW, 2)
                assert await ask.metric(child, reloads("tokens"), OLD) == -1.0  # the old token is refused
            await ask.complete()
            sent = {f"tls-{number:04d}" for number in range(ask.sent)}
            assert await ask.rows_once(sent, NEW) == sent
            assert await ask.metric("sidecar", "handrail_sidecar_export_rejected_items_total", NEW) == 0
            assert await ask.metric("sidecar", 'handrail_auth_refused_requests_total{listener="admin"}', NEW) == 1
    logged = (tmp_path / "sidecar.log").read_text() + (tmp_path / "collector.log").read_text()
    assert OLD not in logged
    assert NEW not in logged
    assert "does not accept data" not in logged
    assert "Traceback" not in logged
