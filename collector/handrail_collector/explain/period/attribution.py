"""Attribute a slow request to the phase with the largest excess, and to a place.

The comparison is with the baseline of the same period, without knowledge of any fault.
A phase's excess is its time beyond what it would have taken otherwise (``baseline.py``). Two things weaken an excess as evidence:
such growths may be common on that host anyway (``base_rate.py``), and the baseline has noise. So the phase is named that is
likely enough to have grown most (``largest_excess.py``); otherwise the two likeliest are left open. Where it is
``unattributed``, that is the answer, with the phases that it may hide.
There is one implementation on columns; ``cause_of`` is its form for one row. Pass requests of one scope, with ``phase_of``
"ttft".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from handrail.phases import Phase, Place
from handrail_collector.explain.period.base_rate import BURST_LEVEL, PhaseExcess, growth_level
from handrail_collector.explain.period.baseline import Baseline
from handrail_collector.explain.period.largest_excess import probability_of_largest
from handrail_collector.explain.period.request_columns import (
    PHASES,
    UNATTRIBUTED,
    Bools,
    Floats,
    Ints,
    RequestColumns,
    Texts,
    links_of,
    located,
    requests_of,
)
from handrail_collector.rows import RequestRow

SURE: Final = 0.55
"""Least probability with which a phase is named as the one that grew most.

Below it, the answer stays open between that phase and the next.
"""

ALIKE: Final = 0.02
ALIKE_CHANCE: Final = 0.1
"""Least probability of a second phase that can leave the answer open.

Its growth must also differ from the first's by no more than the share ``ALIKE``: then the two count as equal.
"""

LEAST_CHANCE: Final = 0.5
"""Least probability that any phase grew beyond the ordinary; below it, none did.

Ordinary: at that place and time.
"""

SLOW_NS: Final = 50_000_000
SLOW_SHARE: Final = 0.2
"""Share of the typical TTFT by which a slow request is late.

