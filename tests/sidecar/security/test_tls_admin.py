"""The sidecar's admin server over TLS: scrapes need access, health does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from handrail.config.listeners import AuthConfig, ListenerSecurity, TlsConfig
from handrail.metrics.registry import Registry
from handrail.runtime.admin_http import AdminServer
from handrail.security.metrics import security_rows
from handrail.security.tls import client_identity
from handrail.security.tokens import bearer
from harness.certs import Authority, replace

TOKEN = "0123456789abcdef"


@asynccontextmanager
async def admin(protection: ListenerSecurity) -> AsyncIterator[str]:
    guard = protection.guard("admin", certificates=True)
    metrics = Registry(security_rows(protection.watched, protection.guards))
    context = protection.context("admin", ask_only=True)
    server = AdminServer("127.0.0.1", 0, metrics, lambda: "", tls=context, guard=guard)
    await server.start()
    try:
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.address[1]}"
    finally:
        await server.shutdown()


async def get(url: str, ca: Authority, *, certified: bool = False, token: str = "") -> tuple[int, str, str]:
    """Return status, challenge and body."""
    mine = ca.files("scraper")
    shown = (mine.cert, mine.key) if certified else (None, None)
    context = client_identity(ca.file, *shown, use="test").value.context
    headers = {"Authorization": bearer(token)} if token else {}
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context, headers=headers) as answer:
        return answer.status, answer.headers.get("WWW-Authenticate", ""), await answer.text()


def protected(tmp_path: Path, ca: Authority, *, client_ca: bool, plaintext: tuple[str, ...] = ()) -> ListenerSecurity:
    replace(tmp_path / "tokens", TOKEN.encode())
    files = ca.files("server")
    tls = TlsConfig(cert_file=files.cert, key_file=files.key, client_ca_file=ca.file if client_ca else None)
    return ListenerSecurity(tls, AuthConfig(token_file=tmp_path / "tokens"), plaintext)


@pytest.mark.parametrize("client_ca", [False, True])
async def test_only_health_is_open(client_ca: bool, tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with admin(protected(tmp_path, ca, client_ca=client_ca)) as url:
        assert await get(f"{url}/healthz", ca) == (200, "", "ok\n")
        assert await get(f"{url}/readyz", ca) == (200, "", "ok\n")
        status, challenge, page = await get(f"{url}/metrics", ca, certified=client_ca, token=TOKEN)
        assert (status, challenge) == (200, "")
        assert 'handrail_tls_certificate_expiry_timestamp_seconds{use="server"}' in page
        assert 'handrail_auth_refused_requests_total{listener="admin"} 0.0' in page
        assert 'handrail_secret_stale{use="tokens"} 0.0' in page
        assert 'handrail_secret_reloads_total{outcome="taken",use="server"} 0.0' in page
        status, challenge, page = await get(f"{url}/metrics", ca, certified=client_ca)
        assert (status, challenge) == (401, 'Bearer realm="handrail"')
        assert page == "a token is required: Authorization: Bearer TOKEN\n"
        status, challenge, _ = await get(f"{url}/metrics", ca, certified=client_ca, token="wrong-wrong-wrong")
        assert (status, challenge) == (401, 'Bearer realm="handrail", error="invalid_token"')
        if client_ca:
            status, challenge, page = await get(f"{url}/metrics", ca, token=TOKEN)
            assert (status, challenge) == (403, "")
            assert "a client certificate is required" in page
        assert (await get(f"{url}/nothing", ca, certified=client_ca))[0] == 401  # not even which paths exist


async def test_a_certificate_of_a_stranger_is_worse_than_none(tmp_path: Path) -> None:
    ca, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    theirs = stranger.files("theirs")
    async with admin(protected(tmp_path, ca, client_ca=True)) as url:
        context = client_identity(ca.file, theirs.cert, theirs.key, use="test").value.context
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{url}/healthz", ssl=context)


async def test_tokens_without_tls(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with admin(protected(tmp_path, ca, client_ca=True, plaintext=("admin",))) as url:
        assert url.startswith("http://")
        assert (await get(f"{url}/metrics", ca))[0] == 401
        assert (await get(f"{url}/metrics", ca, token=TOKEN))[0] == 200


def test_without_tls_and_tokens_there_is_nothing_to_say() -> None:
    protection = ListenerSecurity(TlsConfig(), AuthConfig(), ())
    protection.guard("admin", certificates=True)
    assert [row.read() for row in security_rows(protection.watched, protection.guards)] == [{}] * 4


async def test_line_that_is_too_long_is_answered_and_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = b"do-not-log-this"
    async with admin(protected(tmp_path, Authority(tmp_path), client_ca=False, plaintext=("admin",))) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /" + secret * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 400 " in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await writer.wait_closed()
    assert [record.getMessage() for record in caplog.records] == []
