"""Read what engines report about links, in their logs and metrics.

``handrail.kv`` recognises the lines: UCX's lanes, vLLM's transfer statistics, SGLang's queues and Mooncake's throughput. They
are stored as ``link_facts`` rows.
Metrics hold the share of transfer time that an engine spends on posting, which hands a transfer to the transport (case B05).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from handrail.records import EngineHistogram, EngineSample, LogFact, LogKind
from handrail_collector.event_rows import MINUTE_NS, key_of
from handrail_collector.rows import LinkFactRow

SECOND: Final = 10**9
NO_GPU_GET: Final = "ucx.no_nvlink"
QUEUE_WITHIN_NS: Final = MINUTE_NS
"""Longest time between the last log lines of ranks that are summed."""

RATE_EVERY_NS: Final = 5 * SECOND
"""Interval at which each rank of Mooncake logs the bytes that it moved."""

INTRA: Final = "intra-node"
INTER: Final = "inter-node"

_TRANSFER: Final = "kv_transfer_seconds"
_POST: Final = "kv_post_seconds"
_DESCRIPTORS: Final = "kv_transfer_descriptors"
_BYTES: Final = "kv_transfer_bytes"
POST_NAMES: Final = frozenset({_TRANSFER, _POST, _DESCRIPTORS, _BYTES})
"""Sampled quantities, by their names in ``handrail.records.quantities``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """Lane of an engine's remote memory access, as its log names it.

    ``nic``: '' where the log names none.
    """

    instance: str
    lane: str
    nic: str = ""
    reach: str = ""  # INTRA | INTER | "": not known
    recogniser: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posts:
    """Transfers of an engine: their mean time, and the part spent on posting."""

    instance: str
    transfers: int
    transfer_ns: int
    post_ns: int
    descriptors: int | None = None
    bytes: int | None = None

    @property
    def share(self) -> float:
        """Share of the transfer's time that posting took."""
        return self.post_ns / self.transfer_ns if self.transfer_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Requests that wait for their hand-off in a prefill engine.

    The values are the last that each rank logged, summed over ranks.
    """

    instance: str
    ranks: int
    bootstrapping: int  # D has not offered space yet
    transferring: int
    queued: int
    rate: float | None = None  # bytes a second, of all ranks; None: not known


def link_fact_row(fact: LogFact, offset: int) -> LinkFactRow | None:
    """Convert a log fact to a row; None where it does not concern a link.

    A minute keeps one row for each rank and kind of line; of rows with equal key, the later one.
    """
    if fact.kind not in (LogKind.TRANSPORT, LogKind.TRANSFER_STATS, LogKind.QUEUE_STATS) or not fact.process.instance:
        return None
    words, numbers = dict(fact.words), dict(fact.numbers)
    lane, rank = words.get("transport", ""), fact.ranks[0] if fact.ranks else ""
    minute = fact.last_unix_ns // MINUTE_NS
    who = fact.fact_id if "rate_mb_s" in numbers else rank  # Mooncake's ranks do not name themselves: no row may replace another
    return LinkFactRow(
        at_unix_ns=fact.last_unix_ns,
        key=key_of("link", fact.process.instance, who, fact.recogniser, lane, words.get("reach", ""), minute),
        offset=offset,
        instance=fact.process.instance,
        host=fact.process.host_name or fact.process.host,
        recogniser=fact.recogniser,
        rank=rank,
        lane=lane,
        nic=words.get("nic", ""),
        reach=words.get("reach", ""),
        transfers=_whole(numbers.get("transfers")),
        transfer_ns=_whole(numbers.get("avg_transfer_s"), SECOND),
        post_ns=_whole(numbers.get("avg_post_s"), SECOND),
        transfer_bytes=_whole(numbers.get("avg_bytes")),
        descriptors=_whole(numbers.get("avg_descriptors")),
        bootstrapping=_whole(numbers.get("unbootstrapped_reqs")),
        transferring=_whole(numbers.get("transferring_reqs")),
        queued=_whole(numbers.get("queue_reqs")),
        rate_bytes=_whole(numbers.get("rate_mb_s"), 1_000_000),
    )


def _whole(number: float | None, scale: int = 1) -> int | None:
    return None if number is None or not 0 <= number * scale < 2**63 else round(number * scale)


def lanes(rows: Iterable[LinkFactRow]) -> list[LaneFacts]:
    """Return each lane once."""
    found = {
        LaneFacts(instance=row.instance, lane=row.lane, nic=row.nic, reach=row.reach, recogniser=row.recogniser): None
        for row in rows
        if row.lane
    }
    return list(found)


def no_gpu_get(rows: Iterable[LinkFactRow]) -> list[str]:
    """Return the instances whose UCX does not read over ``cuda_ipc``."""
    return list(dict.fromkeys(row.instance for row in rows if row.recogniser == NO_GPU_GET))


def posts(rows: Iterable[LinkFactRow]) -> list[Posts]:
    """Average the transfers of each instance, weighted by their number.

    The means are per rank, so no rate of a link follows from them (case B05).
    """
    by_instance: dict[str, list[LinkFactRow]] = {}
    for row in rows:
        if row.transfers and row.transfer_ns is not None and row.post_ns is not None:
            by_instance.setdefault(row.instance, []).append(row)
    return [
        Posts(
            instance=instance,
            transfers=sum(row.transfers or 0 for row in link_fact_rows),
            transfer_ns=_mean(link_fact_rows, "transfer_ns") or 0,
            post_ns=_mean(link_fact_rows, "post_ns") or 0,
            descriptors=_mean(link_fact_rows, "descriptors"),
            bytes=_mean(link_fact_rows, "transfer_bytes"),
        )
        for instance, link_fact_rows in by_instance.items()
    ]


def _mean(rows: Iterable[LinkFactRow], name: str) -> int | None:
    pairs = [(row.transfers or 0, getattr(row, name)) for row in rows]
    known = [(weight, value) for weight, value in pairs if value is not None]
    weights = sum(weight for weight, _ in known)
    return round(sum(weight * value for weight, value in known) / weights) if weights else None


def queues(rows: Iterable[LinkFactRow]) -> list[Queue]:
    """Sum the last values of each instance's ranks.

    The rate of one rank is no bandwidth (case B22).
    """
    by_instance: dict[str, list[LinkFactRow]] = {}
    for row in sorted(rows, key=lambda row: row.at_unix_ns):
        if row.bootstrapping is not None or row.rate_bytes is not None:
            by_instance.setdefault(row.instance, []).append(row)
    return [queue for instance, link_fact_rows in by_instance.items() if (queue := _queue(instance, link_fact_rows)) is not None]


def _queue(instance: str, rows: Sequence[LinkFactRow]) -> Queue | None:
    last = {row.rank: row for row in rows if row.bootstrapping is not None}
    counted = [row for row in last.values() if row.at_unix_ns >= rows[-1].at_unix_ns - QUEUE_WITHIN_NS]
    rated = [row for row in rows if row.rate_bytes is not None]
    rates = [row.rate_bytes or 0 for row in rated if row.at_unix_ns > rated[-1].at_unix_ns - RATE_EVERY_NS]
    if not counted:
        return None
    return Queue(
        instance=instance,
        ranks=len(counted),
        bootstrapping=sum(row.bootstrapping or 0 for row in counted),
        transferring=sum(row.transferring or 0 for row in counted),
        queued=sum(row.queued or 0 for row in counted),
        rate=float(sum(rates)) if rates else None,
    )


def posts_of(samples: Iterable[EngineSample]) -> list[Posts]:
    """Compute the growth of each instance's histograms, first sample to last.

    After a counter reset, the growth counts from the reset.
    """
    by_instance: dict[str, list[EngineSample]] = defaultdict(list)
    for sample in samples:
        by_instance[sample.process.instance].append(sample)
    found = []
    for instance, engine_samples in by_instance.items():
        engine_samples.sort(key=lambda sample: sample.at_unix_ns)
        grown = {name: _grown(engine_samples[0], engine_samples[-1], name) for name in POST_NAMES}
        (transfers, seconds), (posted, post_seconds) = grown[_TRANSFER], grown[_POST]
        if transfers > 0 and posted > 0:
            found.append(
                Posts(
                    instance=instance,
                    transfers=transfers,
                    transfer_ns=round(seconds / transfers * 1e9),
                    post_ns=round(post_seconds / posted * 1e9),
                    descriptors=_mean_of(*grown[_DESCRIPTORS]),
                    bytes=_mean_of(*grown[_BYTES]),
                )
            )
    return found


def _grown(first: EngineSample, last: EngineSample, name: str) -> tuple[int, float]:
    """Return by how many values and by what sum the histograms of a name grew.

    The figures are summed over engines and transports.
    """
    if last is first:
        return 0, 0.0
    before = {_key(each): each for each in first.histograms if each.name == name}
    count, total = 0, 0.0
    for each in last.histograms:
        if each.name != name or each.total is None:
            continue
        old = before.get(_key(each))
        old_count, old_total = (old.count, old.total) if old is not None and old.total is not None else (0, 0.0)
        if old_count > each.count:  # the counter was reset, and no sample shows when
            old_count, old_total = 0, 0.0
        count += each.count - old_count
        total += max(0.0, each.total - old_total)
    return count, total


def _key(histogram: EngineHistogram) -> tuple[str, str, int]:
    return histogram.engine, histogram.label, histogram.start_unix_ns


def _mean_of(count: int, total: float) -> int | None:
    return round(total / count) if count > 0 else None
