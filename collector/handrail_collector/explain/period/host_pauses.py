"""Which slow requests are slow since the process of an engine stood still, as its plugin told it: one cause in several phases.

A pause is a load that was not started in one request, one that was not seen to have ended in the next, a long step in a third.
It is the cause of a request where it lasted for half of what its first token came too late, and where requests that are not slow
have one clearly less often: a process that always stands still makes nobody slower than the others. Pure, on columns.
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

_MAX_HOSTS: Final = 4  # phases
_LEAST_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class PausedRequests:
    """One entry a slow request. ``still``: that is its cause, at ``host``, for ``paused_ns``."""

    still: Bools
    host: Texts
    paused_ns: Floats

    def by_host(self) -> Iterator[tuple[str, Ints]]:
        """Each host, and which requests it made slow."""
        for name in np.unique(self.host[self.still].astype(str)):
            yield str(name), np.flatnonzero(self.still & (self.host == name))

    def phases(self, host: str, found: Attribution) -> list[str]:
        """Those there, or on a link there, that grew most in these requests, most often first."""
        at = np.flatnonzero(self.still & (self.host == host) & (found.leading >= 0))
        here = np.array([host in place.split(">") for place in found.place[at].tolist()], bool)
        counts = np.bincount(found.leading[at[here]], minlength=len(PHASES)) if here.any() else np.zeros(len(PHASES), int)
        order = np.argsort(-counts, kind="stable")[:_MAX_HOSTS]
        return [PHASES[index].value for index in order if counts[index] >= max(1, _LEAST_SHARE * counts.sum())]


def attribute_pauses(
    slow: RequestColumns, paused_ns: Floats, found: Attribution, others: RequestColumns, others_paused_ns: Floats, least: int
) -> PausedRequests:
    """``paused_ns``, ``others_paused_ns``: requests x (P, D). ``others``: requests that are not slow. ``least``: of one host."""
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
    """How often a process stands still there for so long that it would make a request slow."""
    there = _hosts(others) == host
    return float((there & (paused_ns >= ENOUGH * SLOW_NS)).any(axis=1).sum()) / max(1, int(there.any(axis=1).sum()))


def _hosts(requests: RequestColumns) -> Texts:
    return np.stack([requests.prefill_host, requests.decode_host], axis=1)
