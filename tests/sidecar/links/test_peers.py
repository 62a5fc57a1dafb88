"""KV fetched per peer, as the sidecar counts it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from builders.records import EPOCH, process
from handrail.records import FetchEffect, KvFetch, Role, Source, SpanIds
from handrail_sidecar.links.peers import MOST_INTERVALS, MOST_PEERS, OTHER, QUIET_NS, Covered, PeerTally
from handrail_sidecar.plugin_merge.handoff_counters import outcome_of

MS = 10**6


def fetch(peer: str = "10.0.0.4", *, at_ms: int = 0, took_ms: int = 100, size: int = 10**8, port: int | None = 5600) -> KvFetch:
    return KvFetch(
        process=process(Role.DECODE),
        source=Source.PLUGIN,
        ids=SpanIds(trace_id="1" * 32, span_id="2" * 16),
        engine="vllm",
        request_id="cmpl-a-0-00000000",
        known_unix_ns=EPOCH + at_ms * MS,
        peer_host=peer,
        peer_port=port,
        posted_ns=5 * MS,
        done_ns=(5 + took_ms) * MS,
        noticed_ns=(9 + took_ms) * MS,
        bytes_moved=size,
        ranks_done=1,
    )


def tally(*fetches: KvFetch) -> PeerTally:
    made = PeerTally(outcome_of)
    for each in fetches:
        made.take(each)
    return made


def test_bytes_and_busy_time_by_peer() -> None:
    made = tally(fetch(), fetch(at_ms=1000), fetch("10.0.0.5", took_ms=7))
    peer = made.peers["10.0.0.4:5600"]
    assert (peer.bytes_moved, peer.busy_ns, peer.fetches) == (2 * 10**8, 200 * MS, {"ok": 2})
    assert made.peers["10.0.0.5:5600"].busy_ns == 7 * MS


def test_time_in_which_two_overlap_counts_once() -> None:
    made = tally(fetch(), fetch(at_ms=50))
    assert made.peers["10.0.0.4:5600"].busy_ns == 150 * MS


def test_a_failed_one_moves_nothing() -> None:
    made = tally(replace(fetch(), effect=FetchEffect.FAILED, done_ns=None, bytes_moved=None))
    peer = made.peers["10.0.0.4:5600"]
    assert (peer.fetches, peer.bytes_moved, peer.busy_ns) == ({"failed": 1}, 0, 0)


def test_what_is_open_or_has_no_peer_is_not_counted() -> None:
    assert not tally(replace(fetch(), provisional=True), replace(fetch(), peer_host=None)).peers
    assert list(tally(fetch(port=None)).peers) == ["10.0.0.4"]


def test_peers_are_bounded_and_the_rest_is_other() -> None:
    made = tally(*(fetch(f"10.0.0.{number}") for number in range(MOST_PEERS + 3)))
    assert len(made.peers) == MOST_PEERS + 1
    assert made.peers[OTHER].fetches == {"ok": 3}


def test_one_that_is_quiet_for_an_hour_makes_room_and_no_count_is_lost() -> None:
    made = tally(*(fetch(f"10.0.0.{number}") for number in range(MOST_PEERS)))
    made.take(fetch("10.0.1.1", at_ms=QUIET_NS // MS))
    assert "10.0.1.1:5600" in made.peers
    assert made.peers[OTHER].fetches == {"ok": 1}
    assert sum(peer.bytes_moved for peer in made.peers.values()) == (MOST_PEERS + 1) * 10**8


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=MOST_INTERVALS))
def test_the_time_that_is_covered_is_exact_in_any_order(intervals: list[tuple[int, int]]) -> None:
    covered = Covered()
    total = sum(covered.add(begin, begin + length) for begin, length in intervals)
    assert total == len({at for begin, length in intervals for at in range(begin, begin + length)})


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 60)), min_size=MOST_INTERVALS, max_size=300))
def test_what_is_forgotten_makes_the_time_shorter_never_longer(intervals: list[tuple[int, int]]) -> None:
    covered = Covered()
    total = sum(covered.add(begin, begin + length) for begin, length in intervals)
    assert 0 <= total <= len({at for begin, length in intervals for at in range(begin, begin + length)})
    assert len(covered._known) <= MOST_INTERVALS
