"""The two sides of a pair, and where they stand to each other."""

from __future__ import annotations

from enum import Enum
from typing import Final


class PairSide(str, Enum):
    """The two engines of a pair."""

    PREFILL = "prefill"
    DECODE = "decode"


SIDES: Final = (PairSide.PREFILL, PairSide.DECODE)


class Placement(str, Enum):
    """Where the two engines stand to each other; it decides which way the KV takes."""

    SAME_HOST = "same-host"
    ACROSS_HOSTS = "across-hosts"
    UNKNOWN = "unknown"
