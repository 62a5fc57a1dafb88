"""Observe a KV connector through the public hooks of ``KVConnectorBase_V1``.

Seen on vLLM 0.32; MEASURED section 5. There is one object in EngineCore (scheduler side) and one in each worker. The hooks of
``mixin.py`` call the methods here, behind the guard. The engine calls several of the hooks at every step, so each method first
checks whether there is anything to report.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

from handrail.plugin.events import (
    KV_FREED,
    KV_KNOWN,
    KV_LOAD,
    KV_LOADED,
    KV_NOTICED,
    KV_PUBLISHED,
    KV_WANTED,
    TRACEPARENT_ENV,
    TRACEPARENT_PARAM,
)
from handrail.plugin.facts import engine_id_of, lease_ns_of
from handrail.plugin.kv_params import D_TO_P, P_TO_D, Offer, group_sizes, read_offer
from handrail.plugin.layout import KvLayout
from handrail.plugin.recorder import Recorder
from handrail.plugin.trace_context import publish_traceparent

MAX_REQUESTS: Final = 65_536
LOADS: Final = "handrail_loads"  # on the connector's metadata: (request id, loads within the call), for connectors without ids
_NONE: Final = Offer(None, None, None, None, None, None, None, None, ())


class SchedulerSide:
    """Scheduler's half of one leaf connector."""

    def __init__(self, connector: Any, recorder: Recorder, layout: KvLayout, config: Any) -> None:
        self._connector = connector
        self._name = type(connector).__name__
        self._record = recorder.record
        self._layout = layout
        self._engine_id = engine_id_of(config)
        self._leases_ns = {P_TO_D: lease_ns_of(config), D_TO_P: lease_ns_of(config, decode=True)}
        self._adds_traceparent = os.environ.get(TRACEPARENT_ENV, "1") != "0"
        self._offers: dict[str, Offer] = {}  # requests with connector parameters
        self._arrived: dict[str, int] = {}  # their and all others' arrival, until they are scheduled
        self._local: dict[str, tuple[int, bool]] = {}  # tokens here already, loads asynchronously
        self._wanted: set[str] = set()  # loads begun
        self._known: set[str] = set()
        self._loads: list[tuple[str, bool]] = []

    def new_request(self, request: Any) -> None:
        now, request_id = time.monotonic_ns(), request.request_id
        if getattr(request, "abort_immediately", False):  # vLLM's own clean-up: it only tells the peer to free
            return
        if len(self._arrived) >= MAX_REQUESTS:
            self._arrived.clear()
        self._arrived[request_id] = now
        params = request.kv_transfer_params
        if isinstance(params, dict) and params:
            offer = self._offers[request_id] = read_offer(params)
            if offer.direction is not None:
                self._say_known(request_id, now, offer)

    def matched(self, request: Any, computed_tokens: int, found: Any) -> None:
        """Handle the connector's answer about external tokens.

        ``found``: tokens to load and whether asynchronously. The engine asks again and again while the request waits.
        """
        if found[0]:
            self._local[request.request_id] = (computed_tokens, bool(found[1]))

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Handle the allocation of blocks.

        The engine calls it again with 0 tokens once the blocks are loaded. It calls it with some tokens where the request loads
        once more, after a preemption or a load that failed: that is a load of its own.
        """
        request_id = request.request_id
        again = request_id in self._wanted
        if external_tokens <= 0 and (again or request_id not in self._known):
            return
        now = time.monotonic_ns()
        self._wanted.add(request_id)
        offer = self._offers.get(request_id, _NONE)
        if again:
            self._say_known(request_id, now, offer)
        elif request_id not in self._known:
            self._say_known(request_id, self._arrived.get(request_id, now), offer)
        local, asynchronous = self._local.get(request_id, (request.num_computed_tokens, True))
        sizes = self._layout.transferred(group_sizes(blocks.get_unhashed_block_ids_all_groups()), offer.remote_blocks)
        if external_tokens <= 0:
            sizes = ()
        expected = self._layout.engine_bytes(sizes)
        self._record(
            (
                KV_WANTED,
                now,
                request_id,
                self._name,
                self._engine_id,
                external_tokens,
                local,
                sum(sizes),
                expected,
                asynchronous,
            )
        )
        if external_tokens > 0:
            self._loads.append((request_id, asynchronous))

    def meta_built(self, meta: Any) -> None:
        """Tell the workers which requests load in this step.

        It is needed where the connector's own metadata does not list them.
        """
        if self._loads:
            loads, self._loads = tuple(self._loads), []
            if not hasattr(meta, "reqs_to_recv"):
                setattr(meta, LOADS, loads)

    def output(self, output: Any) -> None:
        """Handle the workers' report: loads that are done, failed, or read by a peer."""
        received = output.finished_recving
        if received:
            now, failed = time.monotonic_ns(), getattr(output, "failed_recving", None) or ()
            for request_id in received:
                self._record((KV_NOTICED, now, request_id, request_id in failed))
        if output.finished_sending:
            now = time.monotonic_ns()
            for request_id in output.finished_sending:
                self._record((KV_FREED, now, request_id))

    def finished(self, request: Any, block_ids: Any, result: Any) -> None:
        """Handle the end of a request.

        ``result``: whether its blocks are kept, and the parameters that go to the peer.
        """
        request_id = request.request_id
        offer = self._offers.pop(request_id, _NONE)
        self._arrived.pop(request_id, None)
        self._local.pop(request_id, None)
        self._wanted.discard(request_id)
        self._known.discard(request_id)
        kept, params = result
        if not kept:
            return
        shown = params if isinstance(params, dict) else {}
        traceparent = publish_traceparent(request)
        sizes = group_sizes(shown.get("remote_block_ids")) or group_sizes(block_ids)
        self._record(
            (
                KV_PUBLISHED,
                time.monotonic_ns(),
                request_id,
                self._name,
                self._engine_id,
                shown.get("remote_num_tokens"),
                sum(sizes),
                self._layout.engine_bytes(sizes),
                self._leases_ns.get(offer.publishes or P_TO_D),
                offer.publishes,
                shown.get("transfer_mode"),
                traceparent,
            )
        )
        if self._adds_traceparent and isinstance(params, dict):
            params[TRACEPARENT_PARAM] = traceparent

    def _say_known(self, request_id: str, at_ns: int, offer: Offer) -> None:
        self._known.add(request_id)
        self._record(
            (
                KV_KNOWN,
                at_ns,
                request_id,
                self._name,
                self._engine_id,
                offer.peer_engine_id,
                offer.peer_request_id,
                offer.peer_host,
                offer.peer_port,
                offer.direction,
                offer.mode,
                offer.traceparent,
            )
        )


