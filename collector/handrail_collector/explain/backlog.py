"""What a request would have met at its prefill host, by the work of those that came before and after it: fault or not, they came.

A prefill engine computes prompts in the order they come, and several together where they fit into one step. Given when each came
and what prompts of its size typically take, the work that lay before a request follows (Lindley's recursion for one server, in
its closed form), and what the period typically shows for so much work is what this request would have waited, or would have
computed beside others, without whatever made prompts slow or kept the engine busy. How much of its typical time a prompt keeps
the engine from others (prompts share steps; a host may have several engines) is fitted to the period. Where such a replay does
not tell queues well, it is not used: engines that are not first come first served, or a thinned sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Texts = NDArray[Any]  # of str

SHARES: Final = (0.125, 0.25, 0.375, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of a prompt's typical time, how much it may keep the engine from others."""

TELLING: Final = 0.7
"""The replay is used where queues differ from what it says by less than this part of what they differ by anyway."""

_TRIMMED: Final = 0.85  # of the differences, the smaller ones that count: the rest may be a fault's
_BAND: Final = 40
_BANDS: Final = 24


@dataclass(frozen=True, slots=True)
class Visits:
    """Of prompts to the hosts that computed them. ``queued_ns``: from any one origin; ``compute_ns``: typical of their sizes."""

    hosts: Texts
    queued_ns: Floats
    compute_ns: Floats
    counted: Bools  # False: came here only since another host had refused it, which is no work that was to be expected


@dataclass(frozen=True, slots=True)
class Curve:
    """What is typical where a quantity is ``at``, ascending; beyond the last it grows ``slope`` times as that does."""

    at: Floats
    value: Floats
    noise: Floats
    slope: float = 0.0

    @classmethod
    def learn(cls, at: Floats, values: Floats, *, slope: float = 0.0) -> Curve:
        """Bands of equally many: the mean of each band's middle half, and the spread of its middle three fifths."""
        order = np.argsort(at, kind="stable")
        found = []
        for band in np.array_split(order, max(1, min(_BANDS, len(order) // _BAND))):
            least, low, high, most = np.quantile(values[band], (0.2, 0.25, 0.75, 0.8))
            usual = band[(values[band] >= low) & (values[band] <= high)]
            found.append((at[band].mean(), values[usual].mean(), (most - least) / SIGMAS_20_TO_80))
        middles, places = np.unique([middle for middle, _, _ in found], return_inverse=True)
        means = np.stack([np.array(found)[places == place, 1:].mean(axis=0) for place in range(len(middles))])
        return cls(middles, means[:, 0], means[:, 1], slope)

    def __call__(self, at: Floats) -> Floats:
        found: Floats = np.interp(at, self.at, self.value) + self.slope * np.maximum(0.0, at - self.at[-1])
        return found

    def spread(self, at: Floats) -> Floats:
        """As a standard deviation, ordinarily."""
        found: Floats = np.interp(at, self.at, self.noise)
        return found


SIGMAS_20_TO_80: Final = 1.683  # of a normal distribution


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """At one host, in order. ``less_ns``: what all before each brought, less the time since the origin."""

    queued_ns: Floats
    least_ns: Floats  # the least of ``less_ns`` so far
    brought_ns: Floats  # by all up to and with each

    @classmethod
    def of(cls, queued_ns: Floats, work_ns: Floats) -> _Arrivals:
        order = np.argsort(queued_ns, kind="stable")
        queued, brought = queued_ns[order], np.cumsum(work_ns[order])
        less = np.concatenate([[0.0], brought])[:-1] - queued
        return cls(queued, np.minimum.accumulate(less), brought)

    def before_ns(self, queued_ns: Floats) -> Floats:
        """Work not yet done of those that came before each of these times."""
        came = np.searchsorted(self.queued_ns, queued_ns, side="left")
        latest = np.maximum(came - 1, 0)
        left = self.brought_ns[latest] - queued_ns - self.least_ns[latest]
        return np.where(came > 0, np.maximum(0.0, left), 0.0)

    def after_ns(self, queued_ns: Floats, until_ns: Floats) -> Floats:
        """Work of those that came after each of these times and before its ``until_ns``."""
        brought = np.concatenate([[0.0], self.brought_ns])
        first = np.searchsorted(self.queued_ns, queued_ns, side="right")
        return brought[np.maximum(first, np.searchsorted(self.queued_ns, until_ns, side="left"))] - brought[first]


@dataclass(frozen=True, slots=True)
class Met:
    """What visits met, by the replay; all NaN at a host that was not there when it was learned."""

    before_ns: Floats
    after_ns: Floats


@dataclass(frozen=True, slots=True)
class Backlog:
    """``queue``: the time waited, by the work before; what computing took beyond its typical time, by that and by what came."""

    hosts: Mapping[str, _Arrivals]
    queue: Curve
    compute: Curve
    compute_after: Curve

    @classmethod
    def learn(cls, visits: Visits, queue_ns: Floats, compute_ns: Floats, known: Ints) -> Backlog | None:
        """From visits in any order and what they took, of those at ``known``; None where a replay does not tell queues."""
        visits = Visits(*(getattr(visits, name)[known] for name in ("hosts", "queued_ns", "compute_ns", "counted")))
        queue_ns, compute_ns = queue_ns[known], compute_ns[known]
        plain = _spread(queue_ns - np.median(queue_ns))
        tried = [_replayed(visits, share) for share in SHARES]
        differs = [_spread(queue_ns - _met(hosts, visits).before_ns) for hosts in tried]
        best = int(np.argmin(differs))
        if differs[best] >= TELLING * plain:
            return None
        met = _met(tried[best], visits)
        known = np.isfinite(met.before_ns)
        before, after, more = met.before_ns[known], met.after_ns[known], (compute_ns - visits.compute_ns)[known]
        compute = Curve.learn(before, more)
        return cls(
            tried[best], Curve.learn(before, queue_ns[known], slope=1.0), compute, Curve.learn(after, more - compute(before))
        )

    def expected_ns(self, visits: Visits) -> tuple[Floats, Floats]:
        """The queue, and the compute time beyond what is typical of the size; NaN where the replay knows no such host."""
        met = _met(self.hosts, visits)
        return self.queue(met.before_ns), self.compute(met.before_ns) + self.compute_after(met.after_ns)

    def noise_ns(self, visits: Visits) -> Floats:
        """By how much queues differ from what is expected of them, as a standard deviation."""
        return self.queue.spread(_met(self.hosts, visits).before_ns)


def _replayed(visits: Visits, share: float) -> dict[str, _Arrivals]:
    names = [str(name) for name in np.unique(visits.hosts.astype(str)) if name]
    at = {name: visits.counted & (visits.hosts == name) for name in names}
    return {name: _Arrivals.of(visits.queued_ns[here], share * visits.compute_ns[here]) for name, here in at.items() if here.any()}


def _met(hosts: Mapping[str, _Arrivals], visits: Visits) -> Met:
    before, after = np.full(len(visits.hosts), np.nan), np.full(len(visits.hosts), np.nan)
    for name, came in hosts.items():
        here = visits.hosts == name
        queued = visits.queued_ns[here]
        before[here] = came.before_ns(queued)
        after[here] = came.after_ns(queued, queued + before[here] + visits.compute_ns[here])
    return Met(before, after)


def _spread(differences: Floats) -> float:
    """Mean size of the smaller ones."""
    sizes = np.sort(np.abs(differences[np.isfinite(differences)]))
    kept = sizes[: max(1, int(len(sizes) * _TRIMMED))]
    return float(kept.mean()) if len(kept) else 0.0
