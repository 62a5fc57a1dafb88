"""Replay a prefill host's arrivals: how long each prompt should wait and compute.

The arrivals are the same with or without a fault, so a host's normal handling of them can be replayed.
The model: a prefill engine takes prompts in order of arrival, a fixed number of tokens a step, several prompts together where
they fit (vLLM and SGLang with chunked prefill; a budget of a few tokens means one prompt after another). Each prompt takes what
is typical of its size alone.
No span holds the budget: the one that fits the period best is used. The same holds for the share of its typical time for which a
prompt blocks its host (less than all where a host has several engines).
Where the best fit does not predict queues well, no replay is used: the engines are not first come first served, or the sample is
thinned.

Then ``HostSlowdown`` estimates how much slower than its baseline a host computed, by block of time. From that follows the
expected length of its queue: a request behind prompts that take twice as long waits twice as long, or longer where the host had
been idle meanwhile. So of a queue beside slowed computing ``1 - 1 / times`` or more is growth, however long queues usually are.
A thinned sample shows how slow a host was, not which requests arrived there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from handrail_collector.explain.period.largest_excess import noise_scale

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Texts = NDArray[Any]  # of str

BUDGETS: Final = (256, 1024, 2048, 4096, 8192, 16384)
"""Tokens a step, as usually configured."""

SHARES: Final = (1.0, 0.9, 0.8, 0.7, 0.5, 0.25, 0.125)
"""Share of a prompt's typical time for which it may block its host."""

ATTENTION: Final = (0.0, 2e-6, 5e-6, 1e-5, 2e-5, 4e-5, 1e-4)
"""How much more a token may cost for each token before it."""

ALONE: Final = 0.12
"""Share of prompts of a size that are faster than one computed alone in its steps."""

MIN_IMPROVEMENT: Final = 0.85
"""Largest relative error of a usable replay.

Relative to the error of the better constant: none, or the median queue.
"""

