"""Which stamps count as cause and effect across hosts.

They are on the right side of a message, and nothing else counts.
"""

from __future__ import annotations

from typing import Any

import pytest

from builders.plugin import altered, fetch, publish, times
from builders.records import EPOCH, MS, engine, exchange, ids, kv, process
from builders.records import router as span
from handrail.clock_offset import OffsetInterval
from handrail.identity import JoinKind
from handrail.records import Direction, KvParams, Outcome, Role, Source
from handrail_collector.stitch import clocks as module
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.evidence import Item, evidence_of
from handrail_collector.stitch.group import RequestGroup
from handrail_collector.stitch.stitcher import SECOND, Stitcher


def stitched(*records: Item) -> HostClocks:
    """Return what one request taught about the clocks; all clocks are one."""
    stitcher = Stitcher()
    for offset, record in enumerate(records):
        stitcher.add(record, offset, EPOCH + 2 * SECOND)
    assert not any(decision.group.contradicting for decision in stitcher.sweep(EPOCH + 60 * SECOND))
    return stitcher.clocks


def learned(*records: Item, how: JoinKind = JoinKind.CONNECTOR) -> HostClocks:
    """Return what ``stitched`` returns, without the bounds from calls."""
    known = HostClocks()
    known.learn_request(group(*records, how=how))
    return known


def group(*records: Item, how: JoinKind = JoinKind.CONNECTOR) -> RequestGroup:
    made = RequestGroup([evidence_of(record, 0, EPOCH) for record in records])
    for each in made.evidence:
        each.how = how
    return made


def ms(interval: OffsetInterval | None) -> list[float | None]:
    """Return a pair's bounds in ms.

    The drift allowance widens both, for the second that these requests take.
    """
    assert interval is not None
    return [None if bound is None else bound / MS for bound in (interval.low_ns, interval.high_ns)]


def about(low: float | None, high: float | None) -> list[Any]:
    return [None if bound is None else pytest.approx(bound, abs=0.15) for bound in (low, high)]


def holds_zero(known: HostClocks) -> bool:
    return all((i.low_ns or 0) <= 0 <= (i.high_ns or 0) for i in known.intervals().values())


EDGE = exchange(Role.EDGE, 0, 1000, ttft_ms=300)


# --- calls ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_the_middlewares_end_is_stamped_after_its_bytes_left_and_bounds_nothing(stream: bool) -> None:
    last: dict[str, Any] = {"last_content_ns": 868 * MS} if stream else {"ttfb_ns": 868 * MS}
    d = exchange(Role.DECODE, 130, 871, parent=EDGE, host="h-d", source=Source.MIDDLEWARE, stream=stream, **last)
    known = stitched(EDGE, d)
    assert ms(known.between("h1", "h-d", EPOCH)) == about(-2, 130)


def test_a_middleware_that_saw_no_content_says_nothing_of_the_answer() -> None:
    d = exchange(Role.DECODE, 130, 871, parent=EDGE, host="h-d", source=Source.MIDDLEWARE)
    assert ms(stitched(EDGE, d).between("h1", "h-d", EPOCH)) == about(None, 130)


@pytest.mark.parametrize(
    "loser",
    [
        exchange(Role.DECODE, 135, 870, parent=EDGE, host="h-l", instance="l:1", outcome=Outcome.CLIENT_DISCONNECT),
        engine(Role.DECODE, 135, 870, parent=EDGE, host="h-l", instance="l:1", outcome=Outcome.ABORTED),
        times(Role.DECODE, 135, 10, 20, 870, parent=EDGE, host="h-l", instance="l:1", status="aborted"),
        times(Role.DECODE, 135, 10, 20, None, parent=EDGE, host="h-l", instance="l:1", seen_ns=870 * MS, provisional=True),
    ],
    ids=["proxy", "engine", "plugin", "plugin-open"],
)
def test_the_loser_of_a_race_ends_when_it_likes(loser: Item) -> None:
    """The slower of two raced legs bounds nothing.

    The router called two engines and left one when the other had answered. The loser ends after the edge, on one clock.
    """
    known = stitched(EDGE, exchange(Role.DECODE, 130, 860, parent=EDGE, host="h-d", ttft_ms=160), loser)
    assert ms(known.between("h1", "h-l", EPOCH)) == about(None, 135)
    assert holds_zero(known)


def test_the_first_token_left_d_before_the_edge_saw_it() -> None:
    known = learned(EDGE, exchange(Role.DECODE, 130, 869, host="h-d", ttft_ms=169))
    assert ms(known.between("h1", "h-d", EPOCH + 300 * MS)) == about(-1, None)


def test_of_two_decodes_nobody_knows_whose_token_the_edge_saw() -> None:
    decodes = [exchange(Role.DECODE, 130, 860, host=f"h-{n}", instance=f"{n}:1", ttft_ms=169 + n) for n in (1, 2)]
    assert learned(EDGE, *decodes).intervals() == {}


# --- hand-offs --------------------------------------------------------------------------------------------------------------

P = exchange(Role.PREFILL, 10, 100, host="h-p", kv_out=kv("cmpl-req-a-0-0000aaaa"))
D = exchange(Role.DECODE, 111, 880, host="h-d", ttft_ms=160, kv_in=kv("cmpl-req-a-0-0000aaaa"))


def test_p_answered_before_d_was_called_with_that_answer() -> None:
    assert ms(learned(P, D).between("h-p", "h-d", EPOCH)) == about(None, 1)


def test_what_only_an_id_joined_proves_nothing() -> None:
    assert learned(P, D, how=JoinKind.REQUEST_KEY).intervals() == {}


