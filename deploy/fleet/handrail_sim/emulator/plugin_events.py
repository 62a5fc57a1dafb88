"""The events of an emulated engine in the form of Handrail's plugin.

The form is that of ``handrail.plugin.events``; a ``Voice`` sends them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from handrail_sim.emulator.core import Ended, EngineCore, EngineJob, FinishReason, LoadStarts, StepEnded
from handrail_sim.emulator.kv import BLOCK_TOKENS, blocks_for
from handrail_sim.emulator.plugin_socket import SaidLines, Voice
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.slowdown import WATCH_NS, Hindrance, late_wakes

_CONNECTOR, _RANK, _MODE, _DIRECTION = "NixlConnector", 0, "pull", "p_to_d"
_STATUS = {
    FinishReason.LENGTH: "FINISHED_LENGTH_CAPPED",
    FinishReason.STOP: "FINISHED_STOPPED",
    FinishReason.ABORT: "FINISHED_ABORTED",
    FinishReason.ERROR: "FINISHED_ERROR",
}
_CONTACT_TAKES_NS = 1_000_000  # less is no first contact: the peer was known


class Spoken:
    """The plugin events of one engine. Without ``path`` every call does nothing.

    ``pauses``: the pauses of its process.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        engine_id: str,
        model: str,
        scenario: Scenario,
        lease_ns: int,
        policy: str,
        core: EngineCore,
        pauses: Sequence[Hindrance] = (),
    ) -> None:
        self._engine_id = engine_id
        self._scenario = scenario
        self._lease_ns = lease_ns
        self._core = core
        self._pauses = pauses
        self._watched_ns = time.monotonic_ns()
        self._sent: set[str] = set()  # requests whose scheduling is already reported
        self._lines: logging.Handler | None = None
        self._voice: Voice | None = None
        if path is not None:
            facts: dict[str, str | int | bool] = {
                "engine_id": engine_id,
                "engine_version": "0.32.0",
                "model": model,
                "connector": _CONNECTOR,
                "connector_role": "kv_both",
                "block_size": BLOCK_TOKENS,
                "block_bytes": BLOCK_TOKENS * scenario.kv_bytes_per_token,
                "kv_blocks": scenario.kv_blocks,
                "tp_size": 1,
                "lease_ns": lease_ns,
                "failure_policy": policy,
            }
            self._voice = Voice(path, facts, lambda: core.unfinished, self.paused)

    def start(self) -> None:
        if self._voice is not None:
            self._lines = SaidLines(self._voice)
            logging.getLogger("handrail_sim.emulator").addHandler(self._lines)
            self._voice.start()

    async def close(self) -> None:
        if self._voice is not None:
            if self._lines is not None:
                logging.getLogger("handrail_sim.emulator").removeHandler(self._lines)
            await self._voice.close()

    def _say(self, name: str, *fields: Any, at_ns: int | None = None) -> None:
        if self._voice is not None:
            self._voice.say(name, *fields, at_ns=at_ns)

    def paused(self, now_ns: int) -> None:
        """Report the late wake-ups of pauses that ended since the last call.

        They are those of a thread of the process: no kernel says why.
        """
        for due_ns, woke_ns in late_wakes(self._pauses, self._watched_ns, now_ns):
            self._say("paused", due_ns, "held", WATCH_NS, at_ns=woke_ns)
        self._watched_ns = now_ns

    # --- requests -------------------------------------------------------------------------------------------------------

    def queued(self, job: EngineJob, at_ns: int, arrival_unix_ns: int, kv: Mapping[str, Any], traceparent: str | None) -> None:
        """Report that a request is queued.

        ``kv``: the hand-off parameters that came with it.
        """
        self._say("queued", job.id, arrival_unix_ns, job.prompt_tokens, traceparent, at_ns=at_ns)
        if job.load:
            peer = (_text(kv, "remote_engine_id"), _text(kv, "remote_request_id"), _text(kv, "remote_host"))
            port = kv.get("remote_port")
            known = (_CONNECTOR, self._engine_id, *peer, port if isinstance(port, int) else None, _DIRECTION, _MODE, None)
            self._say("kv_known", job.id, *known, at_ns=at_ns)

    def first_token(self, request_id: str, at_ns: int) -> None:
        self._scheduled(request_id, self._core.scheduled_ns(request_id))
        self._say("first_token", request_id, at_ns=at_ns)

    def preempted(self, request_id: str) -> None:
        self._say("preempted", request_id)

    def resumed(self, request_id: str) -> None:
        self._say("scheduled", request_id, None, None)

    def ended(self, ended: Ended) -> None:
        self._scheduled(ended.id, ended.times.scheduled_ns)
        self._sent.discard(ended.id)
        self._say("finished", ended.id, _STATUS[ended.reason], ended.generated)
        if ended.published is not None:
            tokens = ended.published.tokens
            kept = (tokens, len(ended.published.blocks), tokens * self._scenario.kv_bytes_per_token, self._lease_ns)
            self._say("kv_published", ended.id, _CONNECTOR, self._engine_id, *kept, _DIRECTION, _MODE, None)

    def step(self, step: StepEnded) -> None:
        load = self._core.load()
        ran = (step.requests, step.prefill_requests, step.prefill_tokens, step.tokens - step.prefill_tokens, step.preemptions)
        self._say("step", step.begin_ns, *ran, load.running, load.waiting, step.landed, step.resumed_tokens)

    def _scheduled(self, request_id: str, at_ns: int | None) -> None:
        """Report the first scheduling of a request once it is known.

        The core makes it known only later.
        """
        if at_ns is not None and request_id not in self._sent:
            self._sent.add(request_id)
            self._say("scheduled", request_id, None, None, at_ns=at_ns)

    # --- KV that it reads -----------------------------------------------------------------------------------------------

    def load(self, load: LoadStarts, kv_bytes: int, tokens: int) -> None:
        """Report a load that starts. ``tokens``: the tokens whose KV is not here yet."""
        wanted = (load.tokens, load.tokens - tokens, blocks_for(tokens), kv_bytes, True)
        self._say("kv_wanted", load.id, _CONNECTOR, self._engine_id, *wanted)
        self._say("kv_load", load.id, _RANK)

    @contextlib.contextmanager
    def contact(self, peer_engine_id: str) -> Iterator[None]:
        """Report a first contact that may happen inside this context.

        The report is made at its end, and only where it took time.
        """
        begin_ns = time.monotonic_ns()
        ok = False
        try:
            yield
            ok = True
        finally:
            if time.monotonic_ns() - begin_ns >= _CONTACT_TAKES_NS:
                self._say("kv_handshake", peer_engine_id, _RANK, begin_ns, None, at_ns=begin_ns)
                self._say("kv_handshake", peer_engine_id, _RANK, begin_ns, ok)

    def posted(self, request_id: str, at_ns: int) -> None:
        self._say("kv_posted", request_id, _RANK, False, at_ns=at_ns)

    def done(self, request_id: str, kv_bytes: int, descriptors: int) -> None:
        self._say("kv_done", request_id, _RANK, kv_bytes, descriptors, 0, False)

    def failed(self, request_id: str, kind: str, peer_engine_id: str) -> None:
        self._say("kv_failure", request_id, _RANK, kind, "NIXL_ERR_REMOTE_DISCONNECT", peer_engine_id)

    def loaded(self, request_id: str, *, ok: bool, noticed_ns: int) -> None:
        """Report that the worker is done with a load.

        The scheduler sees it at ``noticed_ns``.
        """
        self._say("kv_loaded", request_id, _RANK, not ok, 0)
        self._say("kv_noticed", request_id, not ok, at_ns=noticed_ns)

    # --- KV that it keeps -----------------------------------------------------------------------------------------------

    def renewed(self, request_id: str) -> None:
        self._say("kv_lease", request_id, self._lease_ns)

    def read(self, request_id: str, *, late: bool) -> None:
        self._say("kv_read", request_id, _RANK, None, late, 0)
        if not late:
            self._say("kv_freed", request_id)

    def expired(self, request_id: str) -> None:
        self._say("kv_expired", request_id, _RANK)
        self._say("kv_freed", request_id)


def _text(kv: Mapping[str, Any], name: str) -> str | None:
    found = kv.get(name)
    return None if found is None else str(found)
