"""The API over TLS with tokens, and the commands that query it.

The tests cover who gets access, and the messages for those who do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import aiohttp
import pytest

from doubles.memory_store import Kept, MemoryReader
from handrail.config.listeners import AuthConfig, ListenerSecurity, TlsConfig
from handrail.security.tls import client_identity
from handrail.security.tokens import Access
from handrail_cli.client import HttpBackend
from handrail_cli.errors import CliError
from handrail_cli.main import main
from handrail_collector.api.server import ApiServer
from handrail_collector.rows import FetchRow, RequestRow, StallRow
from handrail_collector.store.filters import RequestFilter
from handrail_doctor.gather.collector import ask_collector
from harness.certs import Authority, Files, replace

TOKEN = "0123456789abcdef"
VARIABLES = ("HANDRAIL_API", *(f"HANDRAIL_API_{name}_FILE" for name in ("CA", "CERT", "KEY", "TOKEN")))


class Nothing:
    def rows(self) -> Sequence[RequestRow]:
        return ()

    def fetches(self) -> Sequence[FetchRow]:
        return ()

    def stalls(self) -> Sequence[StallRow]:
        return ()


class Setup:
    """An authority, the server's files, tokens, and a client's files."""

    def __init__(self, folder: Path) -> None:
        self.ca = Authority(folder)
        self.server = self.ca.files("server")
        self.mine: Files = self.ca.files("mine")
        self.token = folder / "tokens"
        replace(self.token, TOKEN.encode())


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return Setup(tmp_path)


@asynccontextmanager
async def api(setup: Setup, *, client_ca: bool = False) -> AsyncIterator[str]:
    tls = TlsConfig(cert_file=setup.server.cert, key_file=setup.server.key, client_ca_file=setup.ca.file if client_ca else None)
    protection = ListenerSecurity(tls, AuthConfig(token_file=setup.token), ())
    server = ApiServer(
        MemoryReader(Kept()),
        Nothing(),
        lambda: {"clocks": []},
        "127.0.0.1",
        0,
        tls=protection.context("api", ask_only=True),
        guard=protection.guard("api", certificates=True),
    )
    await server.start()
    try:
        yield f"https://127.0.0.1:{server.address[1]}"
    finally:
        await server.shutdown()


async def command(*words: str | Path) -> int:
    return await asyncio.to_thread(main, [str(word) for word in words])


async def test_every_path_but_health_wants_a_token(setup: Setup) -> None:
    context = client_identity(setup.ca.file, None, None, use="test").value.context
    async with api(setup) as url, aiohttp.ClientSession() as session:
        for path in ("/", "/metrics", "/api/v1/requests", "/api/v1/status", "/nowhere"):
            async with session.get(url + path, ssl=context) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="handrail"')
                assert (await answer.json())["error"]["what"] == "a token is required: Authorization: Bearer TOKEN"
        for path in ("/healthz", "/readyz"):
            async with session.get(url + path, ssl=context) as answer:
                assert answer.status == 200


async def test_flags_let_a_person_in(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--ca-file", setup.ca.file, "--token-file", setup.token)
    async with api(setup) as url:
        assert await command("requests", "--api", url, *flags, "--json") == 0
        assert capsys.readouterr().out == ""  # no request, one line each
    async with api(setup, client_ca=True) as url:
        mine = ("--cert-file", setup.mine.cert, "--key-file", setup.mine.key)
        assert await command("requests", "--api", url, *flags, *mine, "--json") == 0


async def test_the_environment_does_too(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    values = (setup.ca.file, setup.mine.cert, setup.mine.key, setup.token)
    async with api(setup, client_ca=True) as url:
        for name, value in zip(VARIABLES, (url, *values), strict=True):
            monkeypatch.setenv(name, str(value))
        assert await command("requests", "--json") == 0


async def test_a_refused_client_gets_the_reason_and_the_remedy(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = Authority(setup.token.parent, "stranger").files("theirs")
    ca, token = ("--ca-file", setup.ca.file), ("--token-file", setup.token)

    async def report(url: str, *flags: str | Path) -> tuple[int, str]:
        code = await command("requests", "--api", url, *flags)
        return code, capsys.readouterr().err

    async with api(setup) as url:
        code, output = await report(url, *ca)
        assert code == 1
        assert "a token is required" in output
        assert "--token-file FILE (or HANDRAIL_API_TOKEN_FILE)" in output
        code, output = await report(url, *token)
        assert code == 1
        assert "the certificate of the collector is not trusted" in output
        assert "--ca-file FILE (or HANDRAIL_API_CA_FILE)" in output
        code, output = await report(url.replace("https", "http"), *token)
        assert code == 1
        assert "https:// if the collector uses TLS" in output
        code, output = await report(url, *ca, "--token-file", setup.token.parent / "none")
        assert code == 2
        assert "--token-file: " in output
        assert "No such file" in output
        code, output = await report(url, *ca, "--cert-file", setup.mine.cert)
        assert code == 2
        assert "--cert-file and --key-file need each other" in output
    async with api(setup, client_ca=True) as url:
        code, output = await report(url, *ca, *token)
        assert code == 1
        assert "a client certificate is required" in output
        assert "--cert-file FILE and --key-file FILE" in output
        code, output = await report(url, *ca, *token, "--cert-file", stranger.cert, "--key-file", stranger.key)
        assert code == 1
        assert "does not accept the client certificate" in output
        assert "--cert-file FILE and --key-file FILE" in output


async def test_the_doctor_is_let_in(setup: Setup) -> None:
    context = client_identity(setup.ca.file, None, None, use="test").value.context
    async with api(setup) as url:
        _, traffic, why = await ask_collector(url, 5.0, Access(context, {"Authorization": f"Bearer {TOKEN}"}))
        assert "knows no clock offset between two hosts" in why
        _, traffic, why = await ask_collector(url, 5.0, Access(context))
        assert traffic is None
        assert "HTTP 401" in why


def test_a_token_is_for_nobody_else(tmp_path: Path) -> None:
    """A redirect is not followed: it would send the token to another host."""
    seen: list[str | None] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(302)
            self.send_header("Location", "/stolen")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            source = HttpBackend(f"http://127.0.0.1:{server.server_address[1]}", Access(None, {"Authorization": "Bearer x"}))
            with pytest.raises(CliError, match="HTTP 302"):
                source.requests(RequestFilter())
        finally:
            server.shutdown()
            thread.join()
    assert seen == ["Bearer x"]