_FITTED: Final = 2000  # visits that a fit looks at
_ALIKE: Final = 0.05  # share of a typical prompt's time below which times count as equal
_BAND: Final = 40
_BANDS: Final = 24


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals of prompts at the hosts that computed them.

    ``tokens``: to compute; ``cached``: found in the cache.
    """

    hosts: Texts
    queued_ns: Floats  # from any one origin
    tokens: Floats
    cached: Floats
    moved: Bools  # came here because another host had refused it

    def at(self, chosen: Ints | Bools) -> Arrivals:
        return Arrivals(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def unmoved(self, names: Collection[str]) -> Arrivals:
        """Return the arrivals as if no host had refused any.

        With two hosts it was the other one; with more, the host is unknown.
        """
        hosts = np.where(self.moved, "", self.hosts)
        if len(names) == 2:
            one, two = names
            other = np.where(self.hosts == one, two, np.where(self.hosts == two, one, ""))
            hosts = np.where(self.moved, other, self.hosts)
        return replace(self, hosts=hosts)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The typical difference between replay and measurement, with its noise.

    By the replay's prediction, ``predicted_ns``, ascending.
    """

    predicted_ns: Floats
    more_ns: Floats
    spread_ns: Floats  # x 2, as ``largest_excess.noise_scale``

    @classmethod
    def fit(cls, reported_ns: Floats, took_ns: Floats) -> Calibration:
        """Learn from bands of equally many requests: mean of the middle half, and noise.

        The median of neighbouring bands counts, because a band with mostly faulty requests does not show what is typical.
        """
        found, more = [], took_ns - reported_ns
        for band in np.array_split(np.argsort(reported_ns, kind="stable"), max(1, min(_BANDS, len(reported_ns) // _BAND))):
            low, high = np.quantile(more[band], (0.25, 0.75))
            usual = band[(more[band] >= low) & (more[band] <= high)]
            found.append((reported_ns[band].mean(), more[usual].mean(), *noise_scale(more[band])))
        columns = np.array(found)
        middles, places = np.unique(columns[:, 0], return_index=True)
        smooth = _median_of_neighbours(columns[:, 1:])[places]
        return cls(middles, smooth[:, 0], smooth[:, 1:])

    def expected_ns(self, reported_ns: Floats) -> Floats:
        """Return the calibrated prediction, at least 0."""
        return np.maximum(0.0, reported_ns + np.interp(reported_ns, self.predicted_ns, self.more_ns))

    def noise_ns(self, reported_ns: Floats) -> Floats:
        """Return the noise, x 2, as ``largest_excess.noise_scale``."""
        return np.stack([np.interp(reported_ns, self.predicted_ns, side) for side in self.spread_ns.T], axis=1)


def _median_of_neighbours(values: Floats) -> Floats:
    """Return the median of each row and its nearest four.

    At the ends all neighbours are on one side.
    """
    count = len(values)
    first = np.clip(np.arange(count) - 2, 0, max(0, count - 5))
    return np.stack([np.median(values[one : one + 5], axis=0) for one in first])


@dataclass(frozen=True, slots=True)
class Replayed:
    """The visits to one host in order, with the replayed time of each."""

    queued_ns: Floats
    queue_ns: Floats
    compute_ns: Floats


@dataclass(frozen=True, slots=True)
class QueueReplay:
    """A fitted replay of the period's prefill hosts.

    ``queue``, ``compute``: the calibration of the replay's times.
    """

    hosts: Mapping[str, Replayed]
    queue: Calibration
    compute: Calibration
    moved_ns: Floats  # noise of the queue of a moved prompt whose first host is unknown

    @classmethod
    def fit(cls, visits: Arrivals, queue_ns: Floats, compute_ns: Floats) -> QueueReplay | None:
        """Fit a replay to visits, in any order, and their measured times.

        None where a replay does not predict the queues.
        """
        visits = visits.unmoved([str(name) for name in np.unique(visits.hosts.astype(str)) if name])
        counted = np.flatnonzero(visits.hosts != "")
        first = counted[np.argsort(visits.queued_ns[counted], kind="stable")][:_FITTED]
        if not len(first) or not queue_ns[first].any():
            return None
        alone_ns = _alone_ns(visits, compute_ns)
        fit = _QueueFit(visits.at(first), alone_ns[first], queue_ns[first], compute_ns[first])
        budget, share = fit.best()
        if fit.queues_off(budget, share) >= MIN_IMPROVEMENT * fit.queues_off_constant():
            return None
        hosts = replay(visits.at(counted), alone_ns[counted], budget, share)
        queue, compute = _found(hosts, visits)
        known = np.isfinite(queue)
        return cls(
            hosts,
            Calibration.fit(queue[known], queue_ns[known]),
            Calibration.fit(compute[known], compute_ns[known]),
            noise_scale(queue[known], 0.4),
        )

    def expected_ns(self, visits: Arrivals) -> tuple[Floats, Floats]:
        """Return queue and compute time of each visit; NaN for an unknown visit."""
        queue, compute = _found(self.hosts, visits.unmoved(self.hosts))
        return self.queue.expected_ns(queue), self.compute.expected_ns(compute)

    def noise_ns(self, visits: Arrivals) -> tuple[Floats, Floats]:
        """Return the noise of both, x 2, as ``largest_excess.noise_scale``."""
        queue, compute = _found(self.hosts, visits.unmoved(self.hosts))
        return self.queue.noise_ns(queue), self.compute.noise_ns(compute)


@dataclass(frozen=True, slots=True)
class _QueueFit:
    visits: Arrivals
    alone_ns: Floats
    queue_ns: Floats
    compute_ns: Floats

    def best(self) -> tuple[int, float]:
        """Return the budget and share that fit best.

        First the budget, while a prompt blocks its host for all of its time; then the share.
        """
        budget = min(BUDGETS, key=lambda budget: self._all_off(budget, SHARES[0]))
        return budget, min(SHARES, key=lambda share: self._all_off(budget, share))

    def queues_off(self, budget: int, share: float) -> float:
        return self.off(self.queue_ns - self._replayed(budget, share)[0])

    def queues_off_constant(self) -> float:
        """Return the error without a replay: against 0 or against the median."""
        return min(self.off(self.queue_ns), self.off(self.queue_ns - np.median(self.queue_ns)))

    def off(self, differences: Floats) -> float:
        """Return the error, by Cauchy's likelihood.

        Twice the error is little worse, so times that a fault made long do not decide the fit.
        """
        alike = max(1.0, _ALIKE * float(np.median(self.compute_ns)))
        return float(np.log1p((differences / alike) ** 2).mean())

    def _all_off(self, budget: int, share: float) -> float:
        queue, compute = self._replayed(budget, share)
        return self.off(self.queue_ns - queue) + self.off(self.compute_ns - compute)

    def _replayed(self, budget: int, share: float) -> tuple[Floats, Floats]:
        return _found(replay(self.visits, self.alone_ns, budget, share), self.visits)


def replay(visits: Arrivals, alone_ns: Floats, budget: int, share: float) -> dict[str, Replayed]:
    """Return the replayed times of ``visits``, by host.

    ``budget`` in tokens a step. A repeated visit counts once.
    """
    found = {}
    for name in np.unique(visits.hosts.astype(str)):
        here = np.flatnonzero(visits.hosts == name)
        queued, order = np.unique(visits.queued_ns[here], return_index=True)
        tokens, alone = np.fmax(1.0, visits.tokens[here][order]), alone_ns[here][order]
        queue, compute = _steps(queued.tolist(), tokens.tolist(), (share * alone / tokens).tolist(), budget)
        found[str(name)] = Replayed(queued, np.array(queue), np.array(compute) / share)
    return found


def _steps(queued: list[float], tokens: list[float], token_ns: list[float], budget: float) -> tuple[list[float], list[float]]:
    """Return waiting and computing times of prompts in order of arrival, step by step."""
    count = len(queued)
    queue, compute = [0.0] * count, [0.0] * count
    left, running = list(tokens), list[int]()
    now, wanted, following = 0.0, 0.0, 0
    while running or following < count:
        if not running:
            now = max(now, queued[following])
        while following < count and wanted < budget and queued[following] <= now:
            queue[following] = now - queued[following]
            wanted += left[following]
            running.append(following)
            following += 1
        whole = (left[running[0]] - 1) // budget * budget
        if whole:  # steps of the first prompt alone, with no room for another
            left[running[0]] -= whole
            wanted -= whole
            now += whole * token_ns[running[0]]
            continue
        room, ended = budget, 0
        for one in running:
            taken = min(left[one], room)
            left[one] -= taken
            room -= taken
            now += taken * token_ns[one]
            if left[one] > 0:
                break
            ended += 1
        for one in running[:ended]:
            compute[one] = now - queued[one] - queue[one]
        del running[:ended]
        wanted = sum(left[one] for one in running)
    return queue, compute


def _alone_ns(visits: Arrivals, compute_ns: Floats) -> Floats:
    """Return the time of each prompt alone: a low quantile of its size.

    A token costs more the more tokens are before it, by the weight that makes prompts of one size most alike.
    """
    found: list[tuple[float, Floats]] = []
    for weight in ATTENTION:
        size = np.maximum(1.0, visits.tokens * (1 + weight * (visits.cached + visits.tokens / 2)))
        bands = np.array_split(np.argsort(size, kind="stable"), max(1, min(_BANDS, len(size) // _BAND)))
        middles, places = np.unique([size[band].mean() for band in bands], return_inverse=True)
        rates = np.array([np.quantile(compute_ns[band] / size[band], ALONE) for band in bands])
        alone = size * np.interp(size, middles, [rates[places == place].mean() for place in range(len(middles))])
        found.append((float(np.median(np.abs(compute_ns / np.maximum(alone, 1.0) - 1))), alone))
    return min(found, key=lambda each: each[0])[1]


def _found(hosts: Mapping[str, Replayed], visits: Arrivals) -> tuple[Floats, Floats]:
    queue, compute = np.full(len(visits.hosts), np.nan), np.full(len(visits.hosts), np.nan)
    for name, replayed in hosts.items():
        here = np.flatnonzero(visits.hosts == name)
        place = np.minimum(np.searchsorted(replayed.queued_ns, visits.queued_ns[here]), len(replayed.queued_ns) - 1)
        same = replayed.queued_ns[place] == visits.queued_ns[here]
        queue[here[same]], compute[here[same]] = replayed.queue_ns[place[same]], replayed.compute_ns[place[same]]
    return queue, compute


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
