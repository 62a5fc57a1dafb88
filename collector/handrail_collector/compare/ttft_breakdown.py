"""Where a split arm's TTFT was lost: the mean TTFT it takes more than an arm that is not split, by the places of the path.

The places' differences add up to the difference of the mean TTFT. The hand-off's place is what the ``kv_*`` phases took and the
unattributed time at D that may hide them, less all unattributed time of the other arm: that had no hand-off, so as much may be
something else here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from handrail.phases import Phase
from handrail_collector.compare.bootstrap import BootstrapEstimate, difference
from handrail_collector.compare.figures import Measured, estimate
from handrail_collector.compare.load import HOP_PHASES
from handrail_collector.compare.report import Estimate
from handrail_collector.compare.shapes import KV_PHASES

IN_THE_HANDOFF: Final = "in the hand-off"
BETWEEN: Final = "between the processes (router and network)"
UNATTRIBUTED: Final = "where nothing was seen (unattributed)"

_OTHER_PLACES: Final = {
    BETWEEN: HOP_PHASES,
    "in the prefill queue": (Phase.PREFILL_ADMISSION, Phase.PREFILL_QUEUE),
    "in prefill": (Phase.PREFILL_COMPUTE, Phase.PREFILL_RESPOND),
    "in D's queue": (Phase.DECODE_ADMISSION, Phase.DECODE_QUEUE),
    "in D's first step": (Phase.FIRST_STEP, Phase.DECODE_RESPOND),
}

ENOUGH_PHASED: Final = 0.5
"""The share of an arm's requests whose phases must be known before its loss is put anywhere."""

MOSTLY: Final = 0.5
"""The share of the loss that lies in one place, from which on it is called lost there."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What one place took more, mean per request in ns."""

    place: str
    more_ns: Estimate


@dataclass(frozen=True, slots=True)
class Losses:
    """All places, most first, and the difference of the mean TTFT of the same requests; nothing where phases do not say.

    ``measured``: the hand-off was seen itself, so no unattributed time counts as it.
    """

    places: tuple[Loss, ...]
    all_ns: Estimate
    measured: bool

    @property
    def main(self) -> str | None:
        """The place that took more for sure, and most of the whole; None where no place did, or the phases do not say."""
        whole = self.all_ns.value
        if not self.places or whole is None or whole <= 0:
            return None
        first = self.places[0]
        value, low = first.more_ns.value, first.more_ns.low
        return first.place if value is not None and low is not None and low > 0 and value >= MOSTLY * whole else None


NOTHING_KNOWN: Final = Losses((), Estimate(None, None, None), measured=False)


def losses(base: Measured, split: Measured) -> Losses:
    """Empty where the phases of too few requests are known."""
    if min(base.phased_share, split.phased_share) < ENOUGH_PHASED:
        return NOTHING_KNOWN
    hidden = difference(_sum(split, KV_PHASES), split.in_handoff)
    moved = {
        IN_THE_HANDOFF: difference(_sum(base, (*KV_PHASES, Phase.UNATTRIBUTED)), split.in_handoff),
        UNATTRIBUTED: difference(hidden, _sum(split, (Phase.UNATTRIBUTED,))),
        **{place: difference(_sum(base, phases), _sum(split, phases)) for place, phases in _OTHER_PLACES.items()},
    }
    found = [Loss(place, estimate(more)) for place, more in moved.items()]
    whole = difference(_sum(base, tuple(Phase)), _sum(split, tuple(Phase)))
    measured = split.handoff is not None and split.handoff.measured == 1
    return Losses(tuple(sorted(found, key=lambda each: -(each.more_ns.value or 0.0))), estimate(whole), measured)


def _sum(side: Measured, phases: Sequence[Phase]) -> BootstrapEstimate:
    """Mean of several phases together, of one arm's draws."""
    known = [side.phases[phase.value] for phase in phases if phase.value in side.phases]
    nothing = np.zeros_like(side.in_handoff.draws)
    return BootstrapEstimate(sum(each.value for each in known), sum((each.draws for each in known), nothing), side.in_handoff.df)