class WorkerSide:
    """Worker's half of one leaf connector."""

    def __init__(self, connector: Any, recorder: Recorder, rank: int) -> None:
        self._connector = connector
        self._record = recorder.record
        self._rank = rank
        self._within: list[str] = []  # loads that end with the call
        self.polled_ns = time.monotonic_ns()

    def load_began(self, begin_ns: int) -> None:
        """Handle the moment before the connector starts to load."""
        meta = getattr(self._connector, "_connector_metadata", None)
        if received := getattr(meta, "reqs_to_recv", None):
            for key, value in received.items():
                for request_id in value if isinstance(value, dict) else (key,):  # Mooncake groups them by peer
                    self._record((KV_LOAD, begin_ns, request_id, self._rank))
        elif loads := getattr(meta, LOADS, None):
            for request_id, asynchronous in loads:
                self._record((KV_LOAD, begin_ns, request_id, self._rank))
                if not asynchronous:
                    self._within.append(request_id)

    def load_ended(self) -> None:
        """Handle the end of the call, and of the loads that the connector does within it."""
        if self._within:
            now = time.monotonic_ns()
            for request_id in self._within:
                self._record((KV_LOADED, now, request_id, self._rank, False, 0))
            self._within.clear()

    def results(self, received: Any, failed: Any) -> None:
        """Handle the connector's answer about finished loads.

        ``received`` holds the failed ones too.
        """
        now, before = time.monotonic_ns(), self.polled_ns
        self.polled_ns = now
        for request_id in received or ():
            self._record((KV_LOADED, now, request_id, self._rank, bool(failed) and request_id in failed, now - before))
