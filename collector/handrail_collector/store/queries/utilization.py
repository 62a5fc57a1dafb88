"""Summarise what GPUs and engines did over a period, for the roofline.

Each gets one figure. The query is bounded however many samples there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from handrail import conventions as names
from handrail_collector.store.manifest import StoredFile
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

MOST_READ: Final = 1_500_000
"""Most rows that are read; with more, files evenly over the time are read.

A file holds all hosts of some minutes.
"""

IDLE: Final = 0.01
"""Share below which a GPU counts as idle."""

_SHARES: Final = tuple(f"g.d.{name}" for name in (names.GPU_TENSOR_ACTIVE, names.GPU_DRAM_ACTIVE, names.GPU_SM_ACTIVE))
"""Columns that ``gpu_uses.sql`` reads; only some GPUs report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Use of one GPU over the period, as one sidecar sampled it.

    ``rated``: samples that have both shares. ``busy``: those of them in which the GPU was not idle.
    ``tensor`` and ``dram`` are means over the busy samples; None: not known.
    """

    role: str
    instance: str
    host: str
    device: str
    engine: str  # engine that uses the GPU, if known
    product: str
    samples: int
    rated: int
    busy: int
    tensor: float | None
    dram: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUse:
    """Steps of all engines of a role, and the tokens scheduled in them."""

    steps: int
    tokens: int


def gpu_uses(reader: StoreReader, since_unix_ns: int, until_unix_ns: int) -> list[GpuUse]:
    """Read the use of each GPU, one entry per sidecar that sampled it.

    Raises ``StoreDamagedError``.
    """
    snapshot = reader.snapshot()
    files = _thinned(snapshot.files(Table.GPU_SAMPLES, since_unix_ns, until_unix_ns))
    if not files:
        return []
    with snapshot.ask() as views:
        views.plain(Table.GPU_SAMPLES, files, dict.fromkeys(_SHARES, "DOUBLE"))
        period = {"since_unix_ns": since_unix_ns, "until_unix_ns": until_unix_ns, "idle": IDLE}
        return views.rows("gpu_uses", lambda row: GpuUse(**row), period)


def step_uses(reader: StoreReader, since_unix_ns: int, until_unix_ns: int) -> dict[str, StepUse]:
    """Read the steps of engines by role.

    Rows with full detail are skipped, because the summed rows include their steps. Raises ``StoreDamagedError``.
    """
    snapshot = reader.snapshot()
    files = _thinned(snapshot.files(Table.ITERATIONS, since_unix_ns, until_unix_ns))
    if not files:
        return {}
    with snapshot.ask() as views:
        views.plain(Table.ITERATIONS, files)
        period = {"since_unix_ns": since_unix_ns, "until_unix_ns": until_unix_ns}
        rows = views.rows("step_uses", lambda row: row, period)
    return {row["role"]: StepUse(steps=row["steps"] or 0, tokens=row["tokens"] or 0) for row in rows}


def _thinned(files: Sequence[StoredFile]) -> Sequence[StoredFile]:
    """Select every n-th file by time."""
    every = -(-sum(file.rows for file in files) // MOST_READ)
    return sorted(files, key=lambda file: (file.min_unix_ns, file.path))[:: max(1, every)]
