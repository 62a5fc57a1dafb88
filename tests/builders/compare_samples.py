"""Synthetic arms for the statistics of ``handrail compare``.

They come from one server with a queue; a long run gives the true figures.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from handrail.metrics.exponential_histogram import MAX_BUCKETS, GapSketch
from handrail_collector.compare.load import StorePeriod
from handrail_collector.compare.sample import PHASES, SLICES, HandoffSums, Sample, Span

MS = 1e6
S = 1e9


def queued(requests: int, rng: np.random.Generator, *, load: float = 0.6, service_ms: float = 200.0) -> tuple[Any, Any]:
    """Return arrivals (ns) and TTFTs (ns) of a queue with one server.

    Neighbouring requests wait for each other.
    """
    gaps = rng.exponential(service_ms / load, requests)
    services = service_ms * rng.gamma(4, 1 / 4, requests)
    steps = services[:-1] - gaps[1:]
    walk = np.concatenate(([0.0], np.cumsum(steps)))
    waits = walk - np.minimum.accumulate(walk)
    return np.cumsum(gaps) * MS, (waits + services) * MS


def sample(
    started_ns: NDArray[np.float64],
    ttft_ns: NDArray[np.float64],
    *,
    gap_ms: float | NDArray[np.float64] = 20.0,
    split: bool = False,
    engines: int = 2,
    **changes: Any,
) -> Sample:
    """Build a sample of streamed requests of 100 tokens out of 1,000.

    ``gap_ms``: the length of all gaps of a request, for each request.
    """
    requests = len(started_ns)
    span = Span("made", 0, int(started_ns.max() - started_ns.min()), 0, SLICES)
    slice_of = np.clip(((started_ns - started_ns.min()) / span.slice_ns).astype(np.int64), 0, SLICES - 1)
    gap_ns = np.broadcast_to(np.asarray(gap_ms, np.float64) * MS, (requests,)).copy()
    counts = np.zeros((SLICES, MAX_BUCKETS), np.int64)
    buckets = {float(gap): _bucket(int(gap)) for gap in np.unique(gap_ns)}
    np.add.at(counts, (slice_of, np.array([buckets[float(gap)] for gap in gap_ns], np.int64)), 99)
    nothing = np.zeros(SLICES)
    no = np.zeros(requests, bool)
    made: dict[str, Any] = {
        "spans": (span,),
        "scope": "edge",
        "slice_of": slice_of,
        "ttft_ns": ttft_ns,
        "duration_ns": ttft_ns + 99 * gap_ns,
        "prompt_tokens": np.full(requests, 1000.0),
        "output_tokens": np.full(requests, 100.0),
        "cached_tokens": np.full(requests, np.nan),
        "gap_p99_ns": gap_ns,
        "gap_max_ns": gap_ns,
        "per_token_ns": gap_ns,
        "failed": no,
        "left": no,
        "refused": no,
        "streamed": ~no,
        "gap_unit": "chunk",
        "gap_counts": counts,
        "phase_sums": np.zeros((SLICES, len(PHASES))),
        "phased": nothing,
        "handoff": HandoffSums(**{each.name: nothing for each in fields(HandoffSums)}),
        "engines": tuple(f"10.0.0.{number}:8000" for number in range(engines)),
        "models": {"m": requests},
        "handed_off": requests if split else 0,
    }
    return Sample(**(made | changes))


def stretch() -> StorePeriod:
    """Return a store period that is never read."""
    from pathlib import Path

    return StorePeriod(root=Path("nowhere"), where="made")


def _bucket(gap_ns: int) -> int:
    sketch = GapSketch()
    sketch.add(gap_ns)
    (bucket,) = sketch.buckets()
    return bucket
