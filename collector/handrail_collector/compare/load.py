"""Load a ``Sample`` from the store.

Rows stream by in batches, and only their sums are kept.
Unattributed time at D may be the hand-off where a phase of the KV load is among the phases that it may hide. The row's own
column (``UNATTRIBUTED_DECODE``) holds its length; the row's ``phase_shape`` says what it may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from handrail.metrics.exponential_histogram import MAX_BUCKETS
from handrail.phases import Phase, Place
from handrail.records import Outcome
from handrail_collector.compare.sample import PHASES, SLICES, Floats, HandoffSums, Sample, Span
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.queries.scan import compared_requests, scopes
from handrail_collector.store.schema import UNATTRIBUTED_DECODE, UNATTRIBUTED_PREFILL, phase_column
from handrail_collector.store.tables.requests import may_be

KV_PHASES: Final = (Phase.KV_WAIT, Phase.KV_HANDSHAKE, Phase.KV_TRANSFER, Phase.KV_NOTICE)
"""Phases of the hand-off itself."""

HOP_PHASES: Final = (Phase.ROUTER_AND_HOPS, Phase.ROUTER, Phase.PREFILL_HOPS, Phase.DECODE_HOPS)
_NUMBERS: Final = (
    "ttft_token_ns",
    "duration_ns",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "gap_p99_ns",
    "gap_max_ns",
)
_LEFT: Final = (Outcome.CLIENT_DISCONNECT.value, Outcome.ABORTED.value)
_NOT_FAILED: Final = (Outcome.OK.value, Outcome.INCOMPLETE.value, Outcome.UNKNOWN.value, Outcome.UNKNOWN_FINISH.value, *_LEFT)
_OF_THE_SERVER: Final = (408, 429)
"""The 4xx statuses that the server caused; other 4xx mean an invalid request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePeriod:
    """A period of one store; ``where`` names it for people."""

    root: Path
    where: str
    since_unix_ns: int | None = None
    until_unix_ns: int | None = None

    def query(self, scope: str | None, model: str | None) -> PeriodQuery:
        return PeriodQuery(since_unix_ns=self.since_unix_ns, until_unix_ns=self.until_unix_ns, scope=scope, model=model)


def scope_counts(stretches: Sequence[StorePeriod], model: str | None) -> dict[str, int]:
    """Count the requests of each scope over all periods, most first."""
    found: dict[str, int] = {}
    for stretch in stretches:
        for each in scopes(stretch.root, stretch.query(None, model)):
            found[each.scope] = found.get(each.scope, 0) + each.requests
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def read_sample(stretches: Sequence[StorePeriod], scope: str, model: str | None) -> Sample:
    """Read every request of the periods.

    Periods without a request of that scope are left out. Raises ``StoreDamagedError``.
    """
    spans = _spans(stretches, scope, model)
    gathered = _Gathered(sum(span.count for _, span in spans))
    for stretch, span in spans:
        _read(stretch, span, scope, model, gathered)
    others = {name: count for name, count in scope_counts(stretches, model).items() if name != scope}
    return gathered.sample(tuple(span for _, span in spans), scope, others)


def _read(stretch: StorePeriod, span: Span, scope: str, model: str | None, gathered: _Gathered) -> None:
    try:
        for batch in compared_requests(stretch.root, stretch.query(scope, model)):
            gathered.add(batch, span)
    except ValueError as error:
        raise StoreDamagedError(f"{stretch.root}: {error}") from error


