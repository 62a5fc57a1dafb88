"""Summarise what GPUs and engines did over a period, for the roofline.

Each gets one figure. The query is bounded however many samples there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from handrail import conventions as names
from handrail_collector.store.manifest import StoredFile, files_of
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_collector.store.sql import SqlQuery

MOST_READ: Final = 1_500_000
"""Most rows that are read; with more, files evenly over the time are read.

A file holds all hosts of some minutes.
"""

IDLE: Final = 0.01
"""Share below which a GPU counts as idle."""

_WHOSE: Final = "role, instance, host, device, engine, product"
_SHARES: Final = {
    "tensor": f"g.d.{names.GPU_TENSOR_ACTIVE}",
    "dram": f"g.d.{names.GPU_DRAM_ACTIVE}",
    "sm": f"g.d.{names.GPU_SM_ACTIVE}",
}


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
    files = _thinned(_near(reader, Table.GPU_SAMPLES, since_unix_ns, until_unix_ns))
    if not files:
        return []
    known = reader.columns(files)
    shares = {name: f'"{column}"' if column in known else "NULL::DOUBLE" for name, column in _SHARES.items()}
    read = ", ".join(f"{column} AS {name}" for name, column in shares.items())
    rated = "tensor IS NOT NULL AND dram IS NOT NULL"
    busy = f"{rated} AND greatest(tensor, dram, coalesce(sm, 0)) >= {IDLE}"
    text = (
        f"SELECT {_WHOSE}, count(*) AS samples, count(*) FILTER (WHERE {rated}) AS rated, count(*) FILTER (WHERE {busy}) AS busy,"
        f" avg(tensor) FILTER (WHERE {busy}) AS tensor, avg(dram) FILTER (WHERE {busy}) AS dram"
        f" FROM (SELECT {_WHOSE}, {read} FROM {{table}} WHERE at_unix_ns >= $since AND at_unix_ns < $until)"
        f" GROUP BY {_WHOSE} ORDER BY {_WHOSE}"
    )
    rows = reader.rows(files, SqlQuery(text, {"since": since_unix_ns, "until": until_unix_ns}))
    return [
        GpuUse(
            role=role, instance=instance, host=host, device=device, engine=engine, product=product, samples=samples,
            rated=rated_samples, busy=busy_samples, tensor=tensor, dram=dram,
        )
        for role, instance, host, device, engine, product, samples, rated_samples, busy_samples, tensor, dram in rows
    ]  # fmt: skip


def step_uses(reader: StoreReader, since_unix_ns: int, until_unix_ns: int) -> dict[str, StepUse]:
    """Read the steps of engines by role.

    Rows with full detail are skipped, because the summed rows include their steps. Raises ``StoreDamagedError``.
    """
    files = _thinned(_near(reader, Table.ITERATIONS, since_unix_ns, until_unix_ns))
    if not files:
        return {}
    text = (
        "SELECT role, sum(steps)::BIGINT, sum(prefill_tokens + decode_tokens)::BIGINT FROM {table}"
        ' WHERE at_unix_ns >= $since AND at_unix_ns < $until AND NOT "full" GROUP BY role ORDER BY role'
    )
    rows = reader.rows(files, SqlQuery(text, {"since": since_unix_ns, "until": until_unix_ns}))
    return {role: StepUse(steps=steps or 0, tokens=tokens or 0) for role, steps, tokens in rows}


def _near(reader: StoreReader, table: Table, since: int, until: int) -> list[StoredFile]:
    return [f for f in files_of(reader.publishes(), table) if f.max_unix_ns >= since and f.min_unix_ns < until]


def _thinned(files: Sequence[StoredFile]) -> Sequence[StoredFile]:
    """Select every n-th file by time."""
    every = -(-sum(file.rows for file in files) // MOST_READ)
    return sorted(files, key=lambda file: (file.min_unix_ns, file.path))[:: max(1, every)]
