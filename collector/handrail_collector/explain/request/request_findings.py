"""Find what is odd about a request as a whole.

Each finding is text for the request's row: "kind: detail" (kinds are in ``finding_kinds.py``).
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from handrail.identity import JoinKind
from handrail.kv_outcomes import FetchOutcome
from handrail.records import EngineRequest, Exchange, Hint, Role, RouterCall
from handrail.wire.engines.vllm import NEVER_SCHEDULED
from handrail_collector.explain.request.kv_evidence import KvOutcome
from handrail_collector.explain.request.path import Path
from handrail_collector.stitch.group import RequestGroup

_FAILED_LOADS: Final = frozenset({FetchOutcome.FAILED, FetchOutcome.TIMED_OUT, FetchOutcome.EXPIRED})


def findings(group: RequestGroup, path: Path, verdict: KvOutcome | None, more: Iterable[str], trace_id: str) -> tuple[str, ...]:
    """Return the findings of ``group``, each once.

    ``verdict``: the outcome of its hand-off; ``more``: findings from elsewhere; ``trace_id``: that of the row.
    """
    found = [f"{f.kind}: {f.detail}" if f.detail else f.kind for f in group.findings]
    found.extend(more)
    if path.edge is not None:
        lost = dict.fromkeys(
            e.role.value
            for e in group.evidence
            if isinstance(e.record, Exchange | EngineRequest | RouterCall)
            and e.how is not JoinKind.ANCESTOR
            and e.trace_id != trace_id
        )
        found.extend(f"context_lost: no trace context reached {role}" for role in lost)
    if len(path.prefills) > 1:
        abandoned = sum(1 for visit in path.prefills if visit is not path.prefill)
        found.append(f"prefill_retried: {len(path.prefills)} prefill attempts, {abandoned} abandoned")
    if path.handed_off is False and path.prefills:
        found.append("fallback_local: a prefill was tried, decode got no KV parameters and computed the prompt itself")
    models = dict.fromkeys(m for e in group.evidence if (m := getattr(e.record, "model", None)) is not None)
    if len(models) > 1:
        found.append(f"model_mismatch: {', '.join(models)}")
    found.extend(_bad_attributes(group, verdict))
    if path.edge is not None and Hint.DUPLICATE_REQUEST_ID in path.edge.hints:
        found.append("duplicate_request_id: this id was in flight twice")
    return tuple(dict.fromkeys(found))


def _bad_attributes(group: RequestGroup, verdict: KvOutcome | None) -> Iterator[str]:
    """Yield findings for absurd attributes that were dropped (case C15).

    The exception: a load that failed ends its request before it was ever scheduled, and vLLM then computes the queue time from a
    stamp of 0. Where the failure is known, that is not reported, so that one fault does not read as two.
    """
    follows = NEVER_SCHEDULED if verdict is not None and verdict.outcome in _FAILED_LOADS else ()
    for each in group.evidence:
        if isinstance(each.record, EngineRequest):
            absurd = [name for name in each.record.dropped_attributes if each.role is Role.PREFILL or name not in follows]
            if absurd:
                yield f"bad_attribute: {each.role.value} sent absurd {', '.join(absurd)}"