def _spans(stretches: Sequence[StorePeriod], scope: str, model: str | None) -> list[tuple[StorePeriod, Span]]:
    slices = max(64, SLICES // len(stretches))
    spans: list[tuple[StorePeriod, Span]] = []
    for stretch in stretches:
        for each in scopes(stretch.root, stretch.query(scope, model)):
            spans.append((stretch, Span(stretch.where, each.first_unix_ns, each.last_unix_ns, len(spans) * slices, slices)))
    return spans


class _Gathered:
    """Sums over batches of rows."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._parts: list[dict[str, NDArray[np.float64]]] = []
        self._gap_counts: dict[str, NDArray[np.int64]] = {}
        self._units: dict[str, int] = {}
        self._phase_sums = np.zeros((slices, len(PHASES)))
        self._phased = np.zeros(slices)
        self._handoff = {name: np.zeros(slices) for name in (each.name for each in fields(HandoffSums))}
        self._engines: set[str] = set()
        self._models: dict[str, int] = {}
        self._handed_off = 0

    def add(self, batch: pa.RecordBatch, span: Span) -> None:
        started = _floats(batch, "started_unix_ns") - span.begin_unix_ns
        at = span.first + np.clip((started / span.slice_ns).astype(np.int64), 0, span.count - 1)
        part = {"slice": at.astype(np.float64)} | {name: _floats(batch, name) for name in _NUMBERS}
        part |= _kinds(batch)
        part["per_token_ns"] = self._gaps(batch, at, part["output_tokens"])
        handed = _handed_off(batch)
        self._handed_off += int(handed.sum())
        self._phases(batch, at, part["prompt_tokens"], handed)
        self._parts.append(part)
        for name in ("prefill_instance", "decode_instance"):
            self._engines.update(each for each in batch[name].unique().to_pylist() if each)
        for each in pc.value_counts(batch["model"]).to_pylist():
            if each["values"] is not None:
                self._models[each["values"]] = self._models.get(each["values"], 0) + each["counts"]

    def _gaps(self, batch: pa.RecordBatch, at: NDArray[np.int64], output: Floats) -> Floats:
        """Count the gaps of each unit; return each request's mean time per token."""
        unit_of = np.asarray(batch["gap_unit"].fill_null("").to_numpy(zero_copy_only=False))
        units = sorted(set(unit_of.tolist()) - {""})
        row = np.asarray(pc.list_parent_indices(batch["gap_buckets"]))
        bucket, weight = (np.asarray(pc.list_flatten(batch[name])) for name in ("gap_buckets", "gap_counts"))
        gaps = np.bincount(row, weight, len(at))
        spent = np.where(gaps > 0, _floats(batch, "gap_sum_ns"), 0.0)
        for unit in units:
            mine = unit_of[row] == unit
            counts = self._gap_counts.setdefault(unit, np.zeros(self._slices * MAX_BUCKETS, np.int64))
            size = len(counts)
            counts += np.bincount(at[row[mine]] * MAX_BUCKETS + bucket[mine], weight[mine], size).astype(np.int64)
        for unit in units:
            self._units[unit] = self._units.get(unit, 0) + int((unit_of == unit).sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((output > 1) & (gaps > 0), spent / (output - 1), np.nan)

    def _phases(self, batch: pa.RecordBatch, at: NDArray[np.int64], prompt: Floats, handed: NDArray[np.bool_]) -> None:
        to_ttft = _flags(pc.equal(batch["phase_of"], "ttft"))
        columns_ns = {phase: _floats(batch, phase_column(phase)) for phase in PHASES}
        known = {phase: np.nan_to_num(column) for phase, column in columns_ns.items()}

        def per_slice(values: Floats, of: NDArray[np.bool_]) -> Floats:
            return np.bincount(at[of], weights=values[of], minlength=self._slices).astype(np.float64)

        for index, phase in enumerate(PHASES):
            self._phase_sums[:, index] += per_slice(known[phase], to_ttft)
        ones = np.ones(len(at))
        self._phased += per_slice(ones, to_ttft)
        of = handed & to_ttft
        kv_ns = sum((known[phase.value] for phase in KV_PHASES), np.zeros(len(at)))
        at_p, at_d = (np.nan_to_num(_floats(batch, name)) for name in (UNATTRIBUTED_PREFILL, UNATTRIBUTED_DECODE))
        hidden_ns = np.where(_hides_handoff(batch["phase_shape"]), at_d, 0.0)
        unseen_ns = known[Phase.UNATTRIBUTED.value] - at_p - at_d
        hops_ns = sum((known[phase.value] for phase in HOP_PHASES), np.zeros(len(at)))
        with_prompt = of & (prompt > 0)
        for name, values, which in (
            ("known_ns", kv_ns, of),
            ("hidden_ns", hidden_ns, of),
            ("unseen_ns", unseen_ns, of),
            ("hops_ns", hops_ns, of),
            ("requests", ones, of),
            ("measured", ones, of & ~np.isnan(columns_ns[Phase.KV_TRANSFER.value])),
            ("prompt_tokens", prompt, with_prompt),
            ("prompted", ones, with_prompt),
            ("prompted_known_ns", kv_ns, with_prompt),
            ("prompted_ceiling_ns", kv_ns + hidden_ns + unseen_ns, with_prompt),
        ):
            self._handoff[name] += per_slice(values, which)

    def sample(self, spans: tuple[Span, ...], scope: str, others: Mapping[str, int]) -> Sample:
        joined = {name: np.concatenate([part[name] for part in self._parts]) for name in (self._parts[0] if self._parts else ())}

        def array(name: str) -> Floats:
            return joined.get(name, np.zeros(0))

        cells = self._slices * MAX_BUCKETS
        unit = max(self._units, key=lambda name: self._units[name], default=None)
        return Sample(
            spans=spans,
            scope=scope,
            slice_of=array("slice").astype(np.int64),
            ttft_ns=array("ttft_token_ns"),
            duration_ns=array("duration_ns"),
            prompt_tokens=array("prompt_tokens"),
            output_tokens=array("output_tokens"),
            cached_tokens=array("cached_tokens"),
            gap_p99_ns=array("gap_p99_ns"),
            gap_max_ns=array("gap_max_ns"),
            per_token_ns=array("per_token_ns"),
            failed=array("failed").astype(bool),
            left=array("left").astype(bool),
            refused=array("refused").astype(bool),
            streamed=array("streamed").astype(bool),
            gap_unit=unit,
            gap_counts=self._gap_counts.get(unit or "", np.zeros(cells, np.int64)).reshape(self._slices, MAX_BUCKETS),
            phase_sums=self._phase_sums,
            phased=self._phased,
            handoff=HandoffSums(**self._handoff),
            engines=tuple(sorted(self._engines)),
            models=dict(sorted(self._models.items(), key=lambda item: -item[1])),
            handed_off=self._handed_off,
            other_scopes=others,
            other_units=sum(count for name, count in self._units.items() if name != unit),
        )


def _floats(batch: pa.RecordBatch, name: str) -> Floats:
    return np.asarray(batch[name].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)


def _flags(values: pa.Array) -> NDArray[np.bool_]:
    return np.asarray(values.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def _kinds(batch: pa.RecordBatch) -> dict[str, Floats]:
    """Return how each request ended, as 0 or 1."""
    status = _floats(batch, "status")
    refused = (status >= 400) & (status < 500) & ~np.isin(status, _OF_THE_SERVER)
    left = _flags(pc.is_in(batch["outcome"], value_set=pa.array(_LEFT)))
    failed = ~_flags(pc.is_in(batch["outcome"], value_set=pa.array(_NOT_FAILED))) & ~refused
    kinds = {"failed": failed, "left": left, "refused": refused, "streamed": _flags(batch["stream"])}
    return {name: flags.astype(np.float64) for name, flags in kinds.items()}


def _handed_off(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return whether the KV came from another engine.

    The evidence is an outcome of a KV load, or prefill and decode in two processes.
    """
    fetched = _flags(batch["kv_outcome"].is_valid())
    return fetched | _flags(pc.not_equal(batch["prefill_instance"], batch["decode_instance"]))


def _hides_handoff(shapes: pa.Array) -> NDArray[np.bool_]:
    """Return for each request whether its unattributed time at D may be the hand-off."""
    encoded = shapes.dictionary_encode()
    by_shape = np.array([_hides(text) for text in encoded.dictionary.to_pylist()] or [False], bool)
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return np.asarray(by_shape[codes] & np.asarray(shapes.is_valid()), np.bool_)


def _hides(shape: str) -> bool:
    return not may_be(shape, Place.DECODE.value).isdisjoint(phase.value for phase in KV_PHASES)
