"""Compare the collector's rows of a demo run with what the client measured.

Pure functions.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from handrail.phases import ORDER, Phase
from handrail_collector.rows import RequestRow

_MS: Final = 1e6
_WRONG_FINDINGS: Final = frozenset({"wrong_request", "model_mismatch"})


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request as the client measured it.

    Source: one line of ``python -m handrail_sim.emulator load``.
    """

    request_id: str
    trace_id: str
    status: int | None
    error: str | None
    ttft_token_ns: int | None
    completion_tokens: int | None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> ClientRequest:
        context = str(line.get("traceparent") or "").split("-")
        return cls(
            request_id=line["request_id"],
            trace_id=context[1] if len(context) == 4 else "",
            status=line["status"],
            error=line["error"],
            ttft_token_ns=line["ttft_token_ns"],
            completion_tokens=line["completion_tokens"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """The figures of a demo run, with times in ms.

    ``coverage``: joined requests over sent ones. ``wrong``: rows that contradict the client.
    ``unattributed_share``: the share of all time to first token that no phase explains.
    None: there is nothing to compute the figure from.
    """

    requests: int
    answered: int
    joined: int
    wrong: int
    coverage: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    client_ttft_p50_ms: float | None
    ttft_difference_p50_ms: float | None
    unattributed_share: float | None
    phases_p50_ms: dict[str, float]

    @property
    def good(self) -> bool:
        return self.joined == self.requests == self.answered and not self.wrong


def is_joined(row: RequestRow) -> bool:
    """Test whether a row joins evidence from the client and from both engines."""
    return row.scope == "edge" and row.prefill_instance is not None and row.decode_instance is not None and row.complete


def figures(sent: Sequence[ClientRequest], rows: Iterable[RequestRow]) -> DemoSummary:
    """Compute the figures of the requests in ``sent``.

    ``rows`` may hold other requests, which do not count.
    """
    by_id = {each.request_id: each for each in sent}
    ours = [row for row in rows if row.client_request_id in by_id]
    copies = Counter(row.client_request_id for row in ours)
    joined = {row.client_request_id: row for row in ours if is_joined(row)}
    wrong = sum(1 for row in ours if _contradicts(row, by_id[row.client_request_id or ""]) or copies[row.client_request_id] > 1)
    streams = [row for row in joined.values() if row.ttft_token_ns is not None and row.phase_of == "ttft"]
    ttft = sorted(row.ttft_token_ns or 0 for row in streams)
    client = [each.ttft_token_ns for each in sent if each.ttft_token_ns is not None]
    differences = [
        theirs - row.ttft_token_ns
        for row in streams
        if row.ttft_token_ns is not None and (theirs := by_id[row.client_request_id or ""].ttft_token_ns) is not None
    ]
    return DemoSummary(
        requests=len(sent),
        answered=sum(1 for each in sent if each.error is None),
        joined=len(joined),
        wrong=wrong,
        coverage=len(joined) / len(sent) if sent else 0.0,
        ttft_p50_ms=_ms(quantile(ttft, 0.5)),
        ttft_p99_ms=_ms(quantile(ttft, 0.99)),
        client_ttft_p50_ms=_ms(quantile(sorted(client), 0.5)),
        ttft_difference_p50_ms=_ms(statistics.median(differences)) if differences else None,
        unattributed_share=_unattributed(streams),
        phases_p50_ms=phases_p50(streams),
    )


def quantile(ordered: Sequence[int], share: float) -> int | None:
    """Return the smallest value that at least ``share`` of the values do not exceed.

    ``ordered`` is ascending. Returns None when it is empty.
    """
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def slowest_row(rows: Iterable[RequestRow]) -> RequestRow | None:
    """Find the joined stream with the longest time to first token.

    Where no stream is joined, returns the longest joined request.
    """
    joined = [row for row in rows if is_joined(row)]
    return max(joined, key=lambda row: (row.ttft_token_ns is not None, row.ttft_token_ns or row.duration_ns), default=None)


def _contradicts(row: RequestRow, sent: ClientRequest) -> bool:
    if sent.trace_id and sent.trace_id not in (row.trace_id, *row.other_trace_ids):
        return True
    if None not in (row.output_tokens, sent.completion_tokens) and row.output_tokens != sent.completion_tokens:
        return True
    return any(finding.partition(":")[0] in _WRONG_FINDINGS for finding in row.findings)


def _unattributed(rows: Sequence[RequestRow]) -> float | None:
    whole = sum(phase.duration_ns for row in rows for phase in row.phases)
    if whole <= 0:
        return None
    return sum(phase.duration_ns for row in rows for phase in row.phases if phase.phase == Phase.UNATTRIBUTED.value) / whole


def phases_p50(rows: Sequence[RequestRow]) -> dict[str, float]:
    """Compute the median of each phase, in path order.

    A request that lacks a phase counts as 0 there.
    """
    order = {phase.value: position for phase, position in ORDER.items()}
    totals: list[Counter[str]] = []
    for row in rows:
        total: Counter[str] = Counter()
        for phase in row.phases:
            total[phase.phase] += phase.duration_ns
        totals.append(total)
    names = sorted({name for total in totals for name in total}, key=lambda name: (order.get(name, len(order)), name))
    return {name: round(statistics.median(total[name] for total in totals) / _MS, 3) for name in names}


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / _MS, 3)
