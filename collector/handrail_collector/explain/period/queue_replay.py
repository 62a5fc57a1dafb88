"""What a prompt would have waited and computed at its prefill host, by the prompts that came there before and after it.

Whether there is a fault or not, they came; so what a host would have done with them otherwise can be replayed. A prefill engine
takes prompts in the order they come, so many tokens of them a step, several prompts together where they fit (vLLM and SGLang with
chunked prefill; a budget of a few tokens is one prompt after the other). Each takes what is typical of its size alone. The
budget, which no span tells, is the one that fits the period best, and so is the part of its typical time that a prompt keeps a
host from others (less than all where a host has several engines). Where the best does not tell queues well, no replay is used:
engines that are not first come first served, or a thinned sample.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
"""Tokens a step, as they are usually configured."""

SHARES: Final = (1.0, 0.9, 0.8, 0.7, 0.5, 0.25, 0.125)
"""Of a prompt's typical time, how much it may keep its host from others."""

ATTENTION: Final = (0.0, 2e-6, 5e-6, 1e-5, 2e-5, 4e-5, 1e-4)
"""How much more a token may take for each one before it."""

ALONE: Final = 0.12
"""The part of prompts of a size that are quicker than is typical of one that is computed alone in its steps."""

MIN_IMPROVEMENT: Final = 0.85
"""A replay is used where queues are off what it says by less than this part of what they are off any one figure."""

_FITTED: Final = 2000  # visits that a fit looks at
_ALIKE: Final = 0.05  # of a typical prompt's time: less is no difference
_BAND: Final = 40
_BANDS: Final = 24


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of prompts to the hosts that computed them. ``tokens``: to compute, beside those ``cached``."""

    hosts: Texts
    queued_ns: Floats  # from any one origin
    tokens: Floats
    cached: Floats
    moved: Bools  # came here since another host had refused it

    def at(self, chosen: Ints | Bools) -> Arrivals:
        return Arrivals(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def unmoved(self, names: Collection[str]) -> Arrivals:
        """As they would have been if no host had refused any: of two hosts it was the other one, of more it is not known."""
        hosts = np.where(self.moved, "", self.hosts)
        if len(names) == 2:
            one, two = names
            other = np.where(self.hosts == one, two, np.where(self.hosts == two, one, ""))
            hosts = np.where(self.moved, other, self.hosts)
        return replace(self, hosts=hosts)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is typical where a replay says ``told_ns``, ascending: by how much that differs, and with what noise."""

    predicted_ns: Floats
    more_ns: Floats
    spread_ns: Floats  # x 2, of ``likeliest.noise_scale``

    @classmethod
    def fit(cls, reported_ns: Floats, took_ns: Floats) -> Calibration:
        """Bands of equally many: the mean of each band's middle half, and its noise.

        Of neighbouring bands the median counts, since one whose requests are mostly a fault's does not say what is typical.
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
        """Never less than nothing."""
        return np.maximum(0.0, reported_ns + np.interp(reported_ns, self.predicted_ns, self.more_ns))

    def noise_ns(self, reported_ns: Floats) -> Floats:
        """x 2, as ``likeliest.noise_scale``."""
        return np.stack([np.interp(reported_ns, self.predicted_ns, side) for side in self.spread_ns.T], axis=1)


def _median_of_neighbours(values: Floats) -> Floats:
    """Of each row with the nearest four; at the ends those are on one side."""
    count = len(values)
    first = np.clip(np.arange(count) - 2, 0, max(0, count - 5))
    return np.stack([np.median(values[one : one + 5], axis=0) for one in first])


@dataclass(frozen=True, slots=True)
class Replayed:
    """Visits to one host in order, and what each would have taken."""

    queued_ns: Floats
    queue_ns: Floats
    compute_ns: Floats


@dataclass(frozen=True, slots=True)
class QueueReplay:
    """``queue``, ``compute``: what is typically taken, by what the replay says."""

    hosts: Mapping[str, Replayed]
    queue: Calibration
    compute: Calibration
    moved_ns: Floats  # noise of the queue of one that nobody knows where it would have been

    @classmethod
    def fit(cls, visits: Arrivals, queue_ns: Floats, compute_ns: Floats) -> QueueReplay | None:
        """From visits in any order and what they took; None: a replay does not tell."""
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
        """Queue and compute of each; NaN for a visit that was not among those learned from."""
        queue, compute = _found(self.hosts, visits.unmoved(self.hosts))
        return self.queue.expected_ns(queue), self.compute.expected_ns(compute)

    def noise_ns(self, visits: Arrivals) -> tuple[Floats, Floats]:
        """Of those, x 2 as ``likeliest.noise_scale``."""
        queue, compute = _found(self.hosts, visits.unmoved(self.hosts))
        return self.queue.noise_ns(queue), self.compute.noise_ns(compute)


@dataclass(frozen=True, slots=True)
class _QueueFit:
    visits: Arrivals
    alone_ns: Floats
    queue_ns: Floats
    compute_ns: Floats

    def best(self) -> tuple[int, float]:
        """Budget and share: the budget that fits best where a prompt keeps its host for all of its time, then the share."""
        budget = min(BUDGETS, key=lambda budget: self._all_off(budget, SHARES[0]))
        return budget, min(SHARES, key=lambda share: self._all_off(budget, share))

    def queues_off(self, budget: int, share: float) -> float:
        return self.off(self.queue_ns - self._replayed(budget, share)[0])

    def queues_off_constant(self) -> float:
        """Without any replay: of none, or of the median."""
        return min(self.off(self.queue_ns), self.off(self.queue_ns - np.median(self.queue_ns)))

    def off(self, differences: Floats) -> float:
        """How far off, by Cauchy's likelihood: twice as far is little worse, so that what a fault made long decides nothing."""
        alike = max(1.0, _ALIKE * float(np.median(self.compute_ns)))
        return float(np.log1p((differences / alike) ** 2).mean())

    def _all_off(self, budget: int, share: float) -> float:
        queue, compute = self._replayed(budget, share)
        return self.off(self.queue_ns - queue) + self.off(self.compute_ns - compute)

    def _replayed(self, budget: int, share: float) -> tuple[Floats, Floats]:
        return _found(replay(self.visits, self.alone_ns, budget, share), self.visits)


def replay(visits: Arrivals, alone_ns: Floats, budget: int, share: float) -> dict[str, Replayed]:
    """What would have become of ``visits``, by host; ``budget`` in tokens a step. A visit told twice counts once."""
    found = {}
    for name in np.unique(visits.hosts.astype(str)):
        here = np.flatnonzero(visits.hosts == name)
        queued, order = np.unique(visits.queued_ns[here], return_index=True)
        tokens, alone = np.fmax(1.0, visits.tokens[here][order]), alone_ns[here][order]
        queue, compute = _steps(queued.tolist(), tokens.tolist(), (share * alone / tokens).tolist(), budget)
        found[str(name)] = Replayed(queued, np.array(queue), np.array(compute) / share)
    return found


def _steps(queued: list[float], tokens: list[float], token_ns: list[float], budget: float) -> tuple[list[float], list[float]]:
    """Waiting and computing times of prompts in order of arrival, a step at a time."""
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
        if whole:  # steps that are the first one's alone, in which nobody else is taken up
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
    """What the prompt of each takes alone: as little as few of its size do. A token weighs more the more stand before it,
    by as much as makes prompts of one size most alike."""
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
