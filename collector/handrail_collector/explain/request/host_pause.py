"""Measure how long an engine's process paused before a request's first token.

A pause shows up in whatever phase it falls into: a load that starts late, an end that is noticed late, a longer step. So the
row keeps it beside the phases.
Causes are weighed as for stalls of a stream (``stall_evidence.shares``): a pause without a reason may belong to a long step
that held the interpreter's lock.
Pure.
"""

from __future__ import annotations

from dataclasses import replace

from handrail_collector.explain.request.path import Path, ProcessEvidence
from handrail_collector.explain.stalls.evidence import Interval, StallCause, StallWindow, attribute_time
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.engine_activity import Activity, EngineTimeline


def with_standstills(row: RequestRow, path: Path, activity: Activity) -> RequestRow:
    """Return ``row`` with the pauses of the engines' processes on ``path``."""
    return replace(
        row,
        prefill_paused_ns=_paused_ns(path.prefill, activity.of(row.prefill_instance or "")),
        decode_paused_ns=_paused_ns(path.decode, activity.of(row.decode_instance or "")),
    )


def has_pause_data(row: RequestRow, activity: Activity) -> bool:
    """Whether an engine of ``row`` has ever reported a pause.

    Without one there is nothing to look for.
    """
    at = (activity.of(instance) for instance in (row.prefill_instance, row.decode_instance) if instance)
    return any(doings is not None and len(doings.pauses) > 0 for doings in at)


def _paused_ns(visit: ProcessEvidence | None, doings: EngineTimeline | None) -> int | None:
    window = _window(visit) if visit is not None and doings is not None else None
    if window is None or doings is None or not any(doings.pauses.during(*window)):
        return None
    return attribute_time(StallWindow(begin=window[0], end=window[1], median_ns=0, doings=doings)).ns.get(StallCause.HOST_PAUSE)


def _window(visit: ProcessEvidence) -> Interval | None:
    """Return the time from arrival to first token there; at P to its answer.

    By that host's wall clock; None where unknown.
    """
    exchange, run, engine = visit.exchange, visit.first_run, visit.engine
    begin, lasted = 0, None
    if exchange is not None:
        begin, lasted = exchange.arrival_unix_ns, exchange.ttft_token_ns
        lasted = exchange.duration_ns if lasted is None else lasted
    elif run is not None and run.times is not None:
        begin, lasted = run.times.queued_unix_ns, run.times.first_token_ns
    elif engine is not None:
        begin, lasted = engine.start_unix_ns, engine.ttft_ns
    return (begin, begin + lasted) if begin and lasted else None
