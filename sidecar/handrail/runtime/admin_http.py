"""HTTP server beside a process's work: ``/metrics``, ``/healthz``, ``/readyz``.

``/healthz``: the process lives; ``/readyz``: the collector works. These two are open to all clients that reach the port: an
orchestrator's probe has neither token nor certificate.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from handrail.metrics.registry import Registry
from handrail.printable import printable_lines
from handrail.runtime.connections import Gate, own_gate
from handrail.runtime.http_server import HttpServer
from handrail.security.tokens import AUTHORIZATION, Authenticator, Denied

log = logging.getLogger(__name__)

Problem = Callable[[], str]
"""Return one line on why the process is not ready, or '' when it is."""


_OPEN: Final = frozenset({"/healthz", "/readyz"})


def denial(guard: Authenticator, request: web.Request) -> Denied | None:
    """Refusal of ``request``; None where it may pass, as every health check may."""
    if guard.open or request.path in _OPEN:
        return None
    certified = request.transport is not None and bool(request.transport.get_extra_info("peercert"))
    denied = guard.denial(request.headers.getall(AUTHORIZATION, []), certified=certified)
    if denied is not None:
        guard.log_denial(denied, request.remote or "?")
    return denied


def _nothing() -> str:
    return ""


def add_routes(app: web.Application, metrics: Registry, not_ready: Problem, degraded: Problem = _nothing) -> None:
    """Add the three endpoints to any application.

    ``degraded``: the part that works worse while the process stays ready; ``/readyz`` answers 200 and a second line with it.
    """

    async def scrape(request: web.Request) -> web.Response:
        page, content_type = metrics.expose(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        problem, worse = not_ready(), degraded()
        text = f"{problem or 'ok'}\n" + (f"degraded: {worse}\n" if worse else "")
        return web.Response(text=printable_lines(text), status=503 if problem else 200)

    app.router.add_get("/metrics", scrape)
    app.router.add_get("/healthz", healthy)
    app.router.add_get("/readyz", ready)


class AdminServer:
    """Serve the three endpoints alone, for the sidecar.

    ``shutdown`` works without ``start`` and twice. ``degraded``: as in ``add_routes``. ``tls`` None: plaintext. ``guard``:
    authenticator of scrapes. ``gate``: bounds on connections.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Registry,
        not_ready: Problem,
        *,
        degraded: Problem = _nothing,
        tls: ssl.SSLContext | None = None,
        guard: Authenticator | None = None,
        gate: Gate | None = None,
    ) -> None:
        app = web.Application(middlewares=[_guarded(guard or Authenticator("admin"))])
        add_routes(app, metrics, not_ready, degraded)
        self._http = HttpServer(app, host, port, gate or own_gate("admin"), tls=tls, logger=log)

    @property
    def address(self) -> tuple[str, int]:
        """Bound address, once the server has started."""
        return self._http.address

    async def start(self) -> None:
        """Start. Raises ``OSError`` when the port cannot be bound."""
        await self._http.start()

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Stop listening; running answers need no more time."""
        await self._http.shutdown()


def _guarded(guard: Authenticator) -> Any:
    @web.middleware
    async def let_in(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        denied = denial(guard, request)
        if denied is not None:
            return web.Response(text=f"{denied.reason}\n", status=denied.status, headers=denied.headers)
        return await handler(request)

    return let_in
