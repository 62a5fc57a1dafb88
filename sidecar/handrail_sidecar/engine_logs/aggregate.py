"""Fold recognised log lines into facts.

The lines of an engine's ranks, and the repeats of one problem, make one fact with a count.
Eight tensor-parallel ranks log one expired request eight times (case A01). A broken link logs hundreds of lines a second without
a request id (A25). A cache reports every 50 ms that it still waits (B13).
A fact is reported at its first line and again, as a higher revision under the same id, when more lines have come.
Ids are derived from the content of the line, so reading a log again makes the same facts.

Standard library only. The clock is passed in; every table is bounded.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from handrail.records import FAILED_FETCH_KINDS, LogFact, LogKind, Process, Source
from handrail_sidecar.engine_logs.fields import IDS, WORDS, exception_line
from handrail_sidecar.engine_logs.line_header import Head
from handrail_sidecar.engine_logs.line_pattern import EACH, Line

_BELOW_REQUESTS: Final = frozenset({LogKind.LINK_ERROR, LogKind.PEER_LOST, LogKind.TRANSFER_RETRIED})
_MOST_RANKS: Final = 64
_MOST_INFERRED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """Settings of the folder.

    ``quiet_ns``: lines of one key this far apart are two facts, unless they name a request, which fails once.
    ``inferred_ns``: how long before a request's failure a line without request id may lie to count as its likely cause.
    ``update_ns``: the least time between two reports of one fact.
    """

    most_facts: int = 4096
    quiet_ns: int = 60 * 10**9
    inferred_ns: int = 10 * 10**9
    update_ns: int = 5 * 10**9
    most_facts_per_second: int = 500


@dataclass(slots=True)
class FoldStats:
    """Counts since start.

    ``fetches_failed``: requests whose KV fetch failed, each once however many lines report it.
    """

    lines: dict[LogKind, int] = field(default_factory=lambda: dict.fromkeys(LogKind, 0))
    facts: dict[LogKind, int] = field(default_factory=lambda: dict.fromkeys(LogKind, 0))
    fetches_failed: int = 0
    recomputed: int = 0  # requests that the scheduler computed again, by its lines, which do not name them
    dropped: int = 0  # facts above the rate limit
    evicted: int = 0


@dataclass(slots=True)
class _OpenEvent:
    fact: LogFact
    reported_ns: int | None = None


class Folder:
    """Folds the lines of one engine's log into facts; one owner, no lock.

    ``add`` a line, then ``take`` the facts that are new or have changed.
    """

    def __init__(self, process: Process, source: Source, settings: FoldSettings | None = None) -> None:
        self.stats = FoldStats()
        self._process = process
        self._source = source
        self._settings = settings or FoldSettings()
        self._open: OrderedDict[str, _OpenEvent] = OrderedDict()
        self._changed: OrderedDict[str, _OpenEvent] = OrderedDict()
        self._last_of_prefix: OrderedDict[str, str] = OrderedDict()  # the fact that a traceback's lines belong to
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._below: OrderedDict[str, str] = OrderedDict()  # keys of open facts that name no request
        self._second = 0
        self._new_this_second = 0
        self._each: OrderedDict[str, int] = OrderedDict()  # equal lines with one time stamp, so that each keeps its own id

    def add(self, head: Head, line: Line, receipt_unix_ns: int) -> None:
        """Add one recognised line.

        ``receipt_unix_ns`` is used when the line carries no time.
        """
        at = head.at_unix_ns if head.at_unix_ns is not None else receipt_unix_ns
        self.stats.lines[line.kind] += 1
        if line.kind is LogKind.RECOMPUTED:
            self.stats.recomputed += int(line.numbers.get("requests", 1))
        for request_id in line.request_ids or (None,):
            key = self._key(line, request_id, head)
            known = self._open.get(key)
            if known is not None and self._continues(known.fact, at):
                self._repeat(key, known, head, line, at)
            elif self._within_rate(receipt_unix_ns):
                self._begin(key, head, line, request_id, at)
            else:
                self.stats.dropped += 1
                continue
            if request_id is not None and line.kind in FAILED_FETCH_KINDS:
                self._count_failed(request_id)
            self._last_of_prefix[head.prefix or head.process] = key
            self._last_of_prefix.move_to_end(head.prefix or head.process)
            _bound(self._last_of_prefix, 256)

    def continued(self, head: Head) -> None:
        """Add a line that no row recognises, which may be the last line of a traceback.

        Such a line holds the reason why the statement before it failed.
        """
        key = self._last_of_prefix.get(head.prefix or head.process)
        known = self._open.get(key) if key is not None else None
        if known is None or known.fact.reason is not None:
            return
        reason = exception_line(head.message)
        if reason is not None and key is not None:
            known.fact = replace(known.fact, reason=reason)
            self._changed[key] = known

    def take(self, now_ns: int, *, all_of_them: bool = False) -> Iterator[LogFact]:
        """Yield new facts, and changed facts that were not reported for a while."""
        for key, known in list(self._changed.items()):
            if known.reported_ns is None:
                self.stats.facts[known.fact.kind] += 1
            elif (
                all_of_them or not 0 <= now_ns - known.reported_ns < self._settings.update_ns
            ):  # negative: the clock was set back
                known.fact = replace(known.fact, revision=known.fact.revision + 1)
            else:
                continue
            known.reported_ns = now_ns
            del self._changed[key]
            yield known.fact

    def _key(self, line: Line, request_id: str | None, head: Head) -> str:
        if line.row.fold == EACH:
            key = f"{line.row.name}|{head.process}|{head.at_unix_ns}|{sorted(line.numbers.items())}"
            count = self._each[key] = self._each.get(key, 0) + 1
            _bound(self._each, 256)
            return f"{key}|{count}"
        if request_id is not None:  # a request expires, is read too late, or fails once, whatever row and rank logs it
            return f"{line.kind.value}|{request_id}"
        values = "|".join(head.process if name == "process" else line.texts.get(name, "") for name in line.row.fold)
        return f"{line.row.name}|{values}"

    def _continues(self, fact: LogFact, at: int) -> bool:
        quiet = self._settings.quiet_ns
        return fact.request_id is not None or fact.at_unix_ns - quiet <= at <= fact.last_unix_ns + quiet

    def _within_rate(self, now_ns: int) -> bool:
        second = now_ns // 10**9
        if second != self._second:
            self._second, self._new_this_second = second, 0
        self._new_this_second += 1
        return self._new_this_second <= self._settings.most_facts_per_second

    def _begin(self, key: str, head: Head, line: Line, request_id: str | None, at: int) -> None:
        texts = line.texts
        numbers = dict(line.numbers)
        if line.kind is LogKind.STALE_READ and request_id is not None:
            expired = self._open.get(f"{LogKind.EXPIRED.value}|{request_id}")
            if expired is not None:
                numbers["since_expiry_s"] = (at - expired.fact.at_unix_ns) / 1e9
        ids: dict[str, Any] = {name: texts[name] for name in IDS if name != "request_id" and name in texts}
        fact = LogFact(
            process=self._process,
            source=self._source,
            fact_id=_fact_id(self._process.instance, key, at),
            kind=line.kind,
            recogniser=line.row.name,
            at_unix_ns=at,
            last_unix_ns=at,
            clock=head.clock,
            resolution_ns=head.resolution_ns,
            level=head.level,
            ranks=(head.process,) if head.process else (),
            request_id=request_id,
            failure=texts.get("failure"),
            reason=line.reason,
            numbers=tuple(sorted(numbers.items())),
            words=tuple((name, texts[name]) for name in WORDS if name != "failure" and name in texts),
            inferred=self._likely_causes(at) if request_id is not None and line.kind in FAILED_FETCH_KINDS else (),
            **ids,
        )
        known = _OpenEvent(fact)
        self._changed[key] = known
        if line.row.fold == EACH:
            return
        self._open[key] = known
        self._open.move_to_end(key)
        if len(self._open) > self._settings.most_facts:
            self._open.popitem(last=False)
            self.stats.evicted += 1
        if line.kind in _BELOW_REQUESTS:
            self._below[key] = key
            _bound(self._below, 64)

    def _repeat(self, key: str, known: _OpenEvent, head: Head, line: Line, at: int) -> None:
        fact = known.fact
        rank = head.process
        ranks = fact.ranks if not rank or rank in fact.ranks or len(fact.ranks) >= _MOST_RANKS else (*fact.ranks, rank)
        fact = replace(fact, lines=fact.lines + 1, last_unix_ns=max(fact.last_unix_ns, at), ranks=ranks)
        if fact.reason is None and line.reason is not None:
            fact = replace(fact, reason=line.reason)
        if line.kind is LogKind.QUEUE_STATS:
            fact = replace(fact, numbers=tuple(sorted(line.numbers.items())))
        elif "retries" in line.numbers:
            fact = replace(fact, numbers=_raised(fact.numbers, "retries", line.numbers["retries"]))
        known.fact = fact
        self._open.move_to_end(key)
        self._changed[key] = known

    def _likely_causes(self, at: int) -> tuple[str, ...]:
        """Return open facts without a request whose last line came shortly before.

        They fit by time alone.
        """
        found = [
            known.fact.fact_id
            for key in self._below
            if (known := self._open.get(key)) and 0 <= at - known.fact.last_unix_ns <= self._settings.inferred_ns
        ]
        return tuple(found[-_MOST_INFERRED:])

    def _count_failed(self, request_id: str) -> None:
        if request_id not in self._failed:
            self._failed[request_id] = None
            self.stats.fetches_failed += 1
            _bound(self._failed, self._settings.most_facts)


def _fact_id(instance: str, key: str, at: int) -> str:
    return hashlib.blake2b(f"{instance}|{key}|{at}".encode(), digest_size=8, person=b"handrail-log").hexdigest()


def _raised(numbers: tuple[tuple[str, float], ...], name: str, value: float) -> tuple[tuple[str, float], ...]:
    return tuple((each, max(old, value) if each == name else old) for each, old in numbers)


def _bound(table: OrderedDict[str, Any], most: int) -> None:
    while len(table) > most:
        table.popitem(last=False)
