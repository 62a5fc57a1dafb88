"""One reading of an engine's metrics page, and its differences from the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from handrail.records.process import Process, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineValue:
    """One number of an engine's metrics page in our schema, in base units.

    The schema is ``records/quantities.py``.
    """

    name: str
    value: float
    engine: str = ""  # the engine's own ``engine`` label (a data-parallel rank); '' where it is missing
    label: str = ""  # value of the quantity's one label: a reason, a source, a stage
    start_unix_ns: int = 0  # counters: the known start of the count; 0 for gauges


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHistogram:
    """One histogram of an engine's metrics page.

    ``counts`` per bucket, one more than ``bounds``. ``total`` is None where the engine's sum is invalid.
    """

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
    """One scrape of an engine or router. A value that the page lacks is absent, not 0."""

    process: Process
    source: Source
    at_unix_ns: int
    model: str = ""  # where the page names exactly one
    values: tuple[EngineValue, ...] = ()
    histograms: tuple[EngineHistogram, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests that a proxy has seen to their end since ``start_unix_ns``, by outcome.

    Coverage is computed over them, so lost spans cannot hide requests.
    """

    process: Process
    at_unix_ns: int
    start_unix_ns: int
    finished: Mapping[str, int]


class SchemaState(str, Enum):
    """Difference between a family on an engine's page and this release's table.

    The table lists the name that is expected first.
    """

    MISSING = "missing"  # no name of this quantity is there
    RENAMED = "renamed"  # only a name that other versions use
    BOTH = "both"  # old and new at once: the new one is read
    UNIT_CHANGED = "unit_changed"  # read, converted
    UNKNOWN = "unknown"  # looks like a known one under an unknown name


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaNote:
    """One difference. ``seen`` is the family as exposed, '' for a missing one."""

    state: SchemaState
    quantity: str
    seen: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaReport:
    """Differences of one page, sent at start and whenever its families change."""

    process: Process
    source: Source
    at_unix_ns: int
    emitters: tuple[str, ...]  # whose families are on the page: vllm, nixl, sglang, ...
    notes: tuple[SchemaNote, ...] = ()
