"""Count requests by place, outcome and time with Ibis expressions.

Rollups and rows share this one definition.
A *cell* holds what the requests of one combination have in common, their number, and the sums of their phases.
This module only builds expressions over unbound tables. ``period.py``, ``rolled.py`` and ``rollup.py`` run
them (docs/decisions/0006).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import ibis
import pyarrow as pa

from handrail.phases import Phase
from handrail_collector.rows import MERGED
from handrail_collector.store.schema import (
    REQUEST_COLUMNS,
    ROLLUP_COLUMNS,
    UNATTRIBUTED_DECODE,
    UNATTRIBUTED_PREFILL,
    StoreColumn,
    phase_column,
)

BINS_PER_E: Final = 51
"""Bins of a time within a factor of e.

Each bin is 2 % wide, so its middle is within ``BIN_ERROR`` of every value in it.
"""

BIN_ERROR: Final = 0.01

DIMENSIONS: Final = ("scope", "model", "prefill_host", "decode_host", "outcome", "kv_outcome")
PHASE_SUMS: Final = (*(phase_column(phase.value) for phase in Phase), UNATTRIBUTED_PREFILL, UNATTRIBUTED_DECODE)
"""Columns that a cell sums: every phase, and the unattributed time by place."""

PAUSED: Final = ("prefill_paused_ns", "decode_paused_ns")
"""Columns with the time that an engine's process was paused.

A request waited for its first token at that engine meanwhile.
"""

SLOW, USUAL, OTHER = "slow", "usual", "other"
TTFT_OF: Final = "ttft"  # value of ``phase_of`` for phases that sum to the time to first token


class Measure(str, Enum):
    """What the times of a cell measure."""

    TTFT = "ttft"  # time to first generated token; requests without one have cells too, with no bin
    GAP = "gap"  # largest gap of a stream; no phases
    SKETCH = "sketch"  # only in rollups: the sketch of all gaps of a scope and model


VALUE: Final = {Measure.TTFT: "ttft_ns", Measure.GAP: "gap_max_ns"}
"""Column of placed rows with the time, by measure."""

_IDS: Final = ("trace_id", "request_id", "version")
READ: Final = (
    *(
        *_IDS,
        *DIMENSIONS,
        *PHASE_SUMS,
        "started_unix_ns",
        "prefill_instance",
        "prefill_attempts",
        "decode_instance",
        "prompt_tokens",
        "cached_tokens",
        *PAUSED,
    ),
    *("phase_of", "phase_shape", "ttft_token_ns", "gap_max_ns", "gap_sketch", "complete", "client_request_id"),
)
_READ_COLUMNS: Final = tuple(column for column in REQUEST_COLUMNS if column.name in READ)

Expression = Any
"""An Ibis table or value; its own types are too vague to name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodQuery:
    """Which requests count. None: any."""

    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    scope: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bounds of usual times, and the bound of slow times, of one scope."""

    baseline_from_ns: int
    baseline_to_ns: int
    slow_from_ns: int


def _quantile_disc(values: Expression, ranks: Expression) -> Expression:
    raise NotImplementedError("the backend's own function")


exact_quantiles: Final = ibis.udf.agg.builtin(
    _quantile_disc, name="quantile_disc", signature=(("int64", "array<float64>"), "array<int64>")
)
"""Exact quantiles: the values at ``ceil(rank * count)`` in ascending order.

