"""Break down a split arm's longer mean TTFT by the places of the path.

The comparison is with an arm that is not split.
The differences of the places add up to the difference of the mean TTFT.
The hand-off's place is the ``kv_*`` phases and the unattributed time at D that may hide them,
less all unattributed time of the other arm.
The other arm had no hand-off, so as much unattributed time may be something else here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from handrail.phases import Phase
from handrail_collector.compare.bootstrap import BootstrapEstimate, difference
from handrail_collector.compare.figures import Measured, estimate
from handrail_collector.compare.load import HOP_PHASES, KV_PHASES
from handrail_collector.compare.report import Estimate

IN_THE_HANDOFF: Final = "in the hand-off"
BETWEEN: Final = "between the processes (router and network)"
UNATTRIBUTED: Final = "in unattributed time"

_OTHER_PLACES: Final = {
    BETWEEN: HOP_PHASES,
    "in the prefill queue": (Phase.PREFILL_ADMISSION, Phase.PREFILL_QUEUE),
    "in prefill": (Phase.PREFILL_COMPUTE, Phase.PREFILL_RESPOND),
    "in D's queue": (Phase.DECODE_ADMISSION, Phase.DECODE_QUEUE),
    "in D's first step": (Phase.FIRST_STEP, Phase.DECODE_RESPOND),
}

ENOUGH_PHASED: Final = 0.5
"""Least share of an arm's requests with known phases.

With fewer, the loss is attributed to no place.
"""

MOSTLY: Final = 0.5
"""Least share of the loss in one place that names this place."""


@dataclass(frozen=True, slots=True)
class Loss:
    """How much longer one place took, mean per request in ns."""

    place: str
    more_ns: Estimate


@dataclass(frozen=True, slots=True)
class Losses:
    """All places, largest first, and the difference of the mean TTFT.

    Both are of the same requests; empty where phases are not known.
    ``measured``: the hand-off itself was measured, so no unattributed time counts as hand-off.
    """

    places: tuple[Loss, ...]
    all_ns: Estimate
    measured: bool

    @property
    def main(self) -> str | None:
        """The place that certainly took longer, and most of the whole.

        None where no place did, or the phases are not known.
        """
        whole = self.all_ns.value
        if not self.places or whole is None or whole <= 0:
            return None
        first = self.places[0]
        value, low = first.more_ns.value, first.more_ns.low
        return first.place if value is not None and low is not None and low > 0 and value >= MOSTLY * whole else None


NOTHING_KNOWN: Final = Losses((), Estimate(None, None, None), measured=False)


def losses(base: Measured, split: Measured) -> Losses:
    """Compute the losses; empty where too few requests have known phases."""
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
    """Return the mean of several phases together, with one arm's draws."""
    known = [side.phases[phase.value] for phase in phases if phase.value in side.phases]
    nothing = np.zeros_like(side.in_handoff.draws)
    return BootstrapEstimate(sum(each.value for each in known), sum((each.draws for each in known), nothing), side.in_handoff.df)
