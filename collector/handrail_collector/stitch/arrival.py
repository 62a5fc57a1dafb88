"""When a record's own times cannot be: then it counts as of its arrival, so that nothing waits for a time that lies ahead.

Rows and spans keep the times that they came with. What is learned from them does not: one record of 2099 would be the newest word
on its engine for 73 years.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from handrail.records import EngineFacts, EngineTimes, Iteration, KvFetch, KvPublish, LogFact, PluginSpan, ProcessEvent
from handrail.records.devices import DeviceRun

DAY_NS: Final = 86_400 * 10**9
AHEAD_NS: Final = DAY_NS
"""Clocks of a fleet may differ, and a time zone be taken for another; no host is a day ahead."""

OLD_NS: Final = 30 * DAY_NS
"""A spool may keep what it has for days while no collector listens."""

FUTURE: Final = "future"
OLD: Final = "old"
REASONS: Final = (FUTURE, OLD)

Learned = EngineFacts | ProcessEvent | LogFact


def reason_of(at_unix_ns: int, received_unix_ns: int) -> str | None:
    """Why this cannot be the time of what was received then; None where it can."""
    if at_unix_ns > received_unix_ns + AHEAD_NS:
        return FUTURE
    return OLD if at_unix_ns < received_unix_ns - OLD_NS else None


def bounded(at_unix_ns: int, received_unix_ns: int) -> int:
    """``at_unix_ns``, or the arrival where that lies ahead."""
    return received_unix_ns if at_unix_ns > received_unix_ns + AHEAD_NS else at_unix_ns


def as_of_arrival(record: Learned, received_unix_ns: int) -> Learned:
    """``record`` with no time that lies ahead of its arrival."""
    at = bounded(record.at_unix_ns, received_unix_ns)
    if isinstance(record, LogFact):
        last = bounded(record.last_unix_ns, received_unix_ns)
        if (at, last) != (record.at_unix_ns, record.last_unix_ns):
            return replace(record, at_unix_ns=at, last_unix_ns=max(at, last))
        return record
    return record if at == record.at_unix_ns else replace(record, at_unix_ns=at)


def start_of(event: PluginSpan | Iteration | ProcessEvent | EngineFacts | LogFact) -> int:
    """When what a log record of a sidecar tells began."""
    if isinstance(event, Iteration):
        return event.started_unix_ns
    if isinstance(event, EngineTimes):
        return event.queued_unix_ns
    if isinstance(event, KvFetch):
        return event.known_unix_ns
    return event.published_unix_ns if isinstance(event, KvPublish) else event.at_unix_ns


def latest_of(record: Iteration | KvFetch | ProcessEvent | DeviceRun) -> int:
    """The latest time that a record of what an engine did tells."""
    if isinstance(record, Iteration):
        return record.started_unix_ns + record.duration_ns
    if isinstance(record, KvFetch):
        return record.known_unix_ns + max(record.posted_ns or 0, record.done_ns or 0, record.noticed_ns or 0)
    return max(record.at, default=0) if isinstance(record, DeviceRun) else record.at_unix_ns + record.duration_ns
