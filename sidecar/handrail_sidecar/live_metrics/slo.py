"""Judge whether a request met its objectives.

A request is judged as it ends, its first token when it comes.
The rules are those of ``handrail compare`` (docs/compare.md):
a failed request meets nothing; a request that was refused as wrong is not judged;
an answer that was not streamed is not judged by times that it does not have;
a request whose client left is judged by what it had received by then.
The share that meets both times is DistServe's goodput (Zhong and others, OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import Exchange, Outcome

TTFT, ITL, SUCCESS, ALL = "ttft", "itl", "success", "all"
OBJECTIVES: Final = (TTFT, ITL, SUCCESS, ALL)

LEFT: Final = frozenset({Outcome.CLIENT_DISCONNECT, Outcome.ABORTED})
ANSWERED: Final = frozenset({Outcome.OK, Outcome.INCOMPLETE, Outcome.UNKNOWN_FINISH})
FAILURES: Final = frozenset(Outcome) - ANSWERED - LEFT - {Outcome.UNKNOWN, Outcome.TAINTED}
_OF_THE_SERVER: Final = (408, 429)
"""The 4xx statuses that depend on the server; the others mean a wrong request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestObjectives:
    """Objectives of a request.

    ``itl_ns`` is for the 99th percentile of a request's stream gaps.
    """

    ttft_ns: int = 1_000_000_000
    itl_ns: int = 50_000_000


def judge(record: Exchange, objectives: RequestObjectives, *, ttft_judged: bool) -> Iterator[tuple[str, bool]]:
    """Yield the objectives of a request that has ended, and whether it met each.

    ``ttft_judged``: the first token has already been judged.
    """
    if _refused(record.status):
        return
    failed, ttft_ns = record.outcome in FAILURES, record.ttft_token_ns
    gave_up = record.outcome in LEFT and ttft_ns is None and record.duration_ns > objectives.ttft_ns
    if record.outcome not in LEFT and record.outcome is not Outcome.UNKNOWN:
        yield SUCCESS, not failed
    if not (failed or gave_up or ttft_ns is not None):
        return
    in_time = ttft_ns is not None and ttft_ns <= objectives.ttft_ns
    steady = not failed and not gave_up and _gaps_met(record, objectives)
    if not ttft_judged:
        yield TTFT, in_time and not failed
    yield ITL, steady
    yield ALL, in_time and steady


def _gaps_met(record: Exchange, objectives: RequestObjectives) -> bool:
    """Return whether the gaps meet the objective; an answer without gaps meets it."""
    if record.gaps is None or record.gaps.max_ns <= objectives.itl_ns:
        return True
    p99 = GapSketch.decode(record.gaps.sketch).quantile(0.99)
    return p99 is None or p99 <= objectives.itl_ns


def _refused(status: int | None) -> bool:
    return status is not None and 400 <= status < 500 and status not in _OF_THE_SERVER
