"""Outcomes of a KV fetch, a closed set, and those that count as failures."""

from __future__ import annotations

from enum import Enum


class FetchOutcome(str, Enum):
    """Outcome of one KV fetch.

    The client's result is separate: HTTP 200 does not mean ``OK``.
    """

    OK = "ok"
    FAILED = "failed"  # and the request with it
    RECOMPUTED = "recomputed"  # failed, and the engine computed the prompt itself
    RETRIED = "retried"  # failed, and a later load of the same request went well
    EXPIRED = "expired"  # the lease ended before the read, and the reader knew
    STALE_READ = "stale_read"  # the lease ended before the read, and the blocks were read all the same
    WRONG_REQUEST = "wrong_request"  # the blocks that were read were published for another request
    TIMED_OUT = "timed_out"  # the engine or transport gave up waiting
    FALLBACK_LOCAL = "fallback_local"  # no hand-off was wanted: the prompt was computed where it was decoded
    HUNG = "hung"  # open for longer than the limit
    ABORTED = "aborted"  # the request ended while it was open
    UNKNOWN = "unknown"  # the evidence cannot tell


FAILURES = frozenset(
    {
        FetchOutcome.FAILED,
        FetchOutcome.RECOMPUTED,
        FetchOutcome.RETRIED,
        FetchOutcome.EXPIRED,
        FetchOutcome.STALE_READ,
        FetchOutcome.WRONG_REQUEST,
        FetchOutcome.TIMED_OUT,
        FetchOutcome.HUNG,
    }
)
"""Outcomes that a count of failed fetches includes."""
