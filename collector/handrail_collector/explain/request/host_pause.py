"""For how long an engine's process stood still while a request waited there for its first token. Pure.

What stood still shows up in whatever phase it fell into: a load that was not started, one that was not seen to have ended, a
step. So it is kept of the request beside its phases. What can account for the time is weighed as for stalls of a stream
(``stall_evidence.shares``): a pause without a reason may be a long step's that kept the interpreter's lock.
"""

from __future__ import annotations

from dataclasses import replace

from handrail_collector.explain.request.path import Path, ProcessEvidence
from handrail_collector.explain.stalls.evidence import Interval, StallCause, StallWindow, attribute_time
from handrail_collector.rows import RequestRow
from handrail_collector.stitch.engine_activity import Activity, EngineTimeline


def with_standstills(row: RequestRow, path: Path, activity: Activity) -> RequestRow:
    """``row``, of ``path``, with what the engines' processes told of pauses."""
    return replace(
        row,
        prefill_paused_ns=_paused_ns(path.prefill, activity.of(row.prefill_instance or "")),
        decode_paused_ns=_paused_ns(path.decode, activity.of(row.decode_instance or "")),
    )


def has_pause_data(row: RequestRow, activity: Activity) -> bool:
    """Whether an engine of ``row`` has told of any pause, ever: else there is nothing to look for."""
    at = (activity.of(instance) for instance in (row.prefill_instance, row.decode_instance) if instance)
    return any(doings is not None and len(doings.pauses) > 0 for doings in at)


def _paused_ns(visit: ProcessEvidence | None, doings: EngineTimeline | None) -> int | None:
    window = _window(visit) if visit is not None and doings is not None else None
    if window is None or doings is None or not any(doings.pauses.during(*window)):
        return None
    return attribute_time(StallWindow(begin=window[0], end=window[1], median_ns=0, doings=doings)).ns.get(StallCause.HOST_PAUSE)


def _window(visit: ProcessEvidence) -> Interval | None:
    """From its arrival there to its first token, or at P to its answer, by that host's wall clock; None where nobody knows."""
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
