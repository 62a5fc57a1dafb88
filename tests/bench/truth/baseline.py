"""Find the slow phase as well as vLLM's own spans and metrics allow.

It uses queue, prefill and first-token times of each engine; no join, no edge, no links.
An engine's span is slow by comparison with what is typical of that kind of engine for prompts of its size.
For a slow request the module names the part that grew most in either of its two spans, under vLLM's own name for it. At D
"queue time" means the queue, since vLLM books the KV wait there.
It is generous: a person who sees spans without a join does not know which two belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from handrail.records import EngineRequest, Record, Role

NAMES: Mapping[Role, tuple[str, str]] = {
    Role.PREFILL: ("prefill_queue", "prefill_compute"),
    Role.COLLOCATED: ("prefill_queue", "prefill_compute"),
    Role.DECODE: ("decode_queue", "first_step"),
}
"""Names of a queue time and of a prefill time, by the engine's role."""

BAND = 40


def named(records: Iterable[Record]) -> dict[str, str]:
    """Map the engine's request id to the phase that vLLM alone names.

    The id has no prefix ``cmpl-`` and no suffix ``-0``.
    """
    spans: dict[Role, list[EngineRequest]] = {}
    for record in records:
        if isinstance(record, EngineRequest) and record.queue_ns is not None and record.prefill_ns is not None:
            spans.setdefault(record.process.role, []).append(record)
    found: dict[str, tuple[float, str]] = {}
    for role, of_role in spans.items():
        for record, (queue_ns, prefill_ns) in zip(of_role, _growth(of_role), strict=True):
            request = record.request_id.removeprefix("cmpl-").removesuffix("-0")
            for grown, phase in zip((queue_ns, prefill_ns), NAMES[role], strict=True):
                found[request] = max(found.get(request, (0.0, "")), (float(grown), phase))
    return {request: phase for request, (_, phase) in found.items() if phase}


def _growth(spans: Sequence[EngineRequest]) -> NDArray[np.float64]:
    """Return queue and prefill time beyond their mean, by prompt size.

    The mean is over the spans whose first-token time lies in the middle half.
    """
    parts = np.array([(span.queue_ns, span.prefill_ns) for span in spans], np.float64)
    tokens = np.array([span.prompt_tokens for span in spans], np.float64)
    ttft = parts.sum(axis=1)
    grown = np.zeros_like(parts)
    for band in np.array_split(np.argsort(tokens, kind="stable"), max(1, min(24, len(spans) // BAND))):
        low, high = np.quantile(ttft[band], (0.25, 0.75))
        usual = band[(ttft[band] >= low) & (ttft[band] <= high)]
        grown[band] = parts[band] - parts[usual].mean(axis=0)
    return grown
