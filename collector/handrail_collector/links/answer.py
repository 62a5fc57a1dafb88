"""Answer which links a period has, from a store, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from handrail.conventions import GPU_NVLINK_BYTES, GPU_NVLINK_LINE, GPU_PCIE_BYTES, GPU_PCIE_LINE
from handrail.device_counters.link import BYTES, ERRORS, UP
from handrail.records import EngineSample
from handrail_collector.links.devices import SECOND, DeviceCounts, counted
from handrail_collector.links.facts import POST_NAMES, Posts, posts_of
from handrail_collector.links.handoffs import EngineLink, HandOff, hand_offs
from handrail_collector.links.question import DEFAULT_LIMIT, DEFAULT_NS, LinksQuestion
from handrail_collector.links.report import LinkLine, Offsets, link_lines
from handrail_collector.links.summary import plain, rest
from handrail_collector.rows import ClockPairRow, FetchRow, LinkFactRow
from handrail_collector.store.filters import SampleFilter
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

MOST_HAND_OFFS: Final = 100_000
"""Most hand-offs that one answer reads.

A longer period keeps its last ones, and its figures note that.
"""

MOST_SAMPLES: Final = 60_000

_MOST_FACTS: Final = 20_000
_MOST_PAIRS: Final = 10_000
_DEVICES_A_HOST: Final = 16
_AROUND_NS: Final = 30 * SECOND
_NAMES: Final = frozenset({BYTES, ERRORS, UP, GPU_NVLINK_BYTES, GPU_PCIE_BYTES, GPU_NVLINK_LINE, GPU_PCIE_LINE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The links of one period.

    ``limited``: there were more hand-offs; these are the last ones.
    """

    since_unix_ns: int
    until_unix_ns: int
    hand_offs: int
    limited: bool
    lines: tuple[LinkLine, ...]


def answered(reader: StoreReader, question: LinksQuestion, now_unix_ns: int, live: Sequence[FetchRow] = ()) -> dict[str, Any]:
    """Answer the question as JSON (docs/http-api.md).

    ``live``: hand-offs that are not stored yet.
    Raises ``StoreDamagedError``.
    """
    known = [reader.latest(Table.KV_FETCHES, now_unix_ns), *(min(row.started_unix_ns, now_unix_ns) for row in live)]
    latest = max((at for at in known if at is not None), default=None)
    until = question.until_unix_ns
    if until is None:
        stale = question.since_unix_ns is None and latest is not None and latest < now_unix_ns - DEFAULT_NS
        until = latest + 1 if stale and latest is not None else now_unix_ns
    since = question.since_unix_ns if question.since_unix_ns is not None else until - DEFAULT_NS
    found = period(reader, since, max(until, since + 1), peer=question.peer, live=live, most_links=question.limit)
    reported_link_lines, others = found.lines[: question.limit], found.lines[question.limit :]
    return {
        "since_unix_ns": found.since_unix_ns,
        "until_unix_ns": found.until_unix_ns,
        "latest_unix_ns": latest,
        "kv_fetches": found.hand_offs,
        "limited": found.limited,
        "links": [plain(line) for line in reported_link_lines],
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
    most_links: int = DEFAULT_LIMIT,
    most_samples: int = MOST_SAMPLES,
) -> Period:
    """Read the links of a period, those with the most bytes first.

    Counters are read for the first ``most_links`` links only.
    """
    rows, limited = reader.recent_fetches(since_unix_ns, until_unix_ns, most, peer=peer, live=live)
    events = [
        *reader.events(Table.LINK_FACTS, since_unix_ns, until_unix_ns, _MOST_FACTS),
        *reader.events(Table.CLOCK_PAIRS, since_unix_ns, until_unix_ns, _MOST_PAIRS),
    ]
    facts = [row for row in events if isinstance(row, LinkFactRow)]
    pairs = [row for row in events if isinstance(row, ClockPairRow)]
    handed = hand_offs(rows)
    seen = devices(reader, since_unix_ns, until_unix_ns, handed, most_links, most_samples)
    return Period(
        since_unix_ns=since_unix_ns,
        until_unix_ns=until_unix_ns,
        hand_offs=len(handed),
        limited=limited,
        lines=tuple(link_lines(handed, seen, facts, offsets(pairs), engine_posts(reader, handed))),
    )


def devices(
    reader: StoreReader,
    since_unix_ns: int,
    until_unix_ns: int,
    handed: Sequence[HandOff],
    most_links: int,
    most_samples: int,
) -> list[DeviceCounts]:
    """Read the device counters at both ends of the links that moved most bytes.

    The readings cover the time of the transfers, one a second, and fewer where there are many hosts.
    """
    timed = [one for one in handed if one.pieces]
    moved: Counter[EngineLink] = Counter()
    for one in timed:
        moved[one.link] += one.bytes
    hosts = frozenset(
        host for link, _ in moved.most_common(most_links) for host in (link.producer_host, link.consumer_host) if host
    )
    if not hosts:
        return []
    first = max(since_unix_ns, min(one.started_unix_ns for one in timed)) - _AROUND_NS
    last = min(until_unix_ns, max(piece.end_ns for one in timed for piece in one.pieces)) + _AROUND_NS
    every_ns = max(SECOND, (last - first) * len(hosts) * _DEVICES_A_HOST // most_samples)
    wanted = SampleFilter(since_unix_ns=first, until_unix_ns=last, hosts=hosts, names=_NAMES, every_ns=every_ns)
    return counted(sample for table in (Table.LINK_SAMPLES, Table.GPU_SAMPLES) for sample in reader.samples(table, wanted))


def engine_posts(reader: StoreReader, handed: Sequence[HandOff]) -> list[Posts]:
    """Read the growth of the engines' transfer metrics over the hand-offs' time.

    The figure is the last sample less the first.
    """
    if not handed:
        return []
    hosts = frozenset(host for one in handed for host in (one.link.producer_host, one.link.consumer_host) if host)
    samples: list[EngineSample] = []
    for at in sorted({handed[0].started_unix_ns, handed[-1].started_unix_ns}):
        around = SampleFilter(since_unix_ns=at - _AROUND_NS, until_unix_ns=at + _AROUND_NS, hosts=hosts, names=POST_NAMES)
        samples += reader.samples(Table.ENGINE_SAMPLES, around)
    return posts_of(samples)


def offsets(pairs: Sequence[ClockPairRow]) -> Offsets:
    """Return the latest offset bounds of each pair of hosts.

    ``pairs``: latest first.
    """
    found: dict[tuple[str, str], tuple[int | None, int | None]] = {}
    for pair in pairs:
        found.setdefault((pair.host, pair.peer_host), (pair.low_ns, pair.high_ns))
    return found
