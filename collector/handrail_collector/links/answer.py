"""The links of a period from a store, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from handrail_collector.api.live import newest_fetches
from handrail_collector.links.handoffs import hand_offs
from handrail_collector.links.lines import LinkLine, Offsets, link_lines
from handrail_collector.links.plain import plain, rest
from handrail_collector.links.question import DEFAULT_NS, LinksQuestion
from handrail_collector.rows import ClockPairRow, FetchRow, LinkFactRow
from handrail_collector.store.fetch_filter import peers
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

MOST_HAND_OFFS: Final = 100_000
"""Of a longer period the last ones; its figures say so."""

_MOST_FACTS: Final = 20_000
_MOST_PAIRS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Links of a period. ``limited``: there were more hand-offs, these are the last."""

    since_unix_ns: int
    until_unix_ns: int
    hand_offs: int
    limited: bool
    lines: tuple[LinkLine, ...]


def answered(reader: StoreReader, question: LinksQuestion, now_unix_ns: int, live: Sequence[FetchRow] = ()) -> dict[str, Any]:
    """As JSON (docs/http-api.md). ``live``: hand-offs that are not stored yet. Raises ``StoreDamagedError``."""
    latest = max((min(row.started_unix_ns, now_unix_ns) for row in live), default=reader.latest(Table.KV_FETCHES, now_unix_ns))
    until = question.until_unix_ns
    if until is None:
        stale = question.since_unix_ns is None and latest is not None and latest < now_unix_ns - DEFAULT_NS
        until = latest + 1 if stale and latest is not None else now_unix_ns
    since = question.since_unix_ns if question.since_unix_ns is not None else until - DEFAULT_NS
    found = period(reader, since, max(until, since + 1), peer=question.peer, live=live)
    told, others = found.lines[: question.limit], found.lines[question.limit :]
    return {
        "since_unix_ns": found.since_unix_ns,
        "until_unix_ns": found.until_unix_ns,
        "latest_unix_ns": latest,
        "hand_offs": found.hand_offs,
        "limited": found.limited,
        "links": [plain(line) for line in told],
        "other": rest(others) if others else None,
    }


def period(
    reader: StoreReader,
    since_unix_ns: int,
    until_unix_ns: int,
    *,
    peer: str | None = None,
    live: Sequence[FetchRow] = (),
    most: int = MOST_HAND_OFFS,
) -> Period:
    """The links of a period, those that moved most first."""
    stored = reader.recent_fetches(since_unix_ns, until_unix_ns, most)
    rows = [
        row
        for row in newest_fetches([*stored, *live])
        if since_unix_ns <= row.started_unix_ns < until_unix_ns and (peer is None or peer in peers(row))
    ]
    events = [
        *reader.events(Table.LINK_FACTS, since_unix_ns, until_unix_ns, _MOST_FACTS),
        *reader.events(Table.CLOCK_PAIRS, since_unix_ns, until_unix_ns, _MOST_PAIRS),
    ]
    facts = [row for row in events if isinstance(row, LinkFactRow)]
    pairs = [row for row in events if isinstance(row, ClockPairRow)]
    handed = hand_offs(rows)
    return Period(
        since_unix_ns=since_unix_ns,
        until_unix_ns=until_unix_ns,
        hand_offs=len(handed),
        limited=len(stored) >= most,
        lines=tuple(link_lines(handed, (), facts, offsets(pairs))) if handed else (),
    )


def offsets(pairs: Sequence[ClockPairRow]) -> Offsets:
    """The last word on each pair of hosts; ``pairs`` latest first."""
    found: dict[tuple[str, str], tuple[int | None, int | None]] = {}
    for pair in pairs:
        found.setdefault((pair.host, pair.peer_host), (pair.low_ns, pair.high_ns))
    return found
