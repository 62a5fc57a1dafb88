"""Distrust a counter that stays at 0 while another one of the same traffic moves.

Case F11. Some products show PCIe and NVLink profiling counters at constant zero while bytes move.
Such a zero does not mean an idle link, so it is not reported.
"""

from __future__ import annotations

from typing import Final

from handrail import conventions as names
from handrail.device_counters.gpu import NVLINK_RATE, PCIE_RATE
from handrail_sidecar.gpu.failures import STANDS_STILL
from handrail_sidecar.gpu.values import Slot

_PAIRS: Final = {PCIE_RATE: names.GPU_PCIE_BYTES, NVLINK_RATE: names.GPU_NVLINK_BYTES}
_SPAN_S: Final = 1.0
_MOVED_BYTES: Final = 64 << 20  # within a span; one of the two may not see smaller traffic
_SPANS: Final = 3


class _Pair:
    """A rate and a count of the same traffic in one direction, since the last look."""

    __slots__ = ("count", "counted", "given", "rate", "rated", "since_unix_ns", "strikes")

    def __init__(self, rate: Slot, count: Slot) -> None:
        self.rate = rate
        self.count = count
        self.given = False  # the rate was reported at least once
        self.rated = 0.0  # bytes
        self.counted: float | None = None  # the total at the last look
        self.since_unix_ns = 0  # as reported at the last look
        self.strikes = 0

    def still(self) -> Slot | None:
        """Return the slot that stayed at 0 while the other moved."""
        if not self.count.growths:
            return None
        count = self.count.grown()
        grew = count.value - (self.counted if self.counted is not None else count.value)
        anew, self.since_unix_ns = count.start_unix_ns != self.since_unix_ns, count.start_unix_ns
        rated, self.rated, self.counted = self.rated, 0.0, count.value
        if anew:
            return None  # growth across a restart of the count is not known
        if rated == 0 and grew > _MOVED_BYTES:
            return self.rate
        return self.count if grew == 0 and rated > _MOVED_BYTES else None


class Agreement:
    """Compares the rates of performance monitoring with the byte counters.

    A comparison is made once a span.
    """

    def __init__(self, slots: list[Slot]) -> None:
        counts = {(slot.name, slot.label): slot for slot in slots}
        pairs = [(slot, counts.get((_PAIRS[slot.name], slot.label))) for slot in slots if slot.name in _PAIRS]
        self._pairs = [_Pair(rate, count) for rate, count in pairs if count is not None]
        self._span_s = 0.0

    def window(self, window_s: float) -> list[tuple[Slot, int]] | None:
        """After a window, return the slots that are no longer trusted, with reason codes.

        Returns None within a span.
        """
        self._span_s += window_s
        for pair in self._pairs:
            if pair.rate.last is not None:
                pair.rated += pair.rate.last.value * window_s
                pair.given = True
        if self._span_s < _SPAN_S:
            return None
        self._span_s = 0.0
        found = []
        for pair in self._pairs:
            still = pair.still() if pair.rate.last is not None else None
            pair.strikes = pair.strikes + 1 if still is not None else 0
            if still is not None and pair.strikes == _SPANS:
                found.append((still, STANDS_STILL))
        return found

    def counts(self) -> list[tuple[Slot, bool]]:
        """Return the byte counters that have a rate, and whether the device reports that."""
        return [(pair.count, pair.given and pair.rate.how is not None) for pair in self._pairs]