Nulls are not counted. This is DuckDB's ``quantile_disc``, which is exact.
ClickHouse's ``quantile`` is an estimate; there, ``quantilesExact`` is the name to use.
"""


def wanted(of: PeriodQuery, known: Mapping[str, Collection[str]], *, newer_than: int | None = None) -> Expression:
    """Select the newest versions of the requests that count.

    ``known``: the columns of the tables that exist. Table ``requests``: rows that nothing supersedes.
    Table ``touched``: rows of which some are superseded by rows of table ``newer`` with a version above ``newer_than``.
    """
    parts = [_counting(_unbound(_READ_COLUMNS, name, known[name]), of) for name in ("requests", "touched") if name in known]
    if "touched" in known:
        assert newer_than is not None
        newest = _newest(newer_than)
        parts[-1] = parts[-1].anti_join(newest, _superseded_by(parts[-1], newest))
    return parts[0] if len(parts) == 1 else ibis.union(parts[0].select(*READ), parts[1].select(*READ))


def models(of: PeriodQuery, known: Mapping[str, Collection[str]]) -> Expression:
    """Select every model name in table ``requests`` of the period and scope.

    Column: ``model``.
    """
    table = _counting(_unbound(_READ_COLUMNS, "requests", known["requests"]), of)
    return table.filter(table.model.notnull()).select("model").distinct()


def superseded(of: PeriodQuery, newer_than: int) -> Expression:
    """Select files of table ``requests`` with rows that table ``newer`` supersedes.

    Column: ``filename``.
    """
    table = _unbound(_READ_COLUMNS, "requests", (*_IDS, "scope", "model", "started_unix_ns"), more={"filename": "string"})
    newest = _newest(newer_than)
    return table.semi_join(newest, _superseded_by(table, newest)).select("filename").distinct()


def later_versions(newer_than: int) -> Expression:
    """Select requests in table ``newer`` with an earlier version in another table.

    Columns: trace id, request id and ``newest`` version. ``newer_than``: the lowest version of the store.
    A request is left out when table ``newer`` has every version of it from ``newer_than`` on.
    """
    newer = _unbound([column for column in _READ_COLUMNS if column.name in _IDS], "newer", _IDS)
    found = newer.group_by("trace_id", "request_id").agg(newest=lambda t: t.version.max(), here=lambda t: t.version.nunique())
    return found.filter(found.newest - newer_than + 1 > found.here).drop("here")


def holding_earlier() -> Expression:
    """Select the files of table ``requests`` with rows that ``later`` replaces.

    ``later``: the result of ``later_versions``. Column: ``filename``.
    """
    table = _unbound([column for column in _READ_COLUMNS if column.name in _IDS], "requests", _IDS, more={"filename": "string"})
    later = ibis.table({"trace_id": "binary", "request_id": "binary", "newest": "int32"}, name="later")
    return table.semi_join(later, _superseded_by(table, later)).select("filename").distinct()


def _newest(newer_than: int) -> Expression:
    newer = _unbound([column for column in _READ_COLUMNS if column.name in _IDS], "newer", _IDS)
    return newer.filter(newer.version > newer_than).group_by("trace_id", "request_id").agg(newest=lambda t: t.version.max())


def _superseded_by(table: Expression, newest: Expression) -> list[Expression]:
    return [table.request_id == newest.request_id, table.trace_id == newest.trace_id, table.version < newest.newest]


def _counting(table: Expression, of: PeriodQuery) -> Expression:
    table = table.filter(table.scope != MERGED)
    if of.since_unix_ns is not None:
        table = table.filter(table.started_unix_ns >= of.since_unix_ns)
    if of.until_unix_ns is not None:
        table = table.filter(table.started_unix_ns < of.until_unix_ns)
    return _matching(table, of)


def placed(table: Expression) -> Expression:
    """Add the dimensions of a cell to rows of ``requests``.

    A host without a name is identified by its process.
    """
    return table.mutate(
        ttft_ns=ibis.cases((table.phase_of == TTFT_OF, table.ttft_token_ns), else_=ibis.null("int64")),
        prefill_host=ibis.coalesce(table.prefill_host, table.prefill_instance),
        decode_host=ibis.coalesce(table.decode_host, table.decode_instance),
    )


def cells(table: Expression, measure: Measure, cuts: Mapping[str, Thresholds] | None = None) -> Expression:
    """Group placed rows into cells.

    Cells are by ``bin`` of their time (null: no time), or with ``cuts`` of their scope by exact ``part``.
    Only requests with a time have phase sums, because the phases of others sum to something else.
    """
    if measure is Measure.GAP:
        table = table.filter(table.gap_max_ns.notnull())
    value = table[VALUE[measure]]
    place = (ibis.greatest(value, 1).cast("float64").ln() * BINS_PER_E).floor().cast("int32")
    by_bin = ibis.cases((value.notnull(), place), else_=ibis.null("int32")).name("bin")
    key = by_bin if cuts is None else _part(table, value, cuts).name("part")
    sums = {name: table[name].sum() for name in PHASE_SUMS} if measure is Measure.TTFT else {}
    return table.group_by([*DIMENSIONS, key]).agg(
        requests=table.count(), timed=value.count(), complete=table.complete.sum(), value_sum_ns=value.sum(), **sums
    )


def rolled(of: PeriodQuery, measure: Measure) -> Expression:
    """Sum the cells of the table ``rollups`` over its hours."""
    table = _unbound(ROLLUP_COLUMNS, "rollups", [column.name for column in ROLLUP_COLUMNS])
    table = _matching(table.filter(table.measure == measure.value), of)
    sums = ("requests", "timed", "complete", "value_sum_ns", *(PHASE_SUMS if measure is Measure.TTFT else ()))
    return table.group_by([*DIMENSIONS, "bin"]).agg(**{name: table[name].sum() for name in sums})


def sketches(table: Expression) -> Expression:
    """Select scope, model and gap sketch of every stream that has one."""
    return table.filter(table.gap_sketch.notnull()).select("scope", "model", "gap_sketch")


def quantiles(table: Expression, ranks: Sequence[float]) -> Expression:
    """Compute the number of values and the exact quantiles of each measure, by scope.

    Quantiles are null when there is no value.
    """
    values = {measure: table[VALUE[measure]] for measure in VALUE}
    counted = {f"{measure.value}_counted": value.count() for measure, value in values.items()}
    found = {f"{measure.value}_values": exact_quantiles(value, list(ranks)) for measure, value in values.items()}
    return table.group_by("scope").agg(**counted, **found)


def tail_and_sample(table: Expression, cuts: Mapping[str, Thresholds], sample: int) -> Expression:
    """Select requests with a slow first token, and a sample of all, one by one.

    The sample is one in ``sample`` of all requests that have a first token.
    """
    slow = _part(table, table.ttft_ns, cuts) == SLOW
    sampled = table.started_unix_ns.hash() % sample == 0
    table = table.mutate(slow=slow, sampled=sampled)
    table = table.filter(table.ttft_ns.notnull(), table.slow | table.sampled)
    uncached = (table.prompt_tokens - ibis.coalesce(table.cached_tokens, 0)).name("uncached_tokens")
    cached = ibis.coalesce(table.cached_tokens, 0).name("cached_tokens")
    moved = (table.prefill_attempts > 1).name("moved")
    plain = (
        *DIMENSIONS,
        *_IDS,
        *PHASE_SUMS,
        *PAUSED,
        "client_request_id",
        "started_unix_ns",
        "ttft_ns",
        "phase_shape",
        "slow",
        "sampled",
    )
    return table.select(*plain, uncached, cached, moved)


def _matching(table: Expression, of: PeriodQuery) -> Expression:
    for name in ("scope", "model"):
        if (value := getattr(of, name)) is not None:
            table = table.filter(table[name] == value)
    return table


def _part(table: Expression, value: Expression, cuts: Mapping[str, Thresholds]) -> Expression:
    cases = []
    for scope, cut in sorted(cuts.items()):
        here = table.scope == scope
        cases.append((here & (value >= cut.slow_from_ns), SLOW))
        cases.append((here & value.between(cut.baseline_from_ns, cut.baseline_to_ns), USUAL))
    return ibis.cases(*cases, else_=OTHER) if cases else ibis.literal(OTHER)


def _unbound(
    columns: Sequence[StoreColumn], name: str, known: Collection[str], more: Mapping[str, str] | None = None
) -> Expression:
    """Define an unbound table; columns that its files are too old to have are null."""
    table = ibis.table({c.name: _ibis_type(c.type) for c in columns if c.name in known} | dict(more or {}), name=name)
    missing = {c.name: ibis.null(_ibis_type(c.type)) for c in columns if c.name not in known}
    return table.mutate(**missing) if missing and not more else table


def _ibis_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return "array<string>"
    return "binary" if pa.types.is_fixed_size_binary(kind) else str(kind).replace("bool", "boolean")
