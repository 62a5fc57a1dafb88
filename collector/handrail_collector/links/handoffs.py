"""Read what the figures of a link need of its hand-offs: engines, times and bytes.

``Flow`` holds the bytes moved over time as columns, to compare with counters. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from handrail.kv_outcomes import FAILURES, FetchOutcome
from handrail_collector.rows import FetchRow

UNKNOWN: Final = "?"
LEAST_NS: Final = 1_000_000
"""Least duration of a piece; a shorter one is spread over this time."""

_FAILED: Final = frozenset(outcome.value for outcome in FAILURES)
_LOADED: Final = _FAILED | {FetchOutcome.HUNG.value, FetchOutcome.TIMED_OUT.value, FetchOutcome.ABORTED.value}


@dataclass(frozen=True, slots=True)
class EngineLink:
    """Producer and consumer of KV.

    For the KV of an earlier turn that goes back, the producer is D and the consumer is P.
    """

    producer: str  # host:port of the engine, else of its side channel, else its id
    consumer: str
    producer_host: str = ""
    consumer_host: str = ""

    @property
    def one_host(self) -> bool:
        """Whether both engines are on one host, as far as is known."""
        return bool(self.producer_host) and self.producer_host == self.consumer_host

    @property
    def hosts(self) -> str:
        """Hosts as in ``RequestRow``: ``P>D``; '' where a host is not known."""
        return f"{self.producer_host}>{self.consumer_host}" if self.producer_host and self.consumer_host else ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that moved without a known pause.

    They moved from ``begin_ns`` to ``end_ns``; they may have ended at most ``bound_ns`` earlier.
    """

    begin_ns: int
    end_ns: int
    bytes: int
    bound_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """One hand-off; times are wall clock of the host that moved the bytes.

    ``pieces``: empty where its times or bytes are not known.
    ``taken_ns``: from known to the consumer until seen by its scheduler.
    """

    link: EngineLink
    started_unix_ns: int
    pieces: tuple[Piece, ...] = ()
    outcome: str = FetchOutcome.UNKNOWN.value
    connector: str = ""
    mode: str = ""  # pull | push
    backwards: bool = False  # KV of an earlier turn, from D to P
    open: bool = False
    taken_ns: int | None = None
    handshake_ns: int | None = None  # 0: the peer was known
    descriptors: int | None = None
    counted: bool = True  # the transport counted the bytes; else they come from the size of the blocks

    @property
    def failed(self) -> bool:
        """Whether the outcome is a failure."""
        return self.outcome in _FAILED

    @property
    def loaded(self) -> bool:
        """Whether it ended without its KV: failed, given up, or still waiting."""
        return self.outcome in _LOADED

    @property
    def bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.bytes for piece in self.pieces)


def hand_offs(rows: Iterable[FetchRow]) -> list[HandOff]:
    """Return the hand-offs of ``rows`` that have a consumer, by their start."""
    found = [hand_off(row) for row in rows if row.number >= 0 and (row.consumer_instance or row.consumer_host)]
    return sorted(found, key=lambda one: one.started_unix_ns)


def hand_off(row: FetchRow) -> HandOff:
    """Read one row.

    The bytes are known where the transfer was timed and they were counted or, after a success, expected.
    """
    well = row.outcome not in _LOADED and not row.open
    moved = row.bytes_moved if row.bytes_moved is not None else row.bytes_expected if well else None
    pieces: tuple[Piece, ...] = ()
    if row.posted_ns is not None and row.transfer_ns is not None and moved is not None:
        begin = row.started_unix_ns + row.posted_ns
        pieces = (Piece(begin, begin + row.transfer_ns, moved, row.transfer_bound_ns or 0),)
    return HandOff(
        link=EngineLink(
            producer=row.producer_instance or row.producer_address or row.producer_engine_id or UNKNOWN,
            consumer=row.consumer_instance or row.consumer_engine_id or UNKNOWN,
            producer_host=row.producer_host or "",
            consumer_host=row.consumer_host or "",
        ),
        started_unix_ns=row.started_unix_ns,
        pieces=pieces,
        outcome=row.outcome,
        connector=row.connector or "",
        mode=row.mode or "",
        backwards=row.direction == "d_to_p",
        open=row.open,
        taken_ns=row.duration_ns,
        handshake_ns=row.handshake_ns,
        descriptors=row.descriptors,
        counted=row.bytes_moved is not None,
    )


@dataclass(frozen=True, slots=True)
class Flow:
    """Pieces of transfers as columns of equal length.

    Each piece has its begin and end by one clock, its bytes, and how much earlier it may have ended.
    """

    begin_ns: Any  # int64
    end_ns: Any
    size: Any  # float64
    bound_ns: Any

    @staticmethod
    def of(pieces: Sequence[Piece]) -> Flow:
        """Build columns from pieces, in their order."""
        columns = [(piece.begin_ns, piece.end_ns, piece.bytes, piece.bound_ns) for piece in pieces]
        begin, end, size, bound = zip(*columns, strict=True) if columns else ((), (), (), ())
        return Flow(np.array(begin, np.int64), np.array(end, np.int64), np.array(size, np.float64), np.array(bound, np.int64))

    def __len__(self) -> int:
        return len(self.begin_ns)

    @property
    def bytes(self) -> float:
        """Bytes of all pieces."""
        return float(self.size.sum())

    def only(self, chosen: Any) -> Flow:
        """Return the pieces that the mask selects."""
        return Flow(self.begin_ns[chosen], self.end_ns[chosen], self.size[chosen], self.bound_ns[chosen])

    def and_also(self, more: Flow) -> Flow:
        """Return the pieces of both flows."""
        pairs = (
            (self.begin_ns, more.begin_ns),
            (self.end_ns, more.end_ns),
            (self.size, more.size),
            (self.bound_ns, more.bound_ns),
        )
        return Flow(*(np.concatenate(pair) for pair in pairs))

    def between(self, edges_ns: Any) -> Any:
        """Return the bytes from each edge to the next.

        Each piece moves at an even rate over its time.
        """
        if not len(self):
            return np.zeros(max(0, len(edges_ns) - 1))
        length = np.maximum(LEAST_NS, self.end_ns - self.begin_ns)
        rate = self.size / length
        return np.diff(_ramps(self.begin_ns, rate, edges_ns) - _ramps(self.begin_ns + length, rate, edges_ns))


def _ramps(begin_ns: Any, rate: Any, edges_ns: Any) -> Any:
    """Return, at each edge, the sum of ramps of ``rate`` from ``begin_ns`` on."""
    order = np.argsort(begin_ns, kind="stable")
    base = edges_ns[0]
    began, rates = (begin_ns[order] - base).astype(np.float64), rate[order]
    slope, lead = np.concatenate([[0.0], np.cumsum(rates)]), np.concatenate([[0.0], np.cumsum(rates * began)])
    running = np.searchsorted(began, (edges_ns - base).astype(np.float64), side="right")
    return slope[running] * (edges_ns - base) - lead[running]
