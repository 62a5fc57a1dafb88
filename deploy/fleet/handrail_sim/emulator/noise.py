"""Random numbers by key instead of by sequence.

The draws of one request or instant do not change when other draws do.
Two runs of one seed, with and without a fault, then differ only by the fault's effects. Mixing: splitmix64's finalizer.
"""

from __future__ import annotations

from statistics import NormalDist

_MASK = (1 << 64) - 1
_NORMAL = tuple(NormalDist().inv_cdf((index + 0.5) / 1024) for index in range(1024))


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(*key: int) -> float:
    """Draw from 0 up to 1, always the same for one key."""
    value = 0
    for part in key:
        value = _mix(value ^ part)
    return value / 2**64


def normal(seed: int, key: int) -> float:
    """Draw with mean 0 and deviation 1, within 3.3, always the same for one key."""
    return _NORMAL[_mix(seed ^ (key & _MASK)) & 1023]
