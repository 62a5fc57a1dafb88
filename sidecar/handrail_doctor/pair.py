"""The two sides of a pair, and their placement."""

from __future__ import annotations

from enum import Enum
from typing import Final


class PairSide(str, Enum):
    """The two engines of a pair."""

    PREFILL = "prefill"
    DECODE = "decode"


SIDES: Final = (PairSide.PREFILL, PairSide.DECODE)


class Placement(str, Enum):
    """The placement of the two engines, which decides the path of the KV."""

    SAME_HOST = "same-host"
    ACROSS_HOSTS = "across-hosts"
    UNKNOWN = "unknown"
