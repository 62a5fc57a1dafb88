"""Find requests whose unattributed time at D may be the hand-off.

It may be where a phase of the KV load is among the phases that it may hide.
The row's own column (``UNATTRIBUTED_DECODE``) holds its length; the row's ``phase_shape`` says what it may be.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from handrail.phases import Phase, Place
from handrail_collector.store.tables.requests import may_be

KV_PHASES: Final = (Phase.KV_WAIT, Phase.KV_HANDSHAKE, Phase.KV_TRANSFER, Phase.KV_NOTICE)
"""Phases of the hand-off itself."""


def hides_handoff(shapes: pa.Array) -> NDArray[np.bool_]:
    """Return one flag a request."""
    encoded = shapes.dictionary_encode()
    by_shape = np.array([_hides(text) for text in encoded.dictionary.to_pylist()] or [False], bool)
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return np.asarray(by_shape[codes] & np.asarray(shapes.is_valid()), np.bool_)


def _hides(shape: str) -> bool:
    return not may_be(shape, Place.DECODE.value).isdisjoint(phase.value for phase in KV_PHASES)
