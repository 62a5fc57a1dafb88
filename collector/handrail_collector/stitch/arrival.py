"""Replace impossible times of a record by the time of its arrival.

Rows and spans keep the times that they came with.
What the collector learns from them is bounded by the arrival, so that nothing waits for a time in the future: otherwise one
record stamped 2099 would be the newest fact about its engine for 73 years.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from handrail.records import EngineFacts, EngineTimes, Iteration, KvFetch, KvPublish, LogFact, PluginSpan, ProcessEvent
from handrail.records.devices import DeviceRun

DAY_NS: Final = 86_400 * 10**9
AHEAD_NS: Final = DAY_NS
"""How far ahead of its arrival a record's time may lie.

Clocks of a fleet may differ, and a host may use a wrong time zone; no host is a day ahead.
"""

OLD_NS: Final = 30 * DAY_NS
"""How old a record's time may be at its arrival.

A spool may keep records for days while no collector listens.
"""

FUTURE: Final = "future"
OLD: Final = "old"
REASONS: Final = (FUTURE, OLD)

Learned = EngineFacts | ProcessEvent | LogFact


def reason_of(at_unix_ns: int, received_unix_ns: int) -> str | None:
    """Return why a record cannot have happened then: ``future``, ``old``, or None.

    None: the time is plausible for a record that was received at ``received_unix_ns``.
    """
    if at_unix_ns > received_unix_ns + AHEAD_NS:
        return FUTURE
    return OLD if at_unix_ns < received_unix_ns - OLD_NS else None


def bounded(at_unix_ns: int, received_unix_ns: int) -> int:
    """Return ``at_unix_ns``, or the arrival where that time lies ahead of it."""
    return received_unix_ns if at_unix_ns > received_unix_ns + AHEAD_NS else at_unix_ns


def as_of_arrival(record: Learned, received_unix_ns: int) -> Learned:
    """Return ``record`` with no time that lies ahead of its arrival."""
    at = bounded(record.at_unix_ns, received_unix_ns)
    if isinstance(record, LogFact):
        last = bounded(record.last_unix_ns, received_unix_ns)
        if (at, last) != (record.at_unix_ns, record.last_unix_ns):
            return replace(record, at_unix_ns=at, last_unix_ns=max(at, last))
        return record
    return record if at == record.at_unix_ns else replace(record, at_unix_ns=at)


def start_of(event: PluginSpan | Iteration | ProcessEvent | EngineFacts | LogFact) -> int:
    """Return when the event in a sidecar's log record began."""
    if isinstance(event, Iteration):
        return event.started_unix_ns
    if isinstance(event, EngineTimes):
        return event.queued_unix_ns
    if isinstance(event, KvFetch):
        return event.known_unix_ns
    return event.published_unix_ns if isinstance(event, KvPublish) else event.at_unix_ns


def latest_of(record: Iteration | KvFetch | ProcessEvent | DeviceRun) -> int:
    """Return the latest time that an engine's record holds."""
    if isinstance(record, Iteration):
        return record.started_unix_ns + record.duration_ns
    if isinstance(record, KvFetch):
        return record.known_unix_ns + max(record.posted_ns or 0, record.done_ns or 0, record.noticed_ns or 0)
    return max(record.at, default=0) if isinstance(record, DeviceRun) else record.at_unix_ns + record.duration_ns
