"""The small HTTP server beside a process's work: ``/metrics``, ``/healthz`` (it lives), ``/readyz`` (it does its work)."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from handrail.selfmetrics import SelfMetrics

Problem = Callable[[], str]
"""Says in one line why the process is not ready, or '' when it is."""


def add_routes(app: web.Application, metrics: SelfMetrics, not_ready: Problem) -> None:
    """The three endpoints on any application."""

    async def scrape(request: web.Request) -> web.Response:
        page, content_type = metrics.expose(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        problem = not_ready()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    app.router.add_get("/metrics", scrape)
    app.router.add_get("/healthz", healthy)
    app.router.add_get("/readyz", ready)


class AdminServer:
    """Serves the three endpoints alone, for the sidecar. ``shutdown`` works without ``start`` and twice."""

    def __init__(self, host: str, port: int, metrics: SelfMetrics, not_ready: Problem) -> None:
        self.address = (host, port)
        app = web.Application()
        add_routes(app, metrics, not_ready)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Raises ``OSError`` when the port cannot be bound."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self.address)
        await site.start()
        self.address = self._runner.addresses[0][:2]

    async def shutdown(self) -> None:
        await self._runner.cleanup()
