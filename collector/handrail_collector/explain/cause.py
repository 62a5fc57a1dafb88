"""Which phase made a request slow, where, and by how much: by what is typical of the same period, knowing of no fault.

A phase has grown by what it took beyond what requests with as much prompt to compute typically spend in it. Of the phases that
grew, one that does so on that host all the time anyway (a queue, in a burst) says little about this request: each growth is
weighed by the share of such growths, at that place and time, that is more than ordinary (``explain/ordinary.py``), and the
largest is named. Where a second grew as much, or by a good part of it and alone stands out, none is named; where the largest is
``unattributed``, that is the answer, with what it may be. Chosen by experiment against the emulated fleet's truth
(docs/truth.md): typical is the mean over the requests whose time to first token lies in the middle half of those of like size.

One implementation on columns; ``cause_of`` is its form for one row. Pass requests of one scope, with ``phase_of`` "ttft".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from handrail.phases import Phase, Place
from handrail_collector.explain.backlog import WIDE, Backlog, Visits
from handrail_collector.explain.likeliest import largest, noise_of
from handrail_collector.explain.ordinary import BURST_LEVEL, Located, Ordinary, block_ends, growth_level
from handrail_collector.rows import RequestRow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Texts = NDArray[Any]  # of str

PHASES: Final = tuple(Phase)
"""The columns of a matrix of phases."""

LEAST_REQUESTS: Final = 40
"""Fewer have nothing that is typical of them."""

SURE: Final = 0.55
"""The chance from which on a phase is named as the one that grew most; below it stays open between that and the next."""

SLOW_NS: Final = 50_000_000
SLOW_SHARE: Final = 0.2
"""A request is slow when its first token comes later than is typical by both: this long, and this share of it."""

ROUTER: Final = "router"
_UNATTRIBUTED: Final = PHASES.index(Phase.UNATTRIBUTED)
_AT_PREFILL: Final = [PHASES.index(p) for p in PHASES if p.value.startswith("prefill_") and p is not Phase.PREFILL_HOPS]
_ON_PATH: Final = [PHASES.index(p) for p in (Phase.ROUTER_AND_HOPS, Phase.ROUTER, Phase.PREFILL_HOPS, Phase.DECODE_HOPS)]
_ON_LINK: Final = [PHASES.index(p) for p in (Phase.KV_HANDSHAKE, Phase.KV_TRANSFER)]
_QUEUE: Final = PHASES.index(Phase.PREFILL_QUEUE)
_COMPUTE: Final = PHASES.index(Phase.PREFILL_COMPUTE)
_ADMISSIONS: Final = [PHASES.index(p) for p in (Phase.PREFILL_ADMISSION, Phase.DECODE_ADMISSION)]
_LEAST_NOISE_NS: Final = 1e6
_ORIGIN_UNIX_NS: Final = 1_600_000_000_000_000_000  # so that a float tells a fraction of a microsecond
_BANDS: Final = 24
_CONCENTRATED: Final = 2.0  # a link's rate over that of D's other links, from which on it is the link's
_SIGMAS: Final = 3.0  # and beyond chance by so much


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by column, all of one length.

    ``ttft_ns`` and ``uncached_tokens`` (of the prompt, less those found in P's cache) are NaN where unknown; ``phases_ns`` has a
    column for each of ``PHASES``, 0 where a request lacks it; hosts go by their process where nobody
    named them, "" where that is unknown too; ``rest_at``: the process that most of
    its ``unattributed`` time lies in (a value of ``Place``), or "".
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

    def visits(self) -> Visits:
        """To the hosts that computed the prompts. When one was queued is by the clock that saw it start, less the way there."""
        elsewhere = (self.prefill_host != "") & (self.prefill_host != self.decode_host)
        admitted = np.where(elsewhere, *self.phases_ns[:, _ADMISSIONS].T)
        since = (self.started_unix_ns - _ORIGIN_UNIX_NS).astype(np.float64)
        hosts = np.where(self.prefill_host == "", self.decode_host, self.prefill_host)
        return Visits(hosts, since + admitted, self.uncached_tokens, self.cached_tokens, self.moved)


@dataclass(frozen=True, slots=True)
class Typical:
    """What is typical of a period: of each phase by prompt tokens to compute, and how often and where phases grow beyond it."""

    tokens: Floats  # middle of each band, ascending
    phases_ns: Floats  # bands x phases
    at_hosts: Ordinary
    at_links: Ordinary  # of the unattributed time at D alone
    backlog: Backlog | None  # None: queues at P do not follow from who came before
    spread_ns: Floats  # bands x phases x 2: noise of growths, as ``likeliest.noise_of``

    def by_size_ns(self, uncached_tokens: Floats) -> Floats:
        """Requests x phases. Between the bands' middles in proportion; where tokens are unknown, the middle band's."""
        return _by_size_ns(self.tokens, self.phases_ns, uncached_tokens)

    def expected_ns(self, requests: Requests) -> Floats:
        """Requests x phases: by size, and at P by the work that lay before each and came after it."""
        return _expected_ns(self.by_size_ns(requests.uncached_tokens), self.backlog, requests)

    def noise_ns(self, requests: Requests) -> Floats:
        """Of that, requests x phases x 2, as ``likeliest.noise_of``."""
        found = np.stack([_between(self.tokens, side, requests.uncached_tokens) for side in np.moveaxis(self.spread_ns, 2, 0)], axis=2)
        if self.backlog is not None:
            queue, compute = self.backlog.noise_ns(requests.visits())
            found[:, _QUEUE] = np.where(np.isnan(queue), self.backlog.moved_ns, queue)
            found[:, _COMPUTE] = np.where(np.isnan(compute), found[:, _COMPUTE], compute)
        return np.maximum(found, _LEAST_NOISE_NS)


@dataclass(frozen=True, slots=True)
class Causes:
    """By column, one entry a request.

    ``leading`` and ``second``: the phases that grew most, as indices into ``PHASES``, -1 where none did. ``clear``: the leading
    one grew so much more that it is the answer; else the two are alike. ``place``: a host, a link ``P>D``, "router", or "" where
    that is not known. ``excess_ns``: by how much the leading phase grew; ``late_ns``: how much later than typical the first token
    came, NaN where there is none; ``slow``: late enough to be asked about. ``surplus``: share of such growths there and then that
    is more than ordinary. ``standing``: slow, and such growths are so much more frequent there and then than at other places and
    times that it is no coincidence: what a finding may be made of.
    """

    leading: Ints
    second: Ints
    clear: Bools
    place: Texts
    excess_ns: Floats
    late_ns: Floats
    slow: Bools
    surplus: Floats
    standing: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Of one request; see ``Causes``. ``phase`` None: nothing grew, or the two in ``alike`` did, about as much.

    ``may_be``: the phases that may hide in ``unattributed``.
    """

    phase: Phase | None
    place: str
    excess_ns: int
    late_ns: int | None
    slow: bool
    standing: bool
    alike: tuple[Phase, ...] = ()
    may_be: tuple[Phase, ...] = ()


