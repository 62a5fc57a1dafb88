"""Read one metrics page into values of the schema.

Names, units and labels are resolved; values that make no sense are left out and counted.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from handrail.otlp.values import LARGEST
from handrail.records.quantities import BY_NAME, Quantity, QuantityKind
from handrail_sidecar.engine_metrics.exposition import BLANKS, Scanner
from handrail_sidecar.engine_metrics.family import COPY_LABELS, ENGINE_LABELS
from handrail_sidecar.engine_metrics.index import FamilyMatch, SamplePart, find
from handrail_sidecar.engine_metrics.vllm import LORA

Key = tuple[str, str, str]
"""Quantity, engine, label."""

MOST_LABELS: Final = 64
OTHER: Final = "other"
_LONGEST_LABEL: Final = 128

_POISONED_WITH: Final = {"queue_seconds": ("prefill_seconds",)}
"""Quantities whose sums a failed KV load falsifies together.

It adds minus the machine's uptime as queue time and plus that as prefill time (measured).
"""


@dataclass(slots=True)
class CumulativeBuckets:
    """One histogram while it is read: cumulative counts by upper bound."""

    cumulative: dict[float, float] = field(default_factory=dict)
    total: float | None = None
    count: float | None = None

    def counts(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return finite bounds and counts per bucket, one count more than bounds.

        A bucket below the one before it counts nothing.
        """
        bounds = sorted(bound for bound in self.cumulative if math.isfinite(bound))
        counts, before = [], 0.0
        for bound in bounds:
            counts.append(max(0, int(self.cumulative[bound] - before)))
            before = max(before, self.cumulative[bound])
        whole = self.cumulative.get(math.inf, self.count if self.count is not None else before)
        counts.append(max(0, int(whole - before)))
        return tuple(bounds), tuple(counts)


