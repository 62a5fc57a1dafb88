"""Mergeable sketch of the gap lengths of a stream, within 1 % relative error.

Values are non-negative integer nanoseconds. The method is DDSketch (Masson, Rim, Lee: VLDB 2019): logarithmic buckets of a fixed
growth, so that a bucket's middle is close to all its values and two sketches merge by adding counts.
There are two changes for whole nanoseconds. Values below 1024 ns have a bucket each (exact; also the zero bucket), because
rounding the middle of a logarithmic bucket to an integer would break 1 % there. The smallest and largest value are kept exactly.
Range: 0 to 2**50 ns (13 days) within 1 %; longer values, up to 2**63 - 1, share one last bucket whose quantile is the largest
value seen. At most ``MAX_BUCKETS`` buckets exist, whatever is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, log
from typing import Final

_EXACT: Final = 1024  # values below have their own bucket
_ALPHA: Final = 0.0094  # 1 % less the rounding to whole ns (0.5/1024) and a margin for float logarithms
_GAMMA: Final = (1 + _ALPHA) / (1 - _ALPHA)
_PER_LN: Final = 1 / log(_GAMMA)
_OFFSET: Final = _EXACT - log(_EXACT) * _PER_LN  # bucket = int(ln(value) * _PER_LN + _OFFSET)
_COVERED_NS: Final = 1 << 50
_OVERFLOW: Final = int(log(_COVERED_NS) * _PER_LN + _OFFSET) + 1
_VALUE_LIMIT: Final = 1 << 63
MAX_BUCKETS: Final = _OVERFLOW + 1

_VERSION: Final = 1
_VARINT_BITS: Final = 196  # sums of 63-bit values weighted by 63-bit weights fit; more is garbage
_SMALL_WEIGHTS: Final = 3  # weights 1..3 share the byte of the index step


class GapSketch:
    """Counts per bucket.

    Not thread-safe. Merging and encoding leave the argument unchanged.
    """

    __slots__ = ("_buckets", "count", "max_ns", "min_ns", "sum_ns")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0  # total weight
        self.sum_ns = 0  # exact, weighted
        self.min_ns: int | None = None  # exact
        self.max_ns: int | None = None  # exact

    def add(self, value_ns: int, weight: int = 1) -> None:
        """Count ``value_ns`` ``weight`` times.

        Raises ``ValueError`` for a value outside 0 .. 2**63 - 1 or a weight below 1.
        """
        if not 0 <= value_ns < _VALUE_LIMIT or not 1 <= weight < _VALUE_LIMIT:
            raise ValueError(f"value {value_ns} or weight {weight} out of range")
        index = _bucket(value_ns)
        self._buckets[index] = self._buckets.get(index, 0) + weight
        self._book(weight, value_ns * weight, value_ns, value_ns)

    def extend(self, values_ns: Iterable[int]) -> None:
        """Count every value once; the fast way to add many (0.3 us each).

        Adds all values or none: raises ``ValueError`` like ``add``.
        """
        values = values_ns if isinstance(values_ns, list) else list(values_ns)
        if not values:
            return
        low, high = min(values), max(values)
        if low < 0 or high >= _VALUE_LIMIT:
            raise ValueError(f"values from {low} to {high} out of range")
        buckets = self._buckets
        get = buckets.get
        for value in values:
            index = (value if value < _EXACT else int(log(value) * _PER_LN + _OFFSET)) if value < _COVERED_NS else _OVERFLOW
            buckets[index] = get(index, 0) + 1
        self._book(len(values), sum(values), low, high)

    def merge(self, other: GapSketch) -> None:
        """Add all counts of ``other``; the result equals one sketch of both inputs."""
        if other.min_ns is None or other.max_ns is None:
            return
        for index, weight in list(other._buckets.items()):
            self._buckets[index] = self._buckets.get(index, 0) + weight
        self._book(other.count, other.sum_ns, other.min_ns, other.max_ns)

    def _book(self, count: int, sum_ns: int, low: int, high: int) -> None:
        self.count += count
        self.sum_ns += sum_ns
        self.min_ns = low if self.min_ns is None else min(low, self.min_ns)
        self.max_ns = high if self.max_ns is None else max(high, self.max_ns)

    def quantile(self, q: float) -> int | None:
        """Value at quantile ``q``, within 1 %.

        It is the value at rank ``max(1, ceil(q * count))`` in ascending order (nearest rank, no interpolation).
        ``q`` 0 gives the exact smallest, 1 the exact largest value. Returns None for an empty sketch.
        Raises ``ValueError`` for ``q`` outside 0..1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile {q} is not within 0..1")
        if self.min_ns is None or self.max_ns is None:
            return None
        rank = max(1, ceil(q * self.count - 1e-9))  # 0.07 * 100 is 7.000000000000001
        if rank >= self.count:
            return self.max_ns
        if rank == 1:
            return self.min_ns
        seen = 0
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            if seen >= rank:
                middle = self.max_ns if index == _OVERFLOW else bucket_middle_ns(index)
                return min(max(middle, self.min_ns), self.max_ns)
        raise AssertionError("counts do not add up")

    def buckets(self) -> dict[int, int]:
        """Weight by index (``bucket_middle_ns``) of the buckets in use, ascending."""
        return dict(sorted(self._buckets.items()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GapSketch):
            return NotImplemented
        mine = (self.count, self.sum_ns, self.min_ns, self.max_ns, self._buckets)
        return mine == (other.count, other.sum_ns, other.min_ns, other.max_ns, other._buckets)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"GapSketch(count={self.count}, min_ns={self.min_ns}, p50_ns={self.quantile(0.5)}, max_ns={self.max_ns})"

    def encode(self) -> bytes:
        """Encode as a version byte and LEB128 varints.

        The varints are the number of buckets; unless that is 0: min, max - min, sum, and per bucket in ascending order
        ``step * 4 + min(weight - 1, 3)``, followed by ``weight - 4`` where the last term is 3. ``step`` is the distance to the
        bucket before, less 1. 200 gaps of one stream take 60 to 140 bytes.
        """
        out = bytearray((_VERSION,))
        _put(out, len(self._buckets))
        if self.min_ns is not None and self.max_ns is not None:
            _put(out, self.min_ns)
            _put(out, self.max_ns - self.min_ns)
            _put(out, self.sum_ns)
            before = -1
            for index in sorted(self._buckets):
                weight = self._buckets[index]
                small = min(weight - 1, _SMALL_WEIGHTS)
                _put(out, (index - before - 1) * 4 + small)
                if small == _SMALL_WEIGHTS:
                    _put(out, weight - 1 - _SMALL_WEIGHTS)
                before = index
        return bytes(out)

    @classmethod
    def of_counts(cls, buckets: Mapping[int, int], *, sum_ns: int, min_ns: int, max_ns: int) -> GapSketch:
        """Sketch with these weights per bucket, for many streams counted at once."""
        sketch = cls()
        sketch._buckets = dict(sorted(buckets.items()))
        if sketch._buckets:
            sketch._book(sum(sketch._buckets.values()), sum_ns, min_ns, max_ns)
        return sketch

    @classmethod
    def decode(cls, data: bytes) -> GapSketch:
        """Decode the result of ``encode``.

        Raises ``ValueError`` for any other bytes; ``MAX_BUCKETS`` bounds time and memory.
        """
        if not data or data[0] != _VERSION:
            raise ValueError("not a gap sketch of a known version")
        buckets, at = _take(data, 1)
        if buckets > MAX_BUCKETS:
            raise ValueError(f"{buckets} buckets are more than exist")
        sketch = cls()
        if buckets:
            low, at = _take(data, at)
            spread, at = _take(data, at)
            total, at = _take(data, at)
            index = -1
            for _ in range(buckets):
                step, at = _take(data, at)
                index += (step >> 2) + 1
                weight = (step & 3) + 1
                if weight > _SMALL_WEIGHTS:
                    more, at = _take(data, at)
                    weight += more
                if index > _OVERFLOW:
                    raise ValueError("bucket index out of range")
                sketch._buckets[index] = weight
            sketch._book(sum(sketch._buckets.values()), total, low, low + spread)
            sketch._check(index)
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes after the sketch")
        return sketch

    def _check(self, last: int) -> None:
        low, high = self.min_ns or 0, self.max_ns or 0
        if high >= _VALUE_LIMIT or _bucket(low) != next(iter(self._buckets)) or _bucket(high) != last:
            raise ValueError("smallest or largest value outside the buckets")
        if not low * self.count <= self.sum_ns <= high * self.count:
            raise ValueError("sum does not fit the counts")


def _bucket(value_ns: int) -> int:
    if value_ns < _EXACT:
        return value_ns
    return int(log(value_ns) * _PER_LN + _OFFSET) if value_ns < _COVERED_NS else _OVERFLOW


def bucket_middle_ns(index: int) -> int:
    """Representative value of a bucket in ns.

    It is the whole number of ns whose largest relative distance to the bucket's ends is smallest.
    """
    if index < _EXACT:
        return index
    return round(2 * _EXACT * _GAMMA ** (index - _EXACT + 1) / (_GAMMA + 1))


def _put(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _take(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > _VARINT_BITS:
            raise ValueError("truncated or overlong number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