A request is slow when its first token is late by both: ``SLOW_NS`` and this share.
"""

_CONCENTRATED: Final = 2.0  # least ratio of a link's rate to that of D's other links
_SIGMAS: Final = 3.0  # least distance from chance, in standard deviations


@dataclass(frozen=True, slots=True)
class Attribution:
    """The cause of each request, by column; one entry per request.

    ``leading`` and ``second``: the phases that grew most, as indices into ``PHASES``; -1 where none did.
    ``clear``: the leading one is likely enough to be the answer; otherwise it may be the second.
    ``place``: a host, a link ``P>D``, "router", or "" where unknown.
    ``excess_ns``: by how much the leading phase grew.
    ``late_ns``: how much later than typical the first token came; NaN where there is none. ``slow``: late enough to need a cause.
    ``surplus``: the share of such growths, at that place and time, beyond the ordinary (the attributable fraction).
    ``significant``: slow, and such growths are so much more frequent at that place and time that chance is excluded.
    A finding may rest on it.
    """

    leading: Ints
    second: Ints
    clear: Bools
    place: Texts
    excess_ns: Floats
    late_ns: Floats
    slow: Bools
    surplus: Floats
    significant: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCause:
    """The cause of one request; see ``Attribution``.

    ``phase`` None: nothing grew, or either of the two in ``ambiguous`` may have grown most.
    ``may_be``: the phases that ``unattributed`` may hide.
    """

    phase: Phase | None
    place: str
    excess_ns: int
    late_ns: int | None
    slow: bool
    significant: bool
    ambiguous: tuple[Phase, ...] = ()
    may_be: tuple[Phase, ...] = ()


def causes(requests: RequestColumns, typical: Baseline) -> Attribution:
    """Return the cause of each of ``requests``, slow ones or not."""
    every = np.arange(len(requests))
    growth = requests.phases_ns - typical.expected_ns(requests)
    where = located(requests, growth, every)
    surplus, standing = typical.at_hosts.attributable_fraction(where)
    likely, chance, any_grew = probability_of_largest(growth, typical.noise_ns(requests), typical.prior(requests, surplus))
    first, second = likely[:, 0], likely[:, 1]
    typical_ns = typical.by_size_ns(requests.uncached_tokens).sum(axis=1)
    late = requests.ttft_ns - typical_ns
    outstanding = standing[every, first] & (growth[every, first] >= SLOW_NS)  # even if not late: another phase was quick
    grew = (any_grew >= LEAST_CHANCE) & (~(late <= 0) | outstanding)  # where lateness is unknown, the phases decide
    apart = np.abs(growth[every, first] - growth[every, second])
    alike = (apart <= ALIKE * growth[every, first]) & (chance[:, 1] >= ALIKE_CHANCE)
    clear = grew & (chance[:, 0] >= SURE) & ~alike
    slow = late >= np.maximum(SLOW_NS, SLOW_SHARE * typical_ns)  # false where there is no first token
    return Attribution(
        leading=np.where(grew, first, -1),
        second=np.where(grew & (chance[:, 1] > 0), second, -1),
        clear=clear,
        place=_place(requests, typical, where, first, np.where(clear, first, second), grew),
        excess_ns=np.where(grew, growth[every, first], 0.0),
        late_ns=late,
        slow=slow,
        surplus=surplus[every, first],
        significant=standing[every, first] & grew & slow,
    )


def _place(requests: RequestColumns, typical: Baseline, where: PhaseExcess, first: Ints, other: Ints, grew: Bools) -> Texts:
    """Return the place of ``first`` where ``other`` has the same place; else "".

    Unattributed time at D may be placed on a link.
    """
    every, names = np.arange(len(requests)), np.array(where.names, object)
    place = names[where.places[every, first]]
    place = np.where(grew & (place == names[where.places[every, other]]), place, "")
    at_decode = (first == UNATTRIBUTED) & (requests.rest_at == Place.DECODE.value) & (place != "")
    return np.where(at_decode, _link_or_host(requests, where.growth_ns[:, UNATTRIBUTED], typical, place), place)


def _link_or_host(requests: RequestColumns, growth_ns: Floats, typical: Baseline, hosts: Texts) -> Texts:
    """Return the link where such growths concentrate; else D.

    They concentrate where they are more frequent at that time than on D's other links, beyond chance.
    """
    links = links_of(requests.prefill_host, requests.decode_host)
    level = np.clip(growth_level(growth_ns), 0, BURST_LEVEL)
    counts, hits = typical.at_links.cells(links, requests.started_unix_ns, 0, level)
    all_counts, all_hits = typical.at_hosts.cells(requests.decode_host, requests.started_unix_ns, UNATTRIBUTED, level)
    other_counts = np.maximum(all_counts - counts, 1)
    own, others = hits / np.maximum(counts, 1), np.maximum(all_hits - hits, 0) / other_counts
    both = np.clip(all_hits / np.maximum(all_counts, 1), 0.01, 0.99)
    chance = np.sqrt(both * (1 - both) * (1 / np.maximum(counts, 1) + 1 / other_counts))
    alone = all_counts <= counts  # the only link of D: there is no other to compare with
    concentrated = (own >= _CONCENTRATED * others) & (own - others >= _SIGMAS * chance)
    return np.where((links != "") & ~alone & concentrated, links, hosts)


def cause_of(row: RequestRow, typical: Baseline) -> RequestCause:
    """Return the cause of one request."""
    found = causes(requests_of([row]), typical)
    leading = [PHASES[index] for index in (int(found.leading[0]), int(found.second[0])) if index >= 0]
    clear, late = bool(found.clear[0]), float(found.late_ns[0])
    phase = leading[0] if clear else None
    rests = [each for each in row.phases if each.phase == Phase.UNATTRIBUTED.value]
    hidden = max(rests, key=lambda each: each.duration_ns).may_be if phase is Phase.UNATTRIBUTED else ()
    return RequestCause(
        phase=phase,
        place=str(found.place[0]),
        excess_ns=round(float(found.excess_ns[0])),
        late_ns=round(late) if np.isfinite(late) else None,
        slow=bool(found.slow[0]),
        significant=bool(found.significant[0]),
        ambiguous=() if clear else tuple(leading),
        may_be=tuple(Phase(name) for name in hidden),
    )
