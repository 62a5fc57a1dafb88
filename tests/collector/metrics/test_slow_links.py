"""The gauge of links that are slow now.

It shows the links' own findings, is bounded, and is absent where nothing is known.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builders.links import BEGAN, S, fetch_row
from handrail_collector.links.findings import SLOW, LinkFinding, LinkFindingKind
from handrail_collector.links.handoffs import hand_offs
from handrail_collector.links.report import LinkLine, link_lines
from handrail_collector.metrics.slow_links import LEAST_TIMED, MOST_PAIRS, WINDOW_NS, SlowLinks, slow
from handrail_collector.rows import FetchRow
from handrail_collector.store.manifest import MANIFEST
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table


def crawling(number: int, pair: int = 0) -> FetchRow:
    """Return a hand-off of 100 MB in a second, between two hosts."""
    ends = {
        "producer_instance": f"p{pair}:8000",
        "producer_host": f"p{pair}",
        "consumer_instance": f"d{pair}:8000",
        "consumer_host": f"d{pair}",
    }
    return fetch_row(2 * number, transfer_ns=S, duration_ns=2 * S, **ends)


def lines(pairs: int = 1, each: int = LEAST_TIMED) -> list[LinkLine]:
    return link_lines(hand_offs(crawling(pair * each + n, pair) for pair in range(pairs) for n in range(each)))


def test_a_slow_link_is_exported_with_its_finding_from_producer_to_consumer() -> None:
    assert slow(lines()) == {("p0:8000", "d0:8000", "slow_path"): 1.0}


def test_a_fast_link_is_not_there() -> None:
    assert slow(link_lines(hand_offs(fetch_row(n) for n in range(8)))) == {}


def test_few_timed_hand_offs_make_no_page_by_their_rate_but_by_their_transport() -> None:
    few = lines(each=LEAST_TIMED - 1)
    assert few[0].slow
    assert slow(few) == {}
    on_tcp = replace(few[0], findings=(LinkFinding(kind=LinkFindingKind.TCP_THOUGH_RDMA, seen=""), *few[0].findings))
    assert slow([on_tcp]) == {("p0:8000", "d0:8000", "tcp_though_rdma"): 1.0}


@pytest.mark.parametrize("kind", sorted(set(LinkFindingKind) - SLOW))
def test_what_is_only_odd_is_not_slow(kind: LinkFindingKind) -> None:
    assert slow([replace(line, findings=(LinkFinding(kind=kind, seen=""),)) for line in lines()]) == {}


def test_the_pairs_are_bounded_to_those_that_moved_most() -> None:
    found = slow(lines(MOST_PAIRS + 20))
    assert len({labels[:2] for labels in found}) == MOST_PAIRS


async def test_it_looks_at_the_last_ten_minutes_of_the_store(tmp_path: Path) -> None:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    publisher.publish(0, 10, 0, [], [], flat={Table.KV_FETCHES: [crawling(n) for n in range(8)]})
    publisher.close()
    now = BEGAN + 60 * S
    links = SlowLinks(StoreReader(tmp_path / "store", threads=1), now_unix_ns=lambda: now)
    links.look()
    assert (links.found, links.looks, links.failures) == ({("p0:8000", "d0:8000", "slow_path"): 1.0}, 1, 0)
    now += WINDOW_NS
    links.look()
    assert links.found == {}
    await links.shutdown()


def test_an_unreadable_store_exports_nothing_and_is_counted(tmp_path: Path) -> None:
    links = SlowLinks(StoreReader(tmp_path, threads=1))
    links.found = {("p", "d", "slow_path"): 1.0}
    (tmp_path / MANIFEST).write_text("00000000 {}\n00000000 {}\n")
    links.look()
    assert (links.found, links.failures) == ({}, 1)


async def test_it_starts_and_ends_like_every_part(tmp_path: Path) -> None:
    links = SlowLinks(StoreReader(tmp_path, threads=1))
    await links.shutdown()
    links = SlowLinks(StoreReader(tmp_path, threads=1), every_s=3600)
    await links.start()
    await links.shutdown()
    await links.shutdown()
    assert links.looks == 0
