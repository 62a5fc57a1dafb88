"""Find slow requests whose cause is a pause of an engine's process.

One pause shows up in several phases: as a late load in one request, a late notice in the next, a long step in a third.
A pause that the plugin reported is the cause of a request where it lasted for half of the request's lateness, and where requests
that are not slow have such a pause clearly less often. A process that always pauses makes no request slower than the others.
Pure, on columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from handrail_collector.explain.period.attribution import SLOW_NS, Attribution
from handrail_collector.explain.period.concentration import LEAST_TIMES
from handrail_collector.explain.period.request_columns import PHASES, Bools, Floats, Ints, RequestColumns, Texts
from handrail_collector.explain.stalls.cause import ENOUGH

_MAX_HOSTS: Final = 4  # most phases that are listed
_LEAST_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class PausedRequests:
    """Slow requests and their pauses; one entry per slow request.

    ``still``: a pause is its cause, at ``host``, for ``paused_ns``.
    """

    still: Bools
    host: Texts
    paused_ns: Floats

    def by_host(self) -> Iterator[tuple[str, Ints]]:
        """Yield each host and the indices of the requests that its pauses made slow."""
        for name in np.unique(self.host[self.still].astype(str)):
            yield str(name), np.flatnonzero(self.still & (self.host == name))

    def phases(self, host: str, found: Attribution) -> list[str]:
        """Return the phases at this host that grew most in its paused requests.

        Phases on a link of the host count too. Most frequent first.
        """
        at = np.flatnonzero(self.still & (self.host == host) & (found.leading >= 0))
        here = np.array([host in place.split(">") for place in found.place[at].tolist()], bool)
        counts = np.bincount(found.leading[at[here]], minlength=len(PHASES)) if here.any() else np.zeros(len(PHASES), int)
        order = np.argsort(-counts, kind="stable")[:_MAX_HOSTS]
        return [PHASES[index].value for index in order if counts[index] >= max(1, _LEAST_SHARE * counts.sum())]


def attribute_pauses(
    slow: RequestColumns, paused_ns: Floats, found: Attribution, others: RequestColumns, others_paused_ns: Floats, least: int
) -> PausedRequests:
    """Decide which slow requests have a pause as their cause.

    ``paused_ns``, ``others_paused_ns``: requests x (P, D). ``others``: requests that are not slow.
    ``least``: fewest such requests of one host.
    """
    every = np.arange(len(slow))
    where = paused_ns.argmax(axis=1)
    host, longest = _hosts(slow)[every, where], paused_ns[every, where]
    still = found.slow & (host != "") & (longest >= ENOUGH * found.late_ns)
    for name in np.unique(host[still].astype(str)):
        here = still & (host == name)
        query = here.sum() / max(1, (_hosts(slow) == name).any(axis=1).sum())
        if here.sum() < least or query < LEAST_TIMES * _usually(name, others, others_paused_ns):
            still &= host != name
    return PausedRequests(still, host, longest)


def _usually(host: str, others: RequestColumns, paused_ns: Floats) -> float:
    """Return the share of other requests there with a pause long enough to be a cause."""
    there = _hosts(others) == host
    return float((there & (paused_ns >= ENOUGH * SLOW_NS)).any(axis=1).sum()) / max(1, int(there.any(axis=1).sum()))


def _hosts(requests: RequestColumns) -> Texts:
    return np.stack([requests.prefill_host, requests.decode_host], axis=1)
