"""Hold one value of one counter on one device, and convert NVML's number.

A slot knows how the value is read now and its last value, in the counter's unit.
"""

from __future__ import annotations

import math
import struct
import sys
from typing import Final

from handrail.device_counters.gpu import GpuCounter, Read, Value
from handrail.records.devices import DeviceValue
from handrail_sidecar.gpu.monotonic import Growth, Standing

UNSIGNED_INT: Final = 1  # nvmlValueType_t
_made: Final = tuple.__new__  # skips the Python __new__ of a named tuple (700 values a second with eight GPUs)


class Slot:
    """One value of one counter; ``how`` is None when no way of reading it is left.

    An unchanged value is reported as the same object, since most values seldom change.
    """

    __slots__ = ("_last", "_most", "_raw", "counter", "growths", "how", "invalid", "label", "name", "pace", "standing")

    def __init__(self, counter: GpuCounter, value: Value) -> None:
        self.counter = counter
        self.name = counter.name
        self.label = value.label
        self.pace = value.pace or counter.pace
        self.how: Read | None = value.reads[0]
        self.growths: dict[int, Growth] = {}  # by scope
        self.standing = Standing()
        self.invalid = 0  # readings that make no sense
        self._most = counter.most if counter.most is not None else sys.float_info.max
        self._raw: float | None = None
        self._last: DeviceValue | None = None

    @property
    def last(self) -> DeviceValue | None:
        """The last value that was read."""
        return self._last

    def move_on(self) -> bool:
        """Switch to the next way of reading; return False when none is left."""
        value = next(each for each in self.counter.values if each.label == self.label)
        reads, self.pace = value.reads, value.pace or self.counter.pace
        place = reads.index(self.how) + 1 if self.how is not None else len(reads)
        self.how = reads[place] if place < len(reads) else None
        self._raw = self._last = None
        self.growths.clear()
        return self.how is not None

    def gauge(self, raw: float) -> DeviceValue | None:
        """Return the value in its unit; None (counted) for a number that makes no sense."""
        if raw == self._raw:
            return self._last
        how = self.how
        assert how is not None
        value = raw * how.times if how.per == 1 else raw / how.per
        if not 0 <= value <= self._most:  # also catches infinity and NaN
            self._makes_no_sense()
            return None
        self._raw = raw
        self._last = _made(DeviceValue, (self.name, value, self.label, 0))
        return self._last

    def standing_count(self, raw: float, at_unix_ns: int) -> DeviceValue | None:
        """Return the value of a counter that does not wrap."""
        if raw == self._raw:
            return self._last
        if not math.isfinite(raw) or raw < 0:
            self._makes_no_sense()
            return None
        self.standing.follow(raw, at_unix_ns)
        self._raw = raw
        self._last = DeviceValue(
            name=self.name, value=self._in_unit(raw), label=self.label, start_unix_ns=self.standing.since_unix_ns
        )
        return self._last

    def grown(self) -> DeviceValue:
        """Return the value of a byte counter that wraps: the sum over its scopes.

        It counts from the latest start among them.
        """
        first, *others = self.growths.values()
        total, since = first.total, first.since_unix_ns
        for each in others:
            total += each.total
            since = max(since, each.since_unix_ns)
        last = self._last
        if last is None or last.value != total or last.start_unix_ns != since:
            last = self._last = _made(DeviceValue, (self.name, total, self.label, since))
        return last

    def _makes_no_sense(self) -> None:
        self.invalid += 1
        self._raw = self._last = None

    def _in_unit(self, raw: float) -> float:
        how = self.how
        assert how is not None
        return raw * how.times if how.per == 1 else raw / how.per


def decoded(kind: int, bits: int) -> float:
    """Decode 8 bytes, read as one unsigned number, as type ``kind`` (nvmlValueType_t).

    Returns -1 for an unknown type.
    """
    if kind in (2, 3):  # unsigned long, unsigned long long
        return bits
    if kind == UNSIGNED_INT:
        return bits & 0xFFFF_FFFF
    if kind == 0:
        number: float = struct.unpack("=d", struct.pack("=Q", bits))[0]
        return number
    if kind == 4:
        return bits - (1 << 64) if bits >> 63 else bits
    if kind == 5:
        low = bits & 0xFFFF_FFFF
        return low - (1 << 32) if low >> 31 else low
    return bits & 0xFFFF if kind == 6 else -1
