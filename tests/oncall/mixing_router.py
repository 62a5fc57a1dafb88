"""A faulty router that swaps the KV of two concurrent requests.

The fault starts at ``FAULT_AT_S`` of the run.

python -m tests.oncall.mixing_router router ...     (the command line is that of the fleet's router)
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Final

from aiohttp import web

from handrail_sim.emulator import router
from handrail_sim.emulator.__main__ import main

FAULT_AT_S: Final = 90.0
"""Seconds of the run at which the faults of these fleets begin."""

_WAITS_S: Final = 0.5  # at most this: a request that waits gets its first token late


class MixingRouter(router.Router):
    """Waits for a second request and swaps their keys.

    A request alone keeps its own keys.
    """

    def __init__(self, settings: router.RouterSettings) -> None:
        super().__init__(settings)
        self._from_unix_s = (settings.began_unix_ns or time.time_ns()) / 1e9 + FAULT_AT_S
        self._first: tuple[dict[str, Any] | None, asyncio.Future[dict[str, Any] | None]] | None = None

    async def _decoded(self, relay: router._Relay, kv: dict[str, Any] | None) -> web.StreamResponse:
        if time.time() >= self._from_unix_s:
            kv = await self._mixed(kv)
        return await super()._decoded(relay, kv)

    async def _mixed(self, kv: dict[str, Any] | None) -> dict[str, Any] | None:
        if self._first is not None:
            (theirs, future), self._first = self._first, None
            if not future.done():
                future.set_result(kv)
                return theirs
        future = asyncio.get_running_loop().create_future()
        self._first = (kv, future)
        try:
            return await asyncio.wait_for(future, _WAITS_S)
        except asyncio.TimeoutError:
            return kv


if __name__ == "__main__":
    router.Router = MixingRouter  # type: ignore[misc]
    sys.exit(main())
