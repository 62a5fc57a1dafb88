"""Which requests have unattributed time that may hold the hand-off: at D, or between the processes, but not at P alone.

The column ``phase_unattributed_ns`` is a sum over places; the row's ``phase_shape`` tells which places those are.
"""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from handrail.phases import Phase, Place


def hidden_handoff(shapes: pa.Array) -> NDArray[np.bool_]:
    """One flag a request. Where time at P is unattributed too, the sum counts whole: what is made of it is an upper bound."""
    encoded = shapes.dictionary_encode()
    by_shape = np.array([_may_hide(text) for text in encoded.dictionary.to_pylist()] or [False], bool)
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return np.asarray(by_shape[codes] & np.asarray(shapes.is_valid()), np.bool_)


@lru_cache(maxsize=1024)
def _may_hide(shape: str | None) -> bool:
    places = {process for phase, process, *_ in json.loads(shape or "[]") if phase == Phase.UNATTRIBUTED.value}
    return bool(places - {Place.PREFILL.value})