@dataclass(slots=True)
class PageReading:
    """Content of one page.

    ``invalid``: numbers left out, by reason. ``models``: values of ``model_name``.
    """

    values: dict[Key, float] = field(default_factory=dict)
    histograms: dict[Key, CumulativeBuckets] = field(default_factory=dict)
    invalid: dict[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()

    def of(self, quantity: str, engine: str | None = None) -> dict[tuple[str, str], float]:
        """Return the values of a quantity by (engine, label)."""
        return {
            (key[1], key[2]): value
            for key, value in self.values.items()
            if key[0] == quantity and (engine is None or key[1] == engine)
        }

    def total(self, quantity: str, engine: str | None = None) -> float | None:
        """Return the sum over engines and labels; None when there is no value.

        Raises ``ValueError`` for a ratio, whose sum means nothing.
        """
        if BY_NAME[quantity].unit == "1":
            raise ValueError(f"{quantity} is a ratio of each engine and is not summed over them")
        found = self.of(quantity, engine)
        return sum(found.values()) if found else None

    def count(self, quantity: str, engine: str | None = None) -> float | None:
        """Return the number of samples in a quantity's histograms; None if none."""
        found = [
            buckets.count
            for key, buckets in self.histograms.items()
            if key[0] == quantity and (engine is None or key[1] == engine) and buckets.count is not None
        ]
        return sum(found) if found else None

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that count requests or tokens.

        ('',) when the page has no such label.
        """
        named = {key[1] for key in (*self.values, *self.histograms) if not key[0].startswith(("transport_", "router_"))}
        return tuple(sorted(named - {""} or named))


@dataclass(frozen=True, slots=True)
class _Slot:
    """Meaning of one line of the page.

    Compared by identity: it is looked up by its line.
    """

    key: Key
    quantity: Quantity
    rank: int
    part: SamplePart
    scale: float
    bound: float
    copy: bool
    lora: tuple[int, int] | None = None


class PageReader:
    """Reads the pages of one endpoint.

    The number of label values of a quantity is bounded whatever the page contains.
    """

    def __init__(self, *, most_labels: int = MOST_LABELS) -> None:
        self.labels_folded = 0
        self._most_labels = most_labels
        self._admitted: dict[str, set[tuple[str, str]]] = {}
        self._models: set[str] = set()
        self.scanner: Scanner[_Slot] = Scanner(self._resolve)

    def read(self, page: bytes) -> PageReading:
        """Return the values on ``page``."""
        reading = PageReading()
        ranks: dict[Key, int] = {}
        lora: tuple[float, tuple[int, int]] | None = None
        for slot, raw in self.scanner.scan(page):
            if slot.lora is not None:
                lora = max(lora, (raw, slot.lora)) if lora else (raw, slot.lora)
                continue
            rank = ranks.get(slot.key)
            if rank is not None and rank < slot.rank:
                continue  # the preferred name is also there
            if rank is not None and slot.rank < rank:
                reading.values.pop(slot.key, None)
                reading.histograms.pop(slot.key, None)
            ranks[slot.key] = slot.rank
            if slot.part is SamplePart.VALUE:
                self._value(reading, slot, raw)
            else:
                self._bucket(reading, slot, raw)
        if lora is not None:
            reading.values[("lora_adapters", "", "running")] = lora[1][0]
            reading.values[("lora_adapters", "", "waiting")] = lora[1][1]
        self._drop_poisoned(reading)
        reading.models = tuple(sorted(self._models))
        return reading

    def _value(self, reading: PageReading, slot: _Slot, raw: float) -> None:
        value = _sane(reading, slot, raw * slot.scale)
        if value is None:
            return
        before = reading.values.get(slot.key)
        if before is None:
            reading.values[slot.key] = value
        elif slot.copy or slot.quantity.kind is QuantityKind.GAUGE:
            reading.values[slot.key] = max(before, value)
        else:
            reading.values[slot.key] = min(before + value, sys.float_info.max)

    def _bucket(self, reading: PageReading, slot: _Slot, raw: float) -> None:
        buckets = reading.histograms.setdefault(slot.key, CumulativeBuckets())
        if not math.isfinite(raw):
            _count(reading, "not_finite")
        elif slot.part is SamplePart.SUM:
            value = raw * slot.scale
            buckets.total = value if buckets.total is None else max(buckets.total, value) if slot.copy else buckets.total + value
        elif raw < 0:
            _count(reading, "negative")
        elif raw >= LARGEST:
            _count(reading, "too_large")
        elif slot.part is SamplePart.COUNT:
            buckets.count = raw if buckets.count is None else max(buckets.count, raw) if slot.copy else buckets.count + raw
        else:
            before = buckets.cumulative.get(slot.bound)
            buckets.cumulative[slot.bound] = raw if before is None else max(before, raw) if slot.copy else before + raw

    def _drop_poisoned(self, reading: PageReading) -> None:
        """Drop the sums that a failed load falsified.

        One sum is negative, the other is too large by as much; neither says anything about times.
        """
        for (name, engine, label), buckets in list(reading.histograms.items()):
            if buckets.total is None or buckets.total >= 0:
                continue
            for each in (name, *_POISONED_WITH.get(name, ())):
                other = reading.histograms.get((each, engine, label))
                if other is not None and other.total is not None:
                    other.total = None
                    _count(reading, "poisoned_sum")

    def _resolve(self, name: str, labels: Mapping[str, str]) -> _Slot | None:
        if name == LORA:
            counts = tuple(len([each for each in labels.get(key, "").split(",") if each.strip()]) for key in _LORA_LABELS)
            return _Slot(
                ("lora_adapters", "", ""), BY_NAME["lora_adapters"], 0, SamplePart.VALUE, 1.0, 0.0, False, (counts[0], counts[1])
            )
        found = find(name)
        if found is None:
            return None
        if (model := labels.get("model_name")) and len(self._models) < 2:
            self._models.add(model[:_LONGEST_LABEL])
        return self._slot(found, labels)

    def _slot(self, found: FamilyMatch, labels: Mapping[str, str]) -> _Slot | None:
        family = found.family
        quantity = BY_NAME[family.quantity]
        engine = next((labels[name] for name in ENGINE_LABELS if labels.get(name)), "")[:_LONGEST_LABEL]
        label = family.fixed or _label(labels.get(family.label, "") if family.label else "")
        admitted = self._admitted.setdefault(quantity.name, set())
        if (engine, label) not in admitted:
            if len(admitted) >= self._most_labels:
                self.labels_folded += 1
                if quantity.kind is QuantityKind.GAUGE:
                    return None  # the largest of the remaining ones would mean nothing
                engine, label = "", OTHER
            else:
                admitted.add((engine, label))
        try:
            bound = float(labels["le"]) * family.scale if found.part is SamplePart.BUCKET else 0.0
        except (KeyError, ValueError):
            return None
        copy = not COPY_LABELS.isdisjoint(labels)
        return _Slot((quantity.name, engine, label), quantity, found.rank, found.part, family.scale, bound, copy)


_LORA_LABELS: Final = ("running_lora_adapters", "waiting_lora_adapters")


def _label(value: str) -> str:
    """Return a worker's URL as host:port and any other value unchanged, bounded."""
    if value.startswith(("http://", "https://", "grpc://")):
        with contextlib.suppress(ValueError):
            value = urlsplit(value).netloc.rpartition("@")[2] or value
    return value[:_LONGEST_LABEL]


def _sane(reading: PageReading, slot: _Slot, value: float) -> float | None:
    """Return the value, or None when it has no meaning.

    A negative counter reads as 0: it was that, and counts on (case D10).
    """
    if not math.isfinite(value):
        _count(reading, "not_finite")
        return None
    if value in BLANKS:
        _count(reading, "blank")
        return None
    if value < 0:
        _count(reading, "negative")
        return 0.0 if slot.quantity.kind is QuantityKind.COUNTER else None
    return value


def _count(reading: PageReading, reason: str) -> None:
    reading.invalid[reason] = reading.invalid.get(reason, 0) + 1
