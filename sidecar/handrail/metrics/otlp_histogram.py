"""Exponential buckets beside a histogram's own, for OTLP.

They are kept only where metrics are sent, since they cost 0.3 us a value. Scale 4: bounds are 4.4 % apart, so a value is known
within 2.2 %. Source: OpenTelemetry metrics data model, "ExponentialHistogram".
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log2
from typing import Final

from handrail.metrics.histogram import Histogram, Layout

SCALE: Final = 4
_PER_DOUBLING: Final = 1 << SCALE


class ExponentialHistogram(Histogram):
    """Histogram that also counts in exponential buckets.

    ``positive``: counts by index; bucket ``i`` holds values in (base**i, base**(i + 1)] of the layout's base unit, where
    base is 2**(2**-SCALE). ``zero``: the number of values that were 0.
    """

    __slots__ = ("_shift", "positive", "zero")

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.positive: dict[int, int] = {}
        self.zero = 0
        self._shift = log2(layout.per_unit) * _PER_DOUBLING

    def observe(self, value: int, weight: int = 1) -> int:
        self._count(value, weight)
        return super().observe(value, weight)

    def extend(self, values: Iterable[int]) -> None:
        values = list(values)
        for value in values:
            self._count(value, 1)
        super().extend(values)

    def _count(self, value: int, weight: int) -> None:
        if value <= 0:
            self.zero += weight
        else:
            index = ceil(log2(value) * _PER_DOUBLING - self._shift) - 1
            self.positive[index] = self.positive.get(index, 0) + weight
