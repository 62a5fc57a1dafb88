"""Limits of the state that is held of an engine, and a mapping with a limit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

SECOND_NS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeLimits:
    """Limits and waits.

    Times are on the monotonic clock of the host, which engine and sidecar share.
    """

    requests: int = 20_000  # open ones
    fetches: int = 20_000
    publishes: int = 20_000
    closed: int = 4_096  # ended ones of which more events may come
    settle_ns: int = SECOND_NS  # an ended fetch waits so long for the events of every process
    orphan_ns: int = 60 * SECOND_NS  # worker events of requests that the scheduler never named
    provisional_after_ns: int = SECOND_NS
    provisional_every_ns: int = 5 * SECOND_NS
    silent_ns: int = 5 * SECOND_NS  # a process without events for so long is hung or dead
    stuck_ns: int = 20 * SECOND_NS  # no step for so long while requests wait
    rollup_ns: int = SECOND_NS
    lost_every_ns: int = 10 * SECOND_NS


V = TypeVar("V")


class Bounded(OrderedDict[str, V], Generic[V]):
    """A mapping of at most ``limit`` entries.

    A new entry replaces the oldest one, which counts in ``evicted``.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.evicted = 0

    def put(self, key: str, value: V) -> None:
        self[key] = value
        if len(self) > self.limit:
            self.popitem(last=False)
            self.evicted += 1
