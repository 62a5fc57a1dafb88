"""The sidecar's admin server: ready, not ready, and ready but degraded."""

from __future__ import annotations

import aiohttp
import pytest

from handrail.metrics.registry import Registry
from handrail.runtime.admin_http import AdminServer


@pytest.mark.parametrize(
    ("not_ready", "degraded", "answer"),
    [
        ("", "", (200, "ok\n")),
        ("starting", "", (503, "starting\n")),
        ("", "spool /s: Read-only file system", (200, "ok\ndegraded: spool /s: Read-only file system\n")),
        ("stopping", "spool /s: full", (503, "stopping\ndegraded: spool /s: full\n")),
    ],
)
async def test_readyz_says_what_works_worse_and_stays_ready(not_ready: str, degraded: str, answer: tuple[int, str]) -> None:
    server = AdminServer("127.0.0.1", 0, Registry([]), lambda: not_ready, degraded=lambda: degraded)
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.address[1]}/readyz"
        async with aiohttp.ClientSession() as session, session.get(url) as found:
            assert (found.status, await found.text()) == answer
    finally:
        await server.shutdown()
