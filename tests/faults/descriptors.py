"""Exhaust descriptors by silent connections and by too many streams.

Good senders run beside the silent connections.
"""

from __future__ import annotations

import resource
from functools import partial

from faults.silence import beside_silence
from faults.streams import many_streams
from faults.trial import Context, Got, NotRunError, Trial

_P99_MS = 100.0
_SILENT = 5000
_STREAMS = 700
_USUAL = 1024


def _needs(descriptors: int) -> None:
    """Raise ``NotRunError`` when this machine's hard limit is lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < descriptors:
        raise NotRunError(f"the hard limit of descriptors is {hard}, the trial needs {descriptors}: ulimit -Hn {descriptors}")


async def _silent(context: Context, descriptors: int | None) -> Got:
    """Flood a collector with silent connections.

    ``descriptors``: the collector's limit, soft and hard; None: this machine's.
    """
    _needs(_SILENT + 1000)
    seconds = context.scale(25.0, 600.0 if descriptors is None else 300.0)
    found = await beside_silence(context.folder, seconds, count=_SILENT, tls_share=0.5, descriptors=descriptors)
    senders = found["senders"]
    p99 = {name: each["p99_ms"] for name, each in senders.items()}
    got = f"{seconds:.0f} s, {found['flood']['held_most']} held at once, {found['flood']['refused']} refused; "
    got += f"{found['acknowledged_spans']} spans acknowledged, {found['lost_spans']} lost; p99 of acknowledgements "
    got += ", ".join(f"{name} {value:.0f} ms" for name, value in p99.items())
    got += f"; {'alive' if found['alive'] else 'ended'}, status {found['exit_status']}, load average {found['load']:.1f}"
    ok = found["alive"] and found["exit_status"] == 0 and not found["lost_spans"] and found["acknowledged_spans"] > 0
    return got, bool(ok and max(p99.values()) < _P99_MS)


async def _streams(context: Context, hard: int, whole: int | None) -> Got:
    """Open more streams than a sidecar has descriptors for.

    ``whole``: how many streams have to be whole; None: all that were taken, and the others refused explicitly.
    """
    _needs(max(hard, 2048))
    found = await many_streams(_STREAMS, _USUAL, hard)
    got = f"{found['whole']} of {found['count']} whole, {found['refused']} refused with 503 and Retry-After, "
    got += f"{sum(found['others'].values())} otherwise; counted {found['counted']}, {len(found['logged'])} lines of log; "
    got += f"/readyz {found['ready_during'][0]} during, {found['ready_after'][0]} after; one more after it "
    got += f"{'whole' if found['later'] else 'NOT whole'}; status {found['status']}, {found['tracebacks']} tracebacks"
    ok = not found["others"] and found["whole"] + found["refused"] == _STREAMS and found["later"]
    ok = ok and found["status"] == 0 and not found["tracebacks"] and found["counted"] == found["refused"]
    if whole is not None:
        return got, bool(ok and found["whole"] == whole)
    return got, bool(ok and found["refused"] > 0 and found["logged"] and found["ready_during"][0] == 503)


TRIALS: tuple[Trial, ...] = (
    Trial(
        name="descriptors.silent",
        group="descriptors",
        expected=f"{_SILENT} silent connections, half TLS: 0 acknowledged spans lost, p99 under {_P99_MS:.0f} ms, process alive",
        seconds=45,
        long_seconds=660,
        run=partial(_silent, descriptors=None),
    ),
    Trial(
        name="descriptors.silent_usual_limit",
        group="descriptors",
        expected=f"the same with {_USUAL} descriptors, soft and hard",
        seconds=45,
        long_seconds=360,
        run=partial(_silent, descriptors=_USUAL),
    ),
    Trial(
        name="descriptors.streams",
        group="descriptors",
        expected=f"{_STREAMS} streams at a soft limit of {_USUAL}, hard above: all whole",
        seconds=15,
        run=partial(_streams, hard=8192, whole=_STREAMS),
    ),
    Trial(
        name="descriptors.streams_hard_limit",
        group="descriptors",
        expected=f"{_STREAMS} streams at {_USUAL} descriptors, soft and hard: taken ones whole, the rest 503, counted and logged",
        seconds=15,
        run=partial(_streams, hard=_USUAL, whole=None),
    ),
)
