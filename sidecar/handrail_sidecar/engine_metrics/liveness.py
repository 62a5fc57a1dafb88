"""Infer from scrapes whether the engine restarted, hangs or cannot be reached.

It also finds transfers that are stuck.
When an engine core is stopped, the front end still serves /metrics and /health with its last numbers (measured), and
a hang raises no failure counter (case A14).
So an engine hangs when work waits and nothing that counts work has moved for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from handrail.records import Process, ProcessEvent, ProcessEventKind, Source
from handrail_sidecar.engine_metrics.page import Key, PageReading

_MOVES: Final = ("generation_tokens", "prompt_tokens", "requests_finished", "preemptions")
_IN_TRANSFER: Final = frozenset({"in_progress", "prefill_inflight", "decode_transfer"})
_WALL_STEP_NS: Final = 10**9  # a start time that moved by less is the same start, printed with fewer digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSettings:
    """How long nothing may move while work waits.

    One step of a very long unchunked prefill takes seconds.
    """

    hung_after_ns: int = 30 * 10**9
    stuck_after_ns: int = 60 * 10**9
    unreachable_after: int = 2  # scrapes in a row


@dataclass(slots=True)
class _EngineProgress:
    moved: tuple[float | None, ...] = ()
    still_since_ns: int = 0
    busy: bool = False
    hung: bool = False
    transfers: tuple[float | None, ...] = ()
    transfers_since_ns: int = 0
    waiting_then: float = 0.0
    stuck: bool = False


@dataclass(slots=True)
class Progress:
    """Watches one endpoint; one owner. Both methods yield the events of a scrape."""

    process: Process
    settings: ProgressSettings = field(default_factory=ProgressSettings)
    _engines: dict[str, _EngineProgress] = field(default_factory=dict)
    _started_s: float | None = None
    _failures: int = 0
    _failing_since_ns: int = 0
    _unreachable: bool = False

    @property
    def hung(self) -> bool:
        """Whether an engine hangs behind a page that answers."""
        return not self._unreachable and any(engine.hung for engine in self._engines.values())

    def failed(self, at_unix_ns: int, why: str) -> Iterator[ProcessEvent]:
        """Take a scrape that returned no page."""
        self._failures += 1
        if self._failures == 1:
            self._failing_since_ns = at_unix_ns
        if self._failures >= self.settings.unreachable_after and not self._unreachable:
            self._unreachable = True
            yield self._event(ProcessEventKind.UNREACHABLE, at_unix_ns, why, since_ns=self._failing_since_ns)

    def seen(
        self, reading: PageReading, at_unix_ns: int, reset: frozenset[Key], open_requests: int | None = None
    ) -> Iterator[ProcessEvent]:
        """Take a page.

        ``reset``: counters that began again. ``open_requests``: requests open through our own proxy; None when there is no proxy.
        """
        if self._unreachable:
            yield self._event(ProcessEventKind.REACHABLE, at_unix_ns, f"after {self._failures} scrapes without an answer")
        self._failures, self._unreachable = 0, False
        yield from self._restarted(reading, at_unix_ns, reset)
        engines = reading.engines
        for engine in engines:
            state = self._engines.setdefault(engine, _EngineProgress(still_since_ns=at_unix_ns, transfers_since_ns=at_unix_ns))
            alone = open_requests if len(engines) == 1 else None
            yield from self._hung(state, reading, engine, at_unix_ns, alone)
            yield from self._stuck(state, reading, engine, at_unix_ns)

    def _restarted(self, reading: PageReading, at: int, reset: frozenset[Key]) -> Iterator[ProcessEvent]:
        started = max(reading.of("start_time_seconds").values(), default=None)
        before, self._started_s = self._started_s, started if started is not None else self._started_s
        evidence = []
        if started is not None and before is not None and (started - before) * 1e9 > _WALL_STEP_NS:
            evidence.append(f"counts since {started:.3f} instead of {before:.3f} (unix time)")
        if reset:
            names = sorted({key[0] for key in reset})
            evidence.append(f"{len(reset)} counters restarted: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")
        if evidence:
            self._engines.clear()
            yield self._event(ProcessEventKind.RESTARTED, at, "; ".join(evidence))

    def _hung(
        self, state: _EngineProgress, reading: PageReading, engine: str, at: int, open_requests: int | None
    ) -> Iterator[ProcessEvent]:
        moved = (reading.count("iteration_tokens", engine), *(reading.total(name, engine) for name in _MOVES))
        running = reading.total("requests_running", engine) or 0.0
        waiting = reading.total("requests_waiting", engine) or 0.0
        in_transfer = _in_transfer(reading, engine)
        busy = max(running + waiting, open_requests or 0) - in_transfer > 0  # a load that takes long is not a hang
        if all(each is None for each in moved):
            return  # a page without a counter of work: a router's, a transport's
        was_busy, state.busy = state.busy, busy
        if moved != state.moved or not (busy and was_busy):
            if state.hung and moved != state.moved:
                state.hung = False
                yield self._event(ProcessEventKind.RECOVERED, at, "steps again", engine, since_ns=at)
            state.moved, state.still_since_ns = moved, at
        elif not state.hung and at - state.still_since_ns >= self.settings.hung_after_ns:
            state.hung = True
            still_s = (at - state.still_since_ns) / 1e9
            detail = f"no step, token or finished request for {still_s:.0f} s; {running:.0f} running, {waiting:.0f} waiting"
            if open_requests:
                detail += f", {open_requests} open through the proxy"
            yield self._event(
                ProcessEventKind.HUNG, at, f"{detail}; its metrics page answers", engine, since_ns=state.still_since_ns
            )

    def _stuck(self, state: _EngineProgress, reading: PageReading, engine: str, at: int) -> Iterator[ProcessEvent]:
        in_transfer = _in_transfer(reading, engine)
        waiting = reading.total("requests_waiting", engine) or 0.0
        failures = reading.total("kv_transfer_failures", engine)
        transfers = (in_transfer, reading.count("kv_transfer_seconds", engine), failures)
        if not in_transfer or transfers != state.transfers:
            if state.stuck:
                state.stuck = False
                yield self._event(ProcessEventKind.TRANSFERS_MOVING, at, f"{in_transfer:.0f} in transfer", engine)
            state.transfers, state.transfers_since_ns, state.waiting_then = transfers, at, waiting
        elif not state.stuck and at - state.transfers_since_ns >= self.settings.stuck_after_ns and waiting > state.waiting_then:
            state.stuck = True
            still_s = (at - state.transfers_since_ns) / 1e9
            detail = (
                f"{in_transfer:.0f} requests in transfer, none done or failed for {still_s:.0f} s, "
                f"while the queue grew from {state.waiting_then:.0f} to {waiting:.0f}"
            )
            yield self._event(ProcessEventKind.TRANSFERS_STUCK, at, detail, engine, since_ns=state.transfers_since_ns)

    def _event(
        self, kind: ProcessEventKind, at: int, detail: str, engine: str = "", *, since_ns: int | None = None
    ) -> ProcessEvent:
        return ProcessEvent(
            process=self.process,
            source=Source.METRICS,
            at_unix_ns=at,
            kind=kind,
            detail=detail + (f" (engine {engine})" if engine else ""),
            at_bound_ns=0 if since_ns is None else at - since_ns,
        )


def _in_transfer(reading: PageReading, engine: str) -> float:
    return sum(value for (_, stage), value in reading.of("kv_queue_requests", engine).items() if stage in _IN_TRANSFER)
