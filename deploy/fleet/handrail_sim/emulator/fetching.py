"""D's side of the hand-off in real time: first contact, then the KV fetch.

First contact uses the side channel. No KV moves: the model of the link gives the duration, and P's answer gives the permission.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handrail_sim.emulator.channel import PeerConnection, Peers, ProducerAddress, TransferError
from handrail_sim.emulator.faults import Active
from handrail_sim.emulator.metrics import EngineMetrics
from handrail_sim.emulator.plugin_events import Spoken
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
        spoken: Spoken,
        *,
        handshake_timeout_s: float,
        recompute: bool,
    ) -> None:
        self._host = host
        self._engine_id = engine_id
        self._scenario = scenario
        self._faults = faults
        self._metrics = metrics
        self._spoken = spoken
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
            with self._spoken.contact(address.engine_id):
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
        with self._spoken.contact(traffic.engine_id):
            await _until(wire.contact_ns(time.monotonic_ns()))
        posted_ns = pull.contact_ns = time.monotonic_ns()
        self._spoken.posted(pull.request_id, posted_ns)
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
        self._spoken.done(pull.request_id, pull.kv_bytes, pull.blocks)
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
        self._spoken.failed(pull.request_id, failure.kind, address.engine_id)
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
