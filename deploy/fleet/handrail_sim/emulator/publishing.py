"""P's side of the hand-off in real time: the blocks that P holds.

It answers the side channel's questions on them, and frees them.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from handrail_sim.emulator.host import Driver, EmulatedHost
from handrail_sim.emulator.kv import Publication
from handrail_sim.emulator.metrics import EngineMetrics
from handrail_sim.emulator.plugin_events import Spoken

log = logging.getLogger(__name__)


class KvPublisher:
    """Answers the engines that read from this one."""

    def __init__(self, engine_id: str, host: EmulatedHost, metrics: EngineMetrics, driver: Driver, spoken: Spoken) -> None:
        self._engine_id = engine_id
        self._host = host
        self._metrics = metrics
        self._driver = driver
        self._spoken = spoken
        self._reading: set[str] = set()  # publications that D has begun to read

    def hold(self, request_id: str) -> None:
        """Hold blocks that were just published.

        They stay until they are read, until their lease ends, or until a fault frees them.
        """
        freed_ns = self._host.freed_after_ns()
        if freed_ns is not None:
            self._driver.at(freed_ns, partial(self._free, request_id))

    def expired(self, publication: Publication) -> None:
        self._reading.discard(publication.request_id)
        self._metrics.lease_expired()
        self._spoken.expired(publication.request_id)
        log.warning(
            "Releasing expired KV blocks for request %s which were retrieved by 0 remote worker(s) before lease expired.",
            publication.request_id,
        )

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer one message of the side channel."""
        operation, request_id = message.get("op"), str(message.get("request_id"))
        if operation == "hello":
            return {"ok": True, "engine_id": self._engine_id, "host": self._host.name}
        if operation == "heartbeat":
            renewed = self._host.core.renew_lease(request_id, self._driver.now_ns())
            if renewed:
                self._spoken.renewed(request_id)
            return {"ok": renewed}
        if operation == "read":
            return self._read(request_id, message.get("blocks"))
        if operation == "done":
            return {"ok": self._done(request_id)}
        return {"ok": False, "error": f"unknown operation {operation!r}"}

    def _read(self, request_id: str, blocks: object) -> dict[str, Any]:
        publication = self._host.core.published(request_id)
        if publication is None:
            return {"ok": False, "unheld": True, "error": f"nothing is held for {request_id}"}
        if blocks != [list(publication.blocks)]:
            return {"ok": False, "error": "NIXL_ERR_INVALID_PARAM"}
        self._reading.add(request_id)
        return {"ok": True}

    def _done(self, request_id: str) -> bool:
        self._reading.discard(request_id)
        held = self._host.core.release(request_id)
        self._spoken.read(request_id, late=not held)
        if held:
            self._driver.kick(self._host)  # the freed blocks may let a waiting request in
        else:
            self._metrics.notified_late()
        return held

    def _free(self, request_id: str) -> None:
        publication = self._host.core.published(request_id)
        if publication is not None and request_id not in self._reading:
            self._host.core.release(request_id)
            self.expired(publication)
            self._driver.kick(self._host)