def requests_of(rows: Sequence[RequestRow]) -> Requests:
    """The columns of ``rows``."""
    phases = np.zeros((len(rows), len(PHASES)))
    index = {phase.value: place for place, phase in enumerate(PHASES)}
    for number, row in enumerate(rows):
        for phase in row.phases:
            phases[number, index[phase.phase]] += phase.duration_ns
    tokens = [None if row.prompt_tokens is None else row.prompt_tokens - (row.cached_tokens or 0) for row in rows]
    return Requests(
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


def learn(requests: Requests) -> Typical | None:
    """What is typical of ``requests``, those with a fault among them; None where they are too few. A sample of many will do."""
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
    phases[:, _QUEUE] = np.median(phases[:, _QUEUE])  # whoever is queued waits for others: what differs by own size is chance
    by_size = _by_size_ns(middle, phases, requests.uncached_tokens)
    queue, compute = (requests.phases_ns[known, column] for column in (_QUEUE, _COMPUTE))
    backlog = Backlog.learn(requests.visits().at(known), queue, compute)
    growth = (requests.phases_ns - _expected_ns(by_size, backlog, requests))[known]
    spread = np.array([noise_of(growth[band]) for band in bands])
    if backlog is None:
        spread[:, _QUEUE] = noise_of(growth[:, _QUEUE], WIDE)
    located = _located(requests, growth, known)
    ends = block_ends(located)
    at_links = Ordinary.learn(_on_links(requests, growth, known), ends)
    return Typical(
        middle, phases, Ordinary.learn(located, ends), at_links, backlog, _merged(np.array(middles), spread)[1]
    )


def _merged(tokens: Floats, expected: Floats) -> tuple[Floats, Floats]:
    """Bands of one middle as one: prompts that are all alike make several."""
    middles, places = np.unique(tokens, return_inverse=True)
    return middles, np.stack([expected[places == place].mean(axis=0) for place in range(len(middles))])


def _between(tokens: Floats, values: Floats, uncached_tokens: Floats) -> Floats:
    known = np.where(np.isfinite(uncached_tokens), uncached_tokens, tokens[len(tokens) // 2])
    return np.stack([np.interp(known, tokens, column) for column in values.T], axis=1)


def _by_size_ns(tokens: Floats, phases_ns: Floats, uncached_tokens: Floats) -> Floats:
    found = _between(tokens, phases_ns, uncached_tokens)
    beyond = np.fmax(0, uncached_tokens - tokens[-1]) / max(1.0, tokens[-1])  # a prompt longer than those of any band: in proportion
    found[:, _COMPUTE] *= 1 + beyond
    return found


def _expected_ns(by_size_ns: Floats, backlog: Backlog | None, requests: Requests) -> Floats:
    if backlog is None:
        return by_size_ns
    found = by_size_ns.copy()
    for column, expected in zip((_QUEUE, _COMPUTE), backlog.expected_ns(requests.visits()), strict=True):
        found[:, column] = np.where(np.isnan(expected), found[:, column], expected)
    return found


def _located(requests: Requests, growth_ns: Floats, chosen: Ints) -> Located:
    """Each phase at its host; on the way between hosts at the router; what moves KV from P to D on their link."""
    prefill, decode = requests.prefill_host[chosen], requests.decode_host[chosen]
    prefill = np.where(prefill == "", decode, prefill)
    links = _links(prefill, decode)
    links = np.where(links == "", decode, links)
    names, codes = np.unique(np.concatenate([[ROUTER], prefill, decode, links]).astype(str), return_inverse=True)
    router, (at_prefill, at_decode, on_link) = codes[0], np.split(codes[1:], 3)
    places = np.repeat(at_decode[:, None], len(PHASES), axis=1)
    places[:, _AT_PREFILL] = at_prefill[:, None]
    places[:, _ON_PATH] = router
    places[:, _ON_LINK] = on_link[:, None]
    rest_at = requests.rest_at[chosen]
    rest = np.where(rest_at == Place.PREFILL.value, at_prefill, at_decode)
    places[:, _UNATTRIBUTED] = np.where(rest_at == Place.PATH.value, router, rest)
    return Located(growth_ns, places, [str(name) for name in names], requests.started_unix_ns[chosen])


def _on_links(requests: Requests, growth_ns: Floats, chosen: Ints) -> Located:
    """The unattributed time at D, at the link that the KV came over."""
    links = _links(requests.prefill_host[chosen], requests.decode_host[chosen])
    names, codes = np.unique(links.astype(str), return_inverse=True)
    growth = growth_ns[:, [_UNATTRIBUTED]]
    return Located(growth, codes[:, None], [str(name) for name in names], requests.started_unix_ns[chosen])


def _links(prefill: Texts, decode: Texts) -> Texts:
    handed = (prefill != "") & (decode != "") & (prefill != decode)
    return np.where(handed, prefill + ">" + decode, "")


def causes(requests: Requests, typical: Typical) -> Causes:
    """The cause of each of ``requests``, slow ones or not."""
    every = np.arange(len(requests))
    growth = requests.phases_ns - typical.expected_ns(requests)
    located = _located(requests, growth, every)
    surplus, standing = typical.at_hosts.surplus(located)
    likely, chance = largest(growth, typical.noise_ns(requests), surplus)
    first, second = likely[:, 0], likely[:, 1]
    typical_ns = typical.by_size_ns(requests.uncached_tokens).sum(axis=1)
    late = requests.ttft_ns - typical_ns
    outstanding = standing[every, first] & (growth[every, first] >= SLOW_NS)  # though it was not late: lucky in another phase
    grew = (chance[:, 0] > 0) & (~(late <= 0) | outstanding)  # where lateness is unknown, its phases speak
    clear = grew & (chance[:, 0] >= SURE)
    slow = late >= np.maximum(SLOW_NS, SLOW_SHARE * typical_ns)  # false where there is no first token
    return Causes(
        leading=np.where(grew, first, -1),
        second=np.where(grew & (chance[:, 1] > 0), second, -1),
        clear=clear,
        place=_place(requests, typical, located, first, np.where(clear, first, second), grew),
        excess_ns=np.where(grew, growth[every, first], 0.0),
        late_ns=late,
        slow=slow,
        surplus=surplus[every, first],
        standing=standing[every, first] & grew & slow,
    )


def _place(requests: Requests, typical: Typical, located: Located, first: Ints, other: Ints, grew: Bools) -> Texts:
    """Where ``first`` is, if ``other`` is there too; what is unattributed at D may be placed on a link."""
    every, names = np.arange(len(requests)), np.array(located.names, object)
    place = names[located.places[every, first]]
    place = np.where(grew & (place == names[located.places[every, other]]), place, "")
    at_decode = (first == _UNATTRIBUTED) & (requests.rest_at == Place.DECODE.value) & (place != "")
    return np.where(at_decode, _link_or_host(requests, located.growth_ns[:, _UNATTRIBUTED], typical, place), place)


def _link_or_host(requests: Requests, growth_ns: Floats, typical: Typical, hosts: Texts) -> Texts:
    """The link where such growths are more frequent then than on D's other links, beyond chance; else D."""
    links = _links(requests.prefill_host, requests.decode_host)
    level = np.clip(growth_level(growth_ns), 0, BURST_LEVEL)
    counts, hits = typical.at_links.cells(links, requests.started_unix_ns, 0, level)
    all_counts, all_hits = typical.at_hosts.cells(requests.decode_host, requests.started_unix_ns, _UNATTRIBUTED, level)
    other_counts = np.maximum(all_counts - counts, 1)
    own, others = hits / np.maximum(counts, 1), np.maximum(all_hits - hits, 0) / other_counts
    both = np.clip(all_hits / np.maximum(all_counts, 1), 0.01, 0.99)
    chance = np.sqrt(both * (1 - both) * (1 / np.maximum(counts, 1) + 1 / other_counts))
    alone = all_counts <= counts  # its only link: nothing to compare with
    concentrated = (own >= _CONCENTRATED * others) & (own - others >= _SIGMAS * chance)
    return np.where((links != "") & ~alone & concentrated, links, hosts)


def cause_of(row: RequestRow, typical: Typical) -> Cause:
    """The cause of one request."""
    found = causes(requests_of([row]), typical)
    leading = [PHASES[index] for index in (int(found.leading[0]), int(found.second[0])) if index >= 0]
    clear, late = bool(found.clear[0]), float(found.late_ns[0])
    phase = leading[0] if clear else None
    rests = [each for each in row.phases if each.phase == Phase.UNATTRIBUTED.value]
    hidden = max(rests, key=lambda each: each.duration_ns).may_be if phase is Phase.UNATTRIBUTED else ()
    return Cause(
        phase=phase,
        place=str(found.place[0]),
        excess_ns=round(float(found.excess_ns[0])),
        late_ns=round(late) if np.isfinite(late) else None,
        slow=bool(found.slow[0]),
        standing=bool(found.standing[0]),
        alike=() if clear else tuple(leading),
        may_be=tuple(Phase(name) for name in hidden),
    )
