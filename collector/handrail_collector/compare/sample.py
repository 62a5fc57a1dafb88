"""Hold the requests of one arm as numpy arrays, the input of every figure.

Time is cut into *slices* of equal length, about ``SLICES`` over all periods of the arm.
Data that needs no single request (gap sketches, phases) is summed per slice while the rows stream by.
So memory grows by about 120 bytes a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from handrail.phases import Phase

SLICES: Final = 512
PHASES: Final = tuple(phase.value for phase in Phase)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Span:
    """Slices [first, first + count) of one period.

    Each is ``slice_ns`` long. They reach from the first arrival to the last.
    """

    where: str
    begin_unix_ns: int
    end_unix_ns: int
    first: int
    count: int

    @property
    def slice_ns(self) -> float:
        return max(1, self.end_unix_ns - self.begin_unix_ns) / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Requests of one arm.

    Arrays have an element per request (nan: not known), or per slice where a comment says so.
    """

    spans: tuple[Span, ...]
    scope: str
    slice_of: NDArray[np.int64]
    ttft_ns: Floats
    duration_ns: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    cached_tokens: Floats
    gap_p99_ns: Floats
    gap_max_ns: Floats
    per_token_ns: Floats  # mean time per output token after the first
    failed: NDArray[np.bool_]
    left: NDArray[np.bool_]  # the client went away, or the engine reports an abort
    refused: NDArray[np.bool_]  # the request itself was invalid
    streamed: NDArray[np.bool_]
    gap_unit: str | None
    gap_counts: NDArray[np.int64]  # slices x buckets of handrail.sketch
    phase_sums: Floats  # slices x phases, ns, of requests whose phases sum to TTFT
    phased: Floats  # per slice: how many requests those are
    handoff: HandoffSums
    engines: tuple[str, ...]
    models: Mapping[str, int]
    handed_off: int  # requests that show a hand-off
    other_scopes: Mapping[str, int] = field(default_factory=dict)
    other_units: int = 0  # requests whose gaps have another unit

    def __len__(self) -> int:
        return len(self.slice_of)

    @property
    def slices(self) -> int:
        return len(self.phased)

    @property
    def arrivals(self) -> NDArray[np.int64]:
        """Requests per slice."""
        return np.bincount(self.slice_of, minlength=self.slices)


@dataclass(frozen=True, slots=True)
class HandoffSums:
    """Sums per slice over the requests with a hand-off, in ns, tokens and counts.

    Only requests whose phases sum to the TTFT count.
    """

    known_ns: Floats  # kv_* phases
    hidden_ns: Floats  # unattributed at D, where that may be the hand-off
    unseen_ns: Floats  # unattributed between the processes: a process on the path gave no evidence
    hops_ns: Floats  # router and hops, no part of the hand-off
    requests: Floats
    measured: Floats  # requests whose transfer was measured
    prompt_tokens: Floats  # of those whose prompt is known
    prompted: Floats  # how many requests those are
    prompted_known_ns: Floats
    prompted_ceiling_ns: Floats  # known, hidden and unseen
