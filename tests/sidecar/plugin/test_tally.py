"""Count hand-offs by outcome."""

from __future__ import annotations

from typing import Any

import pytest

from builders.exchanges import PROCESS
from handrail.records import FetchEffect, KvFetch, KvPublish, Source, SpanIds
from handrail_sidecar.plugin_merge.handoff_counters import MAX_REASONS, HandOffTally, end_of, outcome_of

IDS = SpanIds(trace_id="a" * 32, span_id="b" * 16)
COMMON: dict[str, Any] = {"process": PROCESS, "source": Source.PLUGIN, "ids": IDS, "engine": "vllm", "request_id": "r"}


def fetch(**changed: Any) -> KvFetch:
    return KvFetch(**{**COMMON, "known_unix_ns": 10**18, "ranks_done": 1, **changed})


def publish(**changed: Any) -> KvPublish:
    return KvPublish(**{**COMMON, "published_unix_ns": 10**18, **changed})


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({"noticed_ns": 5}, "ok"),
        ({"failure": "notification_failed", "noticed_ns": 5}, "ok"),  # the KV arrived; only P was not notified
        ({"failure": "transfer_failed", "ranks_done": 0}, "failed"),
        ({"failure": "transfer_failed", "effect": FetchEffect.FAILED, "request_status": "error"}, "failed"),
        ({"failure": "transfer_failed", "effect": FetchEffect.RECOMPUTED}, "recomputed"),
        ({"request_status": "aborted"}, "aborted"),
        ({"request_status": "engine_lost"}, "unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_outcomes(changed: dict[str, Any], outcome: str) -> None:
    assert outcome_of(fetch(**changed)) == outcome


@pytest.mark.parametrize(
    ("changed", "end"),
    [
        ({"read_ns": 1, "freed_ns": 2}, "read"),
        ({"done_ns": 1, "freed_ns": 2}, "read"),
        ({"expired_ns": 1, "freed_ns": 2}, "expired"),
        ({"expired_ns": 1, "late_read_ns": 9}, "stale_read"),
        ({"failure": "engine_lost"}, "lost"),
        ({"freed_ns": 2}, "unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ends(changed: dict[str, Any], end: str) -> None:
    assert end_of(publish(**changed)) == end


def test_open_ones_do_not_count_and_every_outcome_begins_at_nought() -> None:
    tally = HandOffTally()
    tally.take(fetch(provisional=True))
    tally.take(publish(provisional=True))
    assert set(tally.fetches.values()) == set(tally.publishes.values()) == {0}
    tally.take(fetch(bytes_moved=10))
    assert (tally.fetches["ok", ""], tally.bytes_fetched) == (1, 10)


def test_reasons_are_bounded() -> None:
    tally = HandOffTally()
    for n in range(100):
        tally.take(fetch(failure=f"reason_{n}", ranks_done=0))
    assert len({reason for _, reason in tally.fetches}) == MAX_REASONS + 1
    assert sum(tally.fetches.values()) == 100
