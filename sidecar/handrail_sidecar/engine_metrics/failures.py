"""Turn failures that an engine's metrics page counts into facts of the hand-off.

A counter names no request. It shows that there was a failure, its kind, and between which two readings of the page.
The collector decides whose failure it was, since it knows the requests that were open then (``stitch/counted.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final

from handrail.records import LineClock, LogFact, LogKind, Process, Source
from handrail.records.log_events import COMPUTED_TOKENS, COUNTS, MIXED
from handrail_sidecar.engine_metrics.page import Key

COUNTED: Final[Mapping[str, LogKind]] = {
    "kv_transfer_failures": LogKind.FETCH_FAILED,
    "kv_receive_failures": LogKind.FETCH_FAILED,
    "kv_handshake_failures": LogKind.HANDSHAKE_FAILED,
    "kv_expired_requests": LogKind.EXPIRED,
    "kv_late_notifications": LogKind.STALE_READ,
}
"""Kind of failure by quantity of the schema.

A failed notification is no failure here: the KV has arrived.
"""

COMPUTED: Final = ("prompt_tokens_by_source", "local_compute")


def counted_failures(
    process: Process, grown: Mapping[Key, float], pages: Mapping[Key, float], from_unix_ns: int, to_unix_ns: int
) -> Iterator[LogFact]:
    """Yield one fact for each counter of failures that grew.

    ``grown``: by how much. ``pages``: all counters of the later page.
    """
    apart = any(name == "kv_expired_requests" for name, _, _ in pages)
    for (name, engine, label), count in sorted(grown.items()):
        kind = COUNTED.get(name)
        if kind is None or count < 1:
            continue
        computed = grown.get((COMPUTED[0], engine, COMPUTED[1]), 0.0 if (COMPUTED[0], engine, COMPUTED[1]) in pages else None)
        mixed = name == "kv_transfer_failures" and not apart
        yield LogFact(
            process=process,
            source=Source.METRICS,
            fact_id=_id(process.instance, name, engine, label, from_unix_ns),
            kind=kind,
            recogniser=f"metrics.{name}",
            at_unix_ns=from_unix_ns,
            last_unix_ns=to_unix_ns,
            clock=LineClock.RECEIPT,
            lines=int(count),
            ranks=(engine,) if engine else (),
            numbers=((COMPUTED_TOKENS, computed),) if computed is not None else (),
            words=tuple(word for word in (("transport", label), (COUNTS, MIXED if mixed else "")) if word[1]),
        )


def _id(*parts: object) -> str:
    return blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
