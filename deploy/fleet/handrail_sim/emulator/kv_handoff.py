"""The hand-off in real time: D's handshake and KV fetch, and P's blocks.

Both use the side channel. No KV moves: the model of the link gives the duration, and P's answer gives the permission.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from handrail_sim.emulator.channel import PeerConnection, Peers, ProducerAddress, TransferError
from handrail_sim.emulator.faults import Active
from handrail_sim.emulator.host import Driver, EmulatedHost
from handrail_sim.emulator.kv import Publication
from handrail_sim.emulator.metrics import EngineMetrics
from handrail_sim.emulator.plugin_events import PluginEvents
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.truth import FetchTruth
from handrail_sim.emulator.wire import FAILS_AFTER_NS, Wire

log = logging.getLogger(__name__)

_LOAD_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_MAX_TRAFFIC = 256  # links to different engines


def whole(kv: Mapping[str, Any]) -> bool:
    """Test whether these hand-off parameters say where to read."""
    return all(kv.get(key) is not None for key in _LOAD_KEYS)


@dataclass(slots=True)
class Pull:
    """One request's KV fetch under way.

    Times are monotonic ns; None: has not happened. ``drawn``: decides whether a fault strikes the fetch.
    """

    request_id: str
    kv: Mapping[str, Any]
    kv_bytes: int  # the size to report
    link_bytes: int  # the size that the link moves
    blocks: int
    drawn: float
    started_ns: int
    peer: str | None = None
    contact_ns: int | None = None
    loaded_ns: int | None = None
    seen_ns: int | None = None
    fetch: FetchTruth = FetchTruth.NONE

    @property
    def ok(self) -> bool:
        return self.fetch in (FetchTruth.OK, FetchTruth.STALE_READ)

    @property
    def recompute(self) -> bool:
        return self.fetch in (FetchTruth.RECOMPUTED, FetchTruth.EXPIRED)


class WireTraffic:
    """The transfers over one wire in real time.

    A new connection to the other end is a new first contact.
    """

    def __init__(self, wire: Wire, peer: PeerConnection, engine_id: str) -> None:
        self.wire = wire
        self.peer = peer
        self.engine_id = engine_id  # the peer's
        wire.apply_faults(time.monotonic_ns())
        self._arrivals: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def move(self, transfer: str, size_bytes: int) -> None:
        """Move a transfer and return when it has arrived."""
        arrival = asyncio.get_running_loop().create_future()
        self._arrivals[transfer] = arrival
        self.wire.link.start(transfer, size_bytes, time.monotonic_ns())
        self._look()
        try:
            await arrival
        finally:
            if self._arrivals.pop(transfer, None) is not None:
                self.wire.link.drop(transfer, time.monotonic_ns())
                self._look()

    def apply_faults(self) -> None:
        self.wire.apply_faults(time.monotonic_ns())
        self._look()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for transfer in self.wire.link.finished(time.monotonic_ns()):
            self._arrivals.pop(transfer).set_result(None)
        next_ns = self.wire.link.next_ns()
        if next_ns is not None:
            self._timer = asyncio.get_running_loop().call_at(next_ns / 1e9, self._look)


class Fetcher:
    """All KV fetches of one engine.

    ``recompute``: kv_load_failure_policy, for failures that no fault caused.
    """

    def __init__(
        self,
        host: str,
        engine_id: str,
        scenario: Scenario,
        faults: Active,
        metrics: EngineMetrics,
        plugin: PluginEvents,
        *,
        handshake_timeout_s: float,
        recompute: bool,
    ) -> None:
        self._host = host
        self._engine_id = engine_id
        self._scenario = scenario
        self._faults = faults
        self._metrics = metrics
        self._plugin = plugin
        self._recompute = recompute
        self._peers = Peers(handshake_timeout_s)
        self._traffic: dict[ProducerAddress, WireTraffic] = {}

    async def close(self) -> None:
        for traffic in self._traffic.values():
            traffic.close()
        await self._peers.close()

    def apply_faults(self) -> None:
        """Apply the faults that are active now; called where a fault begins or ends."""
        for traffic in self._traffic.values():
            traffic.apply_faults()

    async def fetch(self, pull: Pull) -> None:
        """Fetch the KV that ``pull`` names and record the result in it.

        Does not return when the parameters do not say where to read.
        """
        if not whole(pull.kv):
            log.warning("Got invalid KVTransferParams: %s. This request will not utilize KVTransfer", sorted(pull.kv))
            await asyncio.Event().wait()  # vLLM 0.32 never finishes such a request; it ends only when its client leaves
        address = _address(pull.kv)
        peer: PeerConnection | None = None
        try:
            with self._plugin.contact(address.engine_id):
                peer = await self._peers.get(address)
            await self._read(pull, peer, self._over(address, peer))
        except (TransferError, OSError) as error:
            if peer is not None and isinstance(error, OSError):
                self._peers.forget(address)
            self._failed(pull, address, error)
        pull.loaded_ns = time.monotonic_ns()

    async def heartbeat(self, kv: Mapping[str, Any]) -> None:
        """Renew the lease of KV that is still to be read."""
        if not whole(kv):
            return
        try:
            peer = await self._peers.get(_address(kv))
            await peer.ask({"op": "heartbeat", "request_id": str(kv["remote_request_id"])})
        except (TransferError, OSError) as error:
            log.debug("heartbeat: %s", error)  # the load itself will fail and is counted then

    def _over(self, address: ProducerAddress, peer: PeerConnection) -> WireTraffic:
        traffic = self._traffic.get(address)
        if traffic is None or traffic.peer is not peer:
            if len(self._traffic) >= _MAX_TRAFFIC:
                self._traffic.pop(next(iter(self._traffic)))  # a fetch that still waits for it holds it
            traffic = WireTraffic(Wire(peer.host, self._host, self._scenario, self._faults), peer, address.engine_id)
            self._traffic[address] = traffic
        return traffic

    async def _read(self, pull: Pull, peer: PeerConnection, traffic: WireTraffic) -> None:
        """Read the KV from the peer. Raises ``TransferError`` and ``OSError``."""
        wire, remote = traffic.wire, str(pull.kv["remote_request_id"])
        pull.peer = peer.host
        with self._plugin.contact(traffic.engine_id):
            await _until(wire.contact_ns(time.monotonic_ns()))
        posted_ns = pull.contact_ns = time.monotonic_ns()
        self._plugin.posted(pull.request_id, posted_ns)
        failure = wire.failure(pull.drawn, posted_ns)
        if failure is None:
            answer = await peer.ask({"op": "read", "request_id": remote, "blocks": pull.kv.get("remote_block_ids")})
            failure = wire.unheld(posted_ns) if answer.get("unheld") else None
            if failure is None and not answer.get("ok"):
                raise TransferError("transfer_setup_failed", str(answer.get("error")))
        if failure is not None:
            pull.fetch = failure
            if failure is not FetchTruth.STALE_READ:  # no engine notices a stale read: the fetch goes on
                await asyncio.sleep(FAILS_AFTER_NS / 1e9)
                raise TransferError("transfer_failed", "NIXL_ERR_REMOTE_DISCONNECT")
        post_s = (time.monotonic_ns() - posted_ns) / 1e9
        await traffic.move(pull.request_id, pull.link_bytes)
        self._plugin.done(pull.request_id, pull.kv_bytes, pull.blocks)
        self._metrics.transferred((time.monotonic_ns() - posted_ns) / 1e9, post_s, pull.kv_bytes)
        if pull.fetch is FetchTruth.NONE:
            pull.fetch = FetchTruth.OK
        await peer.ask({"op": "done", "request_id": remote})

    def _failed(self, pull: Pull, address: ProducerAddress, error: TransferError | OSError) -> None:
        failure = (
            error if isinstance(error, TransferError) else TransferError("transfer_setup_failed", "NIXL_ERR_REMOTE_DISCONNECT")
        )
        if pull.fetch in (FetchTruth.NONE, FetchTruth.STALE_READ):
            pull.fetch = FetchTruth.RECOMPUTED if self._recompute else FetchTruth.FAILED
        self._metrics.transfer_failed()
        self._plugin.failed(pull.request_id, failure.kind, address.engine_id)
        log.error(
            "NIXL transfer failure: %s | Context: {'failure_type': '%s', 'request_id': '%s', 'engine_id': '%s', "
            "'remote_engine_id': '%s', 'remote_request_id': '%s', 'remote_host': '%s', 'remote_port': %s, "
            "'num_local_blocks': %d}",
            *(failure, failure.kind, pull.request_id, self._engine_id, address.engine_id, pull.kv["remote_request_id"]),
            *(address.host, address.port, pull.blocks),
        )


def _address(kv: Mapping[str, Any]) -> ProducerAddress:
    try:
        return ProducerAddress(str(kv["remote_host"]), int(kv["remote_port"]), str(kv["remote_engine_id"]))
    except ValueError:
        return ProducerAddress("", 0, "")


async def _until(time_ns: int) -> None:
    left_ns = time_ns - time.monotonic_ns()
    if left_ns > 0:
        await asyncio.sleep(left_ns / 1e9)


log = logging.getLogger(__name__)


class KvPublisher:
    """Answers the engines that read from this one."""

    def __init__(self, engine_id: str, host: EmulatedHost, metrics: EngineMetrics, driver: Driver, plugin: PluginEvents) -> None:
        self._engine_id = engine_id
        self._host = host
        self._metrics = metrics
        self._driver = driver
        self._plugin = plugin
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
        self._plugin.expired(publication.request_id)
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
                self._plugin.renewed(request_id)
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
        self._plugin.read(request_id, late=not held)
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
