"""Hold requests by column, for explanations of many at once or of one among many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from handrail.phases import Phase, Place
from handrail_collector.explain.period.base_rate import PhaseExcess
from handrail_collector.explain.period.queue_replay import Arrivals
from handrail_collector.rows import RequestRow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Texts = NDArray[Any]  # of str

PHASES: Final = tuple(Phase)
"""The columns of a matrix of phases."""

ROUTER: Final = "router"
QUEUE: Final = PHASES.index(Phase.PREFILL_QUEUE)
COMPUTE: Final = PHASES.index(Phase.PREFILL_COMPUTE)
UNATTRIBUTED: Final = PHASES.index(Phase.UNATTRIBUTED)
_ADMISSIONS: Final = [PHASES.index(p) for p in (Phase.PREFILL_ADMISSION, Phase.DECODE_ADMISSION)]
_AT_PREFILL: Final = [PHASES.index(p) for p in PHASES if p.value.startswith("prefill_") and p is not Phase.PREFILL_HOPS]
_ON_PATH: Final = [PHASES.index(p) for p in (Phase.ROUTER_AND_HOPS, Phase.ROUTER, Phase.PREFILL_HOPS, Phase.DECODE_HOPS)]
_ON_LINK: Final = [PHASES.index(p) for p in (Phase.KV_HANDSHAKE, Phase.KV_TRANSFER)]
_ORIGIN_UNIX_NS: Final = 1_600_000_000_000_000_000  # so that a float resolves a fraction of a microsecond


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Requests by column, all of one length.

    ``ttft_ns`` and ``uncached_tokens`` (of the prompt, less the ``cached_tokens`` found in P's cache) are NaN where unknown.
    ``phases_ns`` has a column for each of ``PHASES``, 0 where a request lacks it.
    A host without a name goes by its process; "" where that is unknown too.
    ``rest_at``: the process that most of its ``unattributed`` time lies in (a value of ``Place``), or "".
    ``moved``: another host had refused its prompt before.
    """

    started_unix_ns: Ints
    ttft_ns: Floats
    uncached_tokens: Floats
    cached_tokens: Floats
    phases_ns: Floats
    prefill_host: Texts
    decode_host: Texts
    rest_at: Texts
    moved: Bools

    def __len__(self) -> int:
        return len(self.ttft_ns)

    def visits(self) -> Arrivals:
        """Return the arrivals at the hosts that computed the prompts.

        The time of queueing is by the clock of the request's start, without the time between the hosts.
        """
        elsewhere = (self.prefill_host != "") & (self.prefill_host != self.decode_host)
        admitted = np.where(elsewhere, *self.phases_ns[:, _ADMISSIONS].T)
        since = (self.started_unix_ns - _ORIGIN_UNIX_NS).astype(np.float64)
        return Arrivals(self.computed_at(), since + admitted, self.uncached_tokens, self.cached_tokens, self.moved)

    def computed_at(self) -> Texts:
        """Return the host that computed each prompt."""
        return np.where(self.prefill_host == "", self.decode_host, self.prefill_host)


def requests_of(rows: Sequence[RequestRow]) -> RequestColumns:
    """Return the columns of ``rows``."""
    phases = np.zeros((len(rows), len(PHASES)))
    index = {phase.value: place for place, phase in enumerate(PHASES)}
    for number, row in enumerate(rows):
        for phase in row.phases:
            phases[number, index[phase.phase]] += phase.duration_ns
    tokens = [None if row.prompt_tokens is None else row.prompt_tokens - (row.cached_tokens or 0) for row in rows]
    return RequestColumns(
        started_unix_ns=np.array([row.started_unix_ns for row in rows], np.int64),
        ttft_ns=np.array([row.ttft_token_ns for row in rows], np.float64),
        uncached_tokens=np.array(tokens, np.float64),
        cached_tokens=np.array([row.cached_tokens or 0 for row in rows], np.float64),
        phases_ns=phases,
        prefill_host=np.array([row.prefill_host or row.prefill_instance or "" for row in rows], object),
        decode_host=np.array([row.decode_host or row.decode_instance or "" for row in rows], object),
        rest_at=np.array([_rest_at(row) for row in rows], object),
        moved=np.array([row.prefill_attempts > 1 for row in rows], bool),
    )


def _rest_at(row: RequestRow) -> str:
    rests = [phase for phase in row.phases if phase.phase == Phase.UNATTRIBUTED.value]
    return max(rests, key=lambda phase: phase.duration_ns).process if rests else ""


def located(requests: RequestColumns, growth_ns: Floats, chosen: Ints) -> PhaseExcess:
    """Place each phase at its host, the router, or a link.

    Time between hosts is at the router; phases that move KV from P to D are on their link.
    """
    prefill, decode = requests.computed_at()[chosen], requests.decode_host[chosen]
    links = links_of(prefill, decode)
    links = np.where(links == "", decode, links)
    names, codes = np.unique(np.concatenate([[ROUTER], prefill, decode, links]).astype(str), return_inverse=True)
    router, (at_prefill, at_decode, on_link) = codes[0], np.split(codes[1:], 3)
    places = np.repeat(at_decode[:, None], len(PHASES), axis=1)
    places[:, _AT_PREFILL] = at_prefill[:, None]
    places[:, _ON_PATH] = router
    places[:, _ON_LINK] = on_link[:, None]
    rest_at = requests.rest_at[chosen]
    rest = np.where(rest_at == Place.PREFILL.value, at_prefill, at_decode)
    places[:, UNATTRIBUTED] = np.where(rest_at == Place.PATH.value, router, rest)
    return PhaseExcess(growth_ns, places, [str(name) for name in names], requests.started_unix_ns[chosen])


def located_on_links(requests: RequestColumns, growth_ns: Floats, chosen: Ints) -> PhaseExcess:
    """Place the unattributed time at D on the link that the KV came over."""
    links = links_of(requests.prefill_host[chosen], requests.decode_host[chosen])
    names, codes = np.unique(links.astype(str), return_inverse=True)
    growth = growth_ns[:, [UNATTRIBUTED]]
    return PhaseExcess(growth, codes[:, None], [str(name) for name in names], requests.started_unix_ns[chosen])


def links_of(prefill: Texts, decode: Texts) -> Texts:
    handed = (prefill != "") & (decode != "") & (prefill != decode)
    return np.where(handed, prefill + ">" + decode, "")
