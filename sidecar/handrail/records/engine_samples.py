"""One reading of an engine's metrics page, and how its families differ from what is expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from handrail.records.process import Process, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineValue:
    """One number of an engine's metrics page in our schema (``records/quantities.py``), in base units."""

    name: str
    value: float
    engine: str = ""  # the engine's own ``engine`` label (a data-parallel rank); '' where there is none
    label: str = ""  # value of the quantity's one label: a reason, a source, a stage
    start_unix_ns: int = 0  # counters: since when it counts, as far as we know; 0 for gauges


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHistogram:
    """One histogram: ``counts`` per bucket, one more than ``bounds``. ``total`` is None where the engine's sum makes no sense."""

    name: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    total: float | None
    engine: str = ""
    label: str = ""
    start_unix_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """One scrape of an engine or router. What its page lacks is absent, never 0."""

    process: Process
    source: Source
    at_unix_ns: int
    model: str = ""  # where the page names exactly one
    values: tuple[EngineValue, ...] = ()
    histograms: tuple[EngineHistogram, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """How many requests a proxy has seen to their end since ``start_unix_ns``, by outcome: lost spans cannot hide them."""

    process: Process
    at_unix_ns: int
    start_unix_ns: int
    finished: Mapping[str, int]


class SchemaState(str, Enum):
    """How a family of an engine's page differs from what this release's table expects first."""

    MISSING = "missing"  # no name of this quantity is there
    RENAMED = "renamed"  # only a name that other versions use
    BOTH = "both"  # old and new at once: the new one is read
    UNIT_CHANGED = "unit_changed"  # read, converted
    UNKNOWN = "unknown"  # looks like one we know under a name we do not


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaNote:
    """One difference. ``seen`` is the family as exposed, '' for a missing one."""

    state: SchemaState
    quantity: str
    seen: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaReport:
    """Sent once at start and whenever the page's families change."""

    process: Process
    source: Source
    at_unix_ns: int
    emitters: tuple[str, ...]  # whose families are there: vllm, nixl, sglang, ...
    notes: tuple[SchemaNote, ...] = ()
