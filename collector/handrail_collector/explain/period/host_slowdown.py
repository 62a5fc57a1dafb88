"""Estimate how much slower than its baseline a host computed, by block of time.

From that follows the expected length of its queue: a request behind prompts that take twice as long waits twice as long, or
longer
where the host had been idle meanwhile. So of a queue beside slowed computing ``1 - 1 / times`` or more is growth, however long
queues usually are.
It serves periods whose queues cannot be replayed (``queue_replay.py``): a sample shows how slow a host was, not which requests
arrived there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Texts = NDArray[Any]  # of str

LEAST_TIMES: Final = 1.3
"""Smallest slowdown that counts.

Prompts vary by what shares their steps.
"""

UNCERTAIN: Final = 0.3
"""Noise of the estimated queue without the slowdown, as a share of it."""

_LEAST_REQUESTS: Final = 20  # in a cell


@dataclass(frozen=True, slots=True)
class HostSlowdown:
    """The slowdown of each host and block.

    ``times``: hosts x blocks, 1 where computing was at its baseline; ``ends_unix_ns``: of the blocks but the last.
    """

    hosts: Sequence[str]
    ends_unix_ns: Ints
    times: Floats

    @classmethod
    def fit(cls, hosts: Texts, started_unix_ns: Ints, compute_ns: Floats, typical_ns: Floats, ends: Ints) -> HostSlowdown:
        names, codes = np.unique(hosts.astype(str), return_inverse=True)
        shape = len(names), len(ends) + 1
        cell = codes * shape[1] + np.searchsorted(ends, started_unix_ns, side="right")
        took, typical, counted = (
            np.bincount(cell, weights, minlength=shape[0] * shape[1]) for weights in (compute_ns, typical_ns, None)
        )
        times = np.divide(took, typical, out=np.ones(len(took)), where=(counted >= _LEAST_REQUESTS) & (typical > 0))
        return cls([str(name) for name in names], ends, np.where(times >= LEAST_TIMES, times, 1.0).reshape(shape))

    def at(self, hosts: Texts, started_unix_ns: Ints) -> Floats:
        """Return the slowdown at each place and time; 1 at an unknown host."""
        known = {name: place for place, name in enumerate(self.hosts)}
        places = np.array([known.get(str(name), -1) for name in hosts], np.int64)
        found = self.times[places, np.searchsorted(self.ends_unix_ns, started_unix_ns, side="right")]
        return np.where(places >= 0, found, 1.0)
