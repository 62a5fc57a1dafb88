"""Learn a period's baseline: each phase's usual time, noise and base rates.

It uses no knowledge of any fault.
By prompt size: the mean over requests whose TTFT lies in the middle half of those with as many tokens to compute. This choice
comes from experiments against the emulated fleet's truth (docs/truth.md).
At the host that computes the prompt there is something better: a replay of the same arrivals (``queue_replay.py``), or, where not
all arrivals are known, how slow the host was (``HostSlowdown``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from handrail_collector.explain.period.base_rate import BaseRates, block_ends
from handrail_collector.explain.period.largest_excess import noise_scale
from handrail_collector.explain.period.queue_replay import UNCERTAIN, HostSlowdown, QueueReplay
from handrail_collector.explain.period.request_columns import COMPUTE, QUEUE, Floats, RequestColumns, located, located_on_links

LEAST_REQUESTS: Final = 40
"""Fewest requests that have a baseline."""

WIDE: Final = 0.4
"""Distance from the median of the quantiles that give the noise of queues by size.

The noise of queues lies in the rare long ones.
"""

_BANDS: Final = 24
_LEAST_NOISE_NS: Final = 1e6


@dataclass(frozen=True, slots=True)
class Baseline:
    """The baseline of a period.

    At most one of ``backlog`` and ``slowed`` is not None.
    """

    tokens: Floats  # middle of each band, ascending
    phases_ns: Floats  # bands x phases
    noise: Floats  # bands x phases x 2, as ``largest_excess.noise_scale``: of phases' excess
    backlog: QueueReplay | None
    slowed: HostSlowdown | None
    at_hosts: BaseRates
    at_links: BaseRates  # of the unattributed time at D alone

    def by_size_ns(self, uncached_tokens: Floats) -> Floats:
        """Return the expected time by prompt size, requests x phases.

        Linear between the bands' middles; the middle band's where the tokens are unknown.
        """
        return _by_size_ns(self.tokens, self.phases_ns, uncached_tokens)

    def expected_ns(self, requests: RequestColumns) -> Floats:
        """Return the expected time, requests x phases.

        By size; at the host that computed the prompt, by its arrivals or its slowdown.
        """
        return _expected_ns(self.by_size_ns(requests.uncached_tokens), requests, self.backlog, self.slowed)

    def noise_ns(self, requests: RequestColumns) -> Floats:
        """Return the noise of ``expected_ns``, requests x phases x 2.

        As ``largest_excess.noise_scale``.
        """
        sides = [_between(self.tokens, side, requests.uncached_tokens) for side in np.moveaxis(self.noise, 2, 0)]
        found = np.stack(sides, axis=2)
        if self.backlog is not None:
            queue, compute = self.backlog.noise_ns(requests.visits())
            found[:, QUEUE] = np.where(np.isnan(queue), self.backlog.moved_ns, queue)
            found[:, COMPUTE] = np.where(np.isnan(compute), found[:, COMPUTE], compute)
        if self.slowed is not None:
            times = self.slowed.at(requests.computed_at(), requests.started_unix_ns)
            most = requests.phases_ns[:, QUEUE] / times  # longest possible queue without the slowdown
            less = (1 + UNCERTAIN) * most - self.expected_ns(requests)[:, QUEUE]
            found[:, QUEUE, 0] = np.where(times > 1, np.minimum(less, found[:, QUEUE, 0]), found[:, QUEUE, 0])
        return np.maximum(found, _LEAST_NOISE_NS)

    def prior(self, requests: RequestColumns, surplus: Floats) -> Floats:
        """Return the prior probability that each phase grew at all.

        It is ``surplus``; for a queue at a slowed host, the larger of its own and that of the computing there.
        """
        if self.slowed is None:
            return surplus
        times = self.slowed.at(requests.computed_at(), requests.started_unix_ns)
        found = surplus.copy()
        found[:, QUEUE] = np.where(times > 1, np.maximum(surplus[:, QUEUE], surplus[:, COMPUTE]), surplus[:, QUEUE])
        return found


def fit(requests: RequestColumns) -> Baseline | None:
    """Return the baseline of ``requests``; None where they are too few.

    Requests with a fault may be among them. A sample of many is enough.
    """
    known = np.flatnonzero(np.isfinite(requests.ttft_ns) & np.isfinite(requests.uncached_tokens))
    if len(known) < LEAST_REQUESTS:
        return None
    tokens, ttft = requests.uncached_tokens[known], requests.ttft_ns[known]
    bands = np.array_split(np.argsort(tokens, kind="stable"), min(_BANDS, len(known) // LEAST_REQUESTS))
    middles, expected = [], []
    for band in bands:
        low, high = np.quantile(ttft[band], (0.25, 0.75))
        usual = band[(ttft[band] >= low) & (ttft[band] <= high)]
        middles.append(tokens[usual].mean())
        expected.append(requests.phases_ns[known[usual]].mean(axis=0))
    middle, phases = _merged(np.array(middles), np.array(expected))
    phases[:, QUEUE] = np.median(phases[:, QUEUE])  # a queued request waits for others: any difference by its own size is chance
    by_size = _by_size_ns(middle, phases, requests.uncached_tokens)
    ends = block_ends(located(requests, requests.phases_ns[known], known))
    queue, compute = (requests.phases_ns[known, column] for column in (QUEUE, COMPUTE))
    backlog = QueueReplay.fit(requests.visits().at(known), queue, compute)
    slowed = None
    if backlog is None:
        hosts, started = requests.computed_at()[known], requests.started_unix_ns[known]
        slowed = HostSlowdown.fit(hosts, started, compute, by_size[known, COMPUTE], ends)
    growth = (requests.phases_ns - _expected_ns(by_size, requests, backlog, slowed))[known]
    noise = np.array([noise_scale(growth[band]) for band in bands])
    if backlog is None:
        noise[:, QUEUE] = noise_scale(queue, WIDE)
    return Baseline(
        tokens=middle,
        phases_ns=phases,
        noise=_merged(np.array(middles), noise)[1],
        backlog=backlog,
        slowed=slowed,
        at_hosts=BaseRates.fit(located(requests, growth, known), ends),
        at_links=BaseRates.fit(located_on_links(requests, growth, known), ends),
    )


def _merged(tokens: Floats, expected: Floats) -> tuple[Floats, Floats]:
    """Merge bands of equal middles; prompts that are all alike make several."""
    middles, places = np.unique(tokens, return_inverse=True)
    return middles, np.stack([expected[places == place].mean(axis=0) for place in range(len(middles))])


def _between(tokens: Floats, values: Floats, uncached_tokens: Floats) -> Floats:
    known = np.where(np.isfinite(uncached_tokens), uncached_tokens, tokens[len(tokens) // 2])
    return np.stack([np.interp(known, tokens, column) for column in values.T], axis=1)


def _by_size_ns(tokens: Floats, phases_ns: Floats, uncached_tokens: Floats) -> Floats:
    found = _between(tokens, phases_ns, uncached_tokens)
    beyond = np.fmax(0, uncached_tokens - tokens[-1]) / max(1.0, tokens[-1])  # prompts longer than those of any band
    found[:, COMPUTE] *= 1 + beyond
    return found


def _expected_ns(
    by_size_ns: Floats, requests: RequestColumns, backlog: QueueReplay | None, slowed: HostSlowdown | None
) -> Floats:
    found = by_size_ns.copy()
    if backlog is not None:
        for column, expected in zip((QUEUE, COMPUTE), backlog.expected_ns(requests.visits()), strict=True):
            found[:, column] = np.where(np.isnan(expected), found[:, column], expected)
    if slowed is not None:
        times = slowed.at(requests.computed_at(), requests.started_unix_ns)
        most = requests.phases_ns[:, QUEUE] / times
        found[:, QUEUE] = np.where(times > 1, np.minimum(most, found[:, QUEUE]), found[:, QUEUE])
    return found
