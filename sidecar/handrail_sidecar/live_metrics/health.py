"""Count restarts of the engine from the plugin's events."""

from __future__ import annotations

from handrail.plugin.events import CORE
from handrail.records import ProcessEvent, ProcessEventKind

_GONE = (ProcessEventKind.DEAD, ProcessEventKind.STOPPED)


class Restarts:
    """Counts starts of the engine's core that follow an end of one.

    Source: the plugin's events.
    ``count``: since the sidecar's start.
    """

    def __init__(self) -> None:
        self.count = 0
        self._gone = 0  # cores that ended and are not replaced yet

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