@pytest.mark.parametrize("key", [{"transfer_id": "t"}, {"bootstrap_room": "7"}], ids=["mooncake", "sglang"])
def test_a_key_that_was_agreed_on_before_says_nothing_of_ps_answer(key: dict[str, str]) -> None:
    """P and D were called at once; D was called while P still computed."""
    kv_params = KvParams(do_remote_prefill=True, **key)  # type: ignore[arg-type]
    p = exchange(Role.PREFILL, 10, 500, host="h-p", kv_out=kv_params)
    assert learned(p, exchange(Role.DECODE, 11, 880, host="h-d", ttft_ms=160, kv_in=kv_params)).intervals() == {}


@pytest.mark.parametrize(("mode", "bound"), [("pull", 30.0), (None, 41.0), ("push", None)], ids=["pull", "not-said", "push"])
def test_kv_was_kept_before_d_knew_of_it(mode: str | None, bound: float | None) -> None:
    known = learned(publish(100, host="h-p", read_ms=None), fetch(130, host="h-d", posted_ms=11, mode=mode))
    assert ms(known.between("h-p", "h-d", EPOCH)) == about(None, bound)


@pytest.mark.parametrize(
    ("readers", "bound_ms", "least"),
    [
        pytest.param(1, 0, 200 - 205, id="done"),
        pytest.param(1, 30, 170 - 205, id="seen-done-at-a-poll"),
        pytest.param(1, 65, 141 - 205, id="asked-for-is-later"),
        pytest.param(2, 0, 141 - 205, id="two-ranks"),
    ],
)
def test_d_had_read_before_p_was_notified(readers: int, bound_ms: int, least: float) -> None:
    kept = publish(100, host="h-p", read_ms=105, readers=readers)
    load = fetch(130, host="h-d", posted_ms=11, done_ms=70, done_bound_ns=bound_ms * MS)
    assert ms(learned(kept, load).between("h-p", "h-d", EPOCH + 205 * MS)) == about(least, 30)


def test_one_request_bounds_the_edge_and_each_engine_from_both_sides() -> None:
    """The messages took 10, 1 and 9 ms.

    The time in between is P's and D's own, except for the drift of their clocks over it.
    """
    known = stitched(EDGE, altered(P, ids=ids(parent=EDGE)), altered(D, ids=ids(parent=EDGE), ttft_token_ns=180 * MS))
    assert ms(known.between("h1", "h-d", EPOCH + 200 * MS)) == about(-9, 11)
    assert ms(known.between("h1", "h-p", EPOCH + 200 * MS)) == about(-10, 10)


# --- routers ----------------------------------------------------------------------------------------------------------------


def test_a_routers_calls_are_related_to_those_that_they_reached() -> None:
    """A router's calls bound the clocks of the engines that they reach.

    The router takes the request at 2 ms, calls P at 6 ms and D at 111 ms.
    P is reached at 10 ms and answers at 110 ms. D is reached at 118 ms and answers until 990 ms.
    """
    here: dict[str, Any] = {"process": process(Role.ROUTER, host="h-r")}
    server = span(2, 990, parent=EDGE, **here)
    to_p, to_d = (span(at, 0, parent=server, kind="client", end_unix_ns=None, **here) for at in (6, 111))
    key = kv("cmpl-req-a-0-0000aaaa")
    p = exchange(Role.PREFILL, 10, 100, parent=to_p, host="h-p", kv_out=key)
    d = exchange(Role.DECODE, 118, 872, parent=to_d, host="h-d", ttft_ms=160, kv_in=key)
    known = learned(server, to_p, to_d, p, d)
    assert ms(known.between("h-r", "h-p", EPOCH + 50 * MS)) == about(-1, 4)
    assert ms(known.between("h-r", "h-d", EPOCH + 500 * MS)) == about(-2, 7)
    untold = learned(server, to_p, p)  # without the key that D was called with, P's answer is not part of a call
    assert ms(untold.between("h-r", "h-p", EPOCH + 6 * MS)) == about(None, 4)


# --- turns ------------------------------------------------------------------------------------------------------------------


def taken_back() -> tuple[Item, Item]:
    """Return the records of a KV that D keeps and P reads.

    D keeps the KV of an answer at 1000 ms. P knows of it at 5000 ms and has read it at 5070 ms. D is notified at 5072 ms.
    """
    back: dict[str, Any] = {"direction": Direction.D_TO_P, "host": "h-p"}
    kept = altered(publish(1000, rid="cmpl-req-a-0-0000dddd", read_ms=4072, **back | {"host": "h-d"}), engine_id="engine-d")
    load = fetch(5000, rid="cmpl-req-b-0-0000aaaa", peer="cmpl-req-a-0-0000dddd", role=Role.PREFILL, **back)
    return kept, altered(load, engine_id="engine-p", peer_engine_id="engine-d")


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0), (1, 0, 1)])
def test_kv_that_p_takes_back_relates_two_requests_whichever_is_decided_first(order: tuple[int, ...]) -> None:
    known = HostClocks()
    for turn in order:
        known.learn_request(group(taken_back()[turn]))
    # D's clock minus P's: D was notified 2 ms after P had read, and P knew of it 4 s after D kept it
    assert ms(known.between("h-p", "h-d", EPOCH + 5070 * MS)) == [pytest.approx(-4000, abs=1), pytest.approx(2, abs=1)]


def test_hand_offs_whose_other_side_never_reports_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACK", 3)
    known = HostClocks()
    for number in range(10):
        known.learn_request(group(altered(taken_back()[0], request_id=f"cmpl-{number}")))
    assert len(known._back) == 3
