"""Follow the processes of one engine: alive, silent, stuck, gone or replaced.

It also counts their lost events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from handrail.plugin.events import CORE, UNKNOWN, WORKER
from handrail.records import ProcessEvent, ProcessEventKind, Source
from handrail_sidecar.plugin_merge.bounds import Bounded, MergeLimits
from handrail_sidecar.plugin_merge.engine import ENGINE, ObservedEngine
from handrail_sidecar.sources.datagram import Packet

Exists = Callable[[int], "bool | None"]
"""Whether a pid of this host exists; None when that is unknown."""

MAX_PROCESSES: Final = 1024
ENDS_WITHIN_NS: Final = 30 * 10**9
"""Most time between a core's last datagram and the stop of its API server, in ns.

The API server ended a core that is within it.
"""


@dataclass(slots=True)
class GuestProcess:
    """One process that has sent datagrams; times on the monotonic clock."""

    boot: str
    pid: int
    kind: str
    offset_ns: int  # wall clock minus monotonic, as last reported
    received_ns: int
    host_pid: int | None  # as the kernel names the sender here
    sequence: int = 0
    lost_events: int = 0
    step_ns: int | None = None
    busy_since_ns: int | None = None  # since when it has had requests to do
    hung: bool = False
    stopping_ns: int | None = None  # it has reported that it ends
    stops_clean: bool = False
    lost_reported: int = 0
    lost_reported_ns: int = 0


class Processes:
    """Processes by boot; ``on_gone`` is called when one is dead or replaced."""

    def __init__(
        self, engine: ObservedEngine, limits: MergeLimits, exists: Exists, on_gone: Callable[[GuestProcess, int], None]
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._exists = exists
        self._on_gone = on_gone
        self.alive: Bounded[GuestProcess] = Bounded(MAX_PROCESSES)
        self.lost_events = 0
        self.lost_datagrams = 0
        self._front_ends_ns: int | None = None  # when an API server got the signal to stop

    @property
    def hung(self) -> bool:
        """Whether a process is silent, or runs no steps while requests wait."""
        return any(process.hung for process in self.alive.values())

    def knows(self, packet: Packet) -> bool:
        """Whether this datagram, or a later one of its process, was received before."""
        process = self.alive.get(packet.boot)
        return process is not None and packet.sequence <= process.sequence

    def take(self, packet: Packet, host_pid: int | None) -> Iterator[ProcessEvent]:
        process = self.alive.get(packet.boot)
        offset_ns = packet.unix_ns - packet.monotonic_ns
        if process is None:
            process = GuestProcess(packet.boot, packet.pid, packet.kind, offset_ns, packet.monotonic_ns, host_pid)
            process.sequence = packet.sequence - 1  # what was sent before this sidecar listened does not count as lost
            process.lost_events = process.lost_reported = packet.lost
            yield from self._replaced_by(process)
            if len(self.alive) >= MAX_PROCESSES:
                self._on_gone(self.alive.popitem(last=False)[1], packet.monotonic_ns)
            self.alive.put(packet.boot, process)
        if packet.sequence > process.sequence + 1:
            self.lost_datagrams += packet.sequence - process.sequence - 1
        process.sequence = max(process.sequence, packet.sequence)
        if packet.lost > process.lost_events:
            self.lost_events += packet.lost - process.lost_events
            process.lost_events = packet.lost
        process.offset_ns, process.received_ns = offset_ns, max(process.received_ns, packet.monotonic_ns)
        process.host_pid = host_pid or process.host_pid
        if process.kind == UNKNOWN:
            process.kind = packet.kind

    def stepped(self, boot: str, at_ns: int) -> None:
        process = self.alive.get(boot)
        if process is not None:
            process.step_ns = max(process.step_ns or 0, at_ns)
            if process.stopping_ns is not None and at_ns > process.stopping_ns:
                process.stopping_ns = None  # it went on

    def report_stopping(self, boot: str, at_ns: int, clean: bool) -> None:
        process = self.alive.get(boot)
        if process is not None:
            process.stopping_ns, process.stops_clean = at_ns, clean
            if clean and process.kind not in (CORE, WORKER):
                self._front_ends_ns = at_ns

    def _ended_by_its_front(self, process: GuestProcess) -> bool:
        """Whether the API server ended this core or worker.

        vLLM 0.32 kills its core as soon as its API server gets the signal to stop, so the core sends no last event.
        """
        reported_ns = self._front_ends_ns
        return (
            reported_ns is not None
            and process.kind in (CORE, WORKER)
            and abs(process.received_ns - reported_ns) <= ENDS_WITHIN_NS
        )

    def report_life(self, boot: str, step_ns: int | None, unfinished: int | None) -> None:
        process = self.alive.get(boot)
        if process is not None:
            if not unfinished:
                process.busy_since_ns = None
            elif process.busy_since_ns is None:
                process.busy_since_ns = process.received_ns
            if step_ns is not None:
                process.step_ns = max(process.step_ns or 0, step_ns)

    def look(self, now_ns: int, listening_ns: int = 0) -> Iterator[ProcessEvent]:
        """Check whether each process still exists and goes on.

        An event from before ``listening_ns`` may be missing only because this sidecar did not receive it.
        """
        for process in list(self.alive.values()):
            silent_ns = now_ns - process.received_ns
            there = self._exists(process.host_pid) if process.host_pid is not None else None
            listened_ns = now_ns - listening_ns
            silent_after_its_end = process.stopping_ns is not None and min(silent_ns, listened_ns) >= self._limits.silent_ns
            if (there is False and silent_ns >= self._limits.rollup_ns) or (there is None and silent_after_its_end):
                del self.alive[process.boot]
                yield self._ended(process, silent_ns)
                self._on_gone(process, process.received_ns)
                continue
            yield from self._look_at(process, now_ns, silent_ns, listened_ns)
            yield from self._tell_lost(process, now_ns)

    def _ended(self, process: GuestProcess, silent_ns: int) -> ProcessEvent:
        kind, why = ProcessEventKind.DEAD, "the process is gone"
        if process.stopping_ns is not None:
            kind = ProcessEventKind.STOPPED if process.stops_clean else ProcessEventKind.DEAD
            why = "it ended on request" if process.stops_clean else "it failed and ended"
        elif self._ended_by_its_front(process):
            kind, why = ProcessEventKind.STOPPED, "its API server shut down and ended it"
            process.stops_clean, process.stopping_ns = True, process.received_ns
        return self._event(process, kind, process.received_ns, why, bound_ns=silent_ns)

    def _look_at(self, process: GuestProcess, now_ns: int, silent_ns: int, listened_ns: int) -> Iterator[ProcessEvent]:
        waits_since_ns = max(process.busy_since_ns or 0, process.step_ns or 0)
        silent = silent_ns >= self._limits.silent_ns
        busy = process.kind == CORE and process.busy_since_ns is not None
        stuck = busy and now_ns - waits_since_ns >= self._limits.stuck_ns
        received_out = listened_ns >= (self._limits.silent_ns if silent else self._limits.stuck_ns)
        if (silent or stuck) and received_out and not process.hung:
            process.hung = True
            since_ns = process.received_ns if silent else waits_since_ns
            why = "sends nothing, and its process may still run" if silent else "makes no step while requests wait"
            yield self._event(process, ProcessEventKind.HUNG, since_ns, why)
        elif process.hung and not silent and not stuck:
            process.hung = False
            yield self._event(process, ProcessEventKind.RECOVERED, process.received_ns, "works again")

    def _replaced_by(self, process: GuestProcess) -> Iterator[ProcessEvent]:
        """Report a new boot: a start, or the successor of a silent process.

        Several processes of one kind may exist: ranks.
        """
        gone = [
            old
            for old in self.alive.values()
            if old.kind == process.kind
            and process.received_ns - old.received_ns >= 2 * self._limits.rollup_ns
            and (old.hung or old.host_pid is None or self._exists(old.host_pid) is False)
        ]
        for old in gone:
            del self.alive[old.boot]
            self._on_gone(old, old.received_ns)
        kind = ProcessEventKind.RESTARTED if gone else ProcessEventKind.STARTED
        detail = f"instead of pid {', '.join(str(old.pid) for old in gone)}" if gone else ""
        yield self._event(process, kind, process.received_ns, detail)

    def close(self, now_ns: int) -> Iterator[ProcessEvent]:
        """Report the losses that are not reported yet: this sidecar ends."""
        for process in self.alive.values():
            yield from self._tell_lost(process, now_ns, at_once=True)

    def _tell_lost(self, process: GuestProcess, now_ns: int, *, at_once: bool = False) -> Iterator[ProcessEvent]:
        lost = process.lost_events - process.lost_reported
        if lost > 0 and (at_once or now_ns - process.lost_reported_ns >= self._limits.lost_every_ns):
            process.lost_reported, process.lost_reported_ns = process.lost_events, now_ns
            detail = "events that the plugin lost"
            yield self._event(process, ProcessEventKind.PLUGIN_LOST, process.received_ns, detail, count=lost)

    def event(self, boot: str, kind: ProcessEventKind, at_ns: int, detail: str) -> Iterator[ProcessEvent]:
        process = self.alive.get(boot)
        if process is not None:
            yield self._event(process, kind, at_ns, detail)

    def paused(self, boot: str, begin_ns: int, lasted_ns: int, reason: str, bound_ns: int) -> Iterator[ProcessEvent]:
        """Report a pause from ``begin_ns`` on.

        It may have begun up to ``bound_ns`` earlier.
        """
        process = self.alive.get(boot)
        if process is not None:
            paused = self._event(process, ProcessEventKind.PAUSED, begin_ns, reason, bound_ns=bound_ns)
            yield replace(paused, duration_ns=lasted_ns)

    def _event(
        self, process: GuestProcess, kind: ProcessEventKind, at_ns: int, detail: str, *, count: int = 0, bound_ns: int = 0
    ) -> ProcessEvent:
        return ProcessEvent(
            process=self._engine.process,
            source=Source.PLUGIN,
            at_unix_ns=at_ns + process.offset_ns,
            kind=kind,
            engine=ENGINE,
            engine_id=self._engine.engine_id,
            pid=process.pid,
            process_kind=process.kind,
            detail=detail,
            at_bound_ns=bound_ns,
            count=count,
        )
