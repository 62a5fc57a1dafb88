"""Whether the engine hangs behind an endpoint that answers, and how often it began anew, as each source tells it."""

from __future__ import annotations

from handrail.plugin.events import CORE
from handrail.records import ProcessEvent, ProcessEventKind

_GONE = (ProcessEventKind.DEAD, ProcessEventKind.STOPPED)


class Restarts:
    """Starts of the engine's core that followed an end of one, by the plugin's word. ``count``: since the sidecar's start."""

    def __init__(self) -> None:
        self.count = 0
        self._gone = 0  # cores that ended and were not replaced yet

    def take(self, event: ProcessEvent) -> None:
        if event.process_kind != CORE:
            return
        if event.kind in _GONE:
            self._gone += 1
        elif event.kind is ProcessEventKind.RESTARTED:
            self.count += 1
        elif event.kind is ProcessEventKind.STARTED and self._gone:
            self._gone -= 1
            self.count += 1
