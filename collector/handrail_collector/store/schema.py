"""Define the store's tables and encode a table as a Parquet file.

Encodings were chosen by size on rows like those of real vLLM 0.32 (``tests/bench/bench_store.py`` prints bytes by column).
Random ids are plain. Repeated words are dictionaries. Neighbours that repeat, such as ids in a trace, share prefixes.
Sorted and small integers are deltas. Fractions are split by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import signature

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from handrail.phases import Phase

SCHEMA_VERSION = 2
"""The version of the schema; it rises when a column changes its name or meaning.

A reader refuses files of a later version. New columns do not raise it. Files of version 1 have other names and gap sketches
(``upgrade.py``).
"""

SCHEMA_VERSION_KEY = "handrail.schema_version"
TABLE_KEY = "handrail.table"
ZSTD_LEVEL = 6
ROW_GROUP_ROWS = 131_072
DICTIONARY_BYTES = 8 * 1024 * 1024


class Table(str, Enum):
    """The tables of the store; the value is the folder."""

    REQUESTS = "requests"
    SPANS = "spans"
    ROLLUPS = "rollups"
    KV_FETCHES = "kv_fetches"
    STALLS = "stalls"
    PROCESS_EVENTS = "process_events"
    FINDINGS = "findings"
    CLOCK_PAIRS = "clock_pairs"
    ITERATIONS = "iterations"
    GPU_SAMPLES = "gpu_samples"
    LINK_SAMPLES = "link_samples"
    ENGINE_SAMPLES = "engine_samples"
    LINK_FACTS = "link_facts"


class Encoding(str, Enum):
    """Parquet encodings in use; the value is pyarrow's name."""

    DICTIONARY = "DICTIONARY"
    PLAIN = "PLAIN"
    DELTA = "DELTA_BINARY_PACKED"
    SPLIT = "BYTE_STREAM_SPLIT"
    PREFIX = "DELTA_BYTE_ARRAY"
    LENGTHS = "DELTA_LENGTH_BYTE_ARRAY"


@dataclass(frozen=True, slots=True)
class StoreColumn:
    """One column: name, Arrow type, encoding."""

    name: str
    type: pa.DataType
    encoding: Encoding


ID_8 = pa.binary(8)
ID_16 = pa.binary(16)

_D, _P, _B, _S, _L = Encoding.DICTIONARY, Encoding.PLAIN, Encoding.DELTA, Encoding.SPLIT, Encoding.LENGTHS
_TEXT, _INT, _SMALL, _BYTES, _BOOL = pa.string(), pa.int64(), pa.int32(), pa.binary(), pa.bool_()
_COUNTS = pa.list_(pa.int32())


def phase_column(phase: str) -> str:
    """Return the column of a phase in ``requests``.

    The column holds the sum over the row's phases of that name, ns.
    """
    return f"phase_{phase}_ns"


UNATTRIBUTED_PREFILL = "unattributed_prefill_ns"
UNATTRIBUTED_DECODE = "unattributed_decode_ns"
"""Columns of ``requests`` that split ``phase_unattributed_ns`` by place.

They hold the part inside P and the part inside D; the rest lies between them.
"""

REQUEST_COLUMNS: tuple[StoreColumn, ...] = (
    StoreColumn("started_unix_ns", _INT, _B),
    StoreColumn("trace_id", ID_16, _P),
    StoreColumn("request_id", ID_8, _P),
    StoreColumn("version", _SMALL, _D),
    StoreColumn("scope", _TEXT, _D),
    StoreColumn("other_trace_ids", _BYTES, _L),  # 16 bytes each
    StoreColumn("client_request_id", _TEXT, _L),
    StoreColumn("request_key", _TEXT, _L),  # '=': equal to client_request_id (see tables/requests.py)
    StoreColumn("response_id", _TEXT, _L),  # '=' stands for request_key (see tables/requests.py)
    StoreColumn("model", _TEXT, _D),
    StoreColumn("operation", _TEXT, _D),
    StoreColumn("path", _TEXT, _D),
    StoreColumn("stream", _BOOL, _P),
    StoreColumn("ttfb_ns", _INT, _B),
    StoreColumn("ttft_token_ns", _INT, _B),
    StoreColumn("ttft_text_ns", _INT, _B),
    StoreColumn("duration_ns", _INT, _B),
    StoreColumn("outcome", _TEXT, _D),
    StoreColumn("error_type", _TEXT, _D),
    StoreColumn("status", _SMALL, _D),
    StoreColumn("prompt_tokens", _INT, _D),
    StoreColumn("output_tokens", _INT, _D),
    StoreColumn("cached_tokens", _INT, _D),
    StoreColumn("edge_instance", _TEXT, _D),
    StoreColumn("router_instance", _TEXT, _D),
    StoreColumn("prefill_instance", _TEXT, _D),
    StoreColumn("decode_instance", _TEXT, _D),
    StoreColumn("prefill_host", _TEXT, _D),
    StoreColumn("decode_host", _TEXT, _D),
    StoreColumn("prefill_attempts", _SMALL, _D),
    StoreColumn("kv_outcome", _TEXT, _D),
    StoreColumn("kv_reason", _TEXT, _D),
    StoreColumn("kv_evidence", pa.list_(_TEXT), _D),
    StoreColumn("kv_bytes", _INT, _D),
    StoreColumn("kv_lost_ns", _INT, _B),
    StoreColumn("kv_returned_tokens", _INT, _D),
    StoreColumn("prefill_paused_ns", _INT, _D),
    StoreColumn("decode_paused_ns", _INT, _D),
    StoreColumn("gap_unit", _TEXT, _D),
    StoreColumn("gap_count", _INT, _D),
    StoreColumn("gap_max_ns", _INT, _B),
    StoreColumn("gap_p50_ns", _INT, _D),
    StoreColumn("gap_p99_ns", _INT, _D),
    StoreColumn("gap_sum_ns", _INT, _B),
    StoreColumn("gap_min_ns", _INT, _B),
    StoreColumn("gap_buckets", _COUNTS, _B),
    StoreColumn("gap_counts", _COUNTS, _D),
    StoreColumn("phase_of", _TEXT, _D),
    *(StoreColumn(phase_column(phase.value), _INT, _B) for phase in Phase),
    StoreColumn(UNATTRIBUTED_PREFILL, _INT, _B),
    StoreColumn(UNATTRIBUTED_DECODE, _INT, _B),
    StoreColumn("phase_shape", _TEXT, _D),  # JSON: [[phase, process, source, [may_be]], ...] in the row's order
    StoreColumn("phase_rest", _BYTES, _L),  # varints: bounds, and durations of phases that occur twice
    StoreColumn("evidence_shape", _TEXT, _D),  # JSON: [[index of span id, ...], [[evidence, how, index], ...]]
    StoreColumn("evidence_ids", _BYTES, _L),  # 8 bytes each; index 0 is request_id itself and not repeated here
    StoreColumn("findings", pa.list_(_TEXT), _D),
    StoreColumn("hints", pa.list_(_TEXT), _D),
    StoreColumn("complete", _BOOL, _P),
    StoreColumn("first_offset", _INT, _B),
    StoreColumn("last_offset", _INT, _B),
)

SPAN_COLUMNS: tuple[StoreColumn, ...] = (
    StoreColumn("offset", _INT, _B),
    StoreColumn("trace_id", ID_16, _D),
    StoreColumn("span_id", ID_8, _P),
    StoreColumn("parent_span_id", ID_8, _D),
    StoreColumn("name", _TEXT, _D),
    StoreColumn("kind", _SMALL, _D),
    StoreColumn("start_unix_ns", _INT, _B),
    StoreColumn("duration_ns", _INT, _B),
    StoreColumn("status", _SMALL, _D),
    StoreColumn("status_message", _TEXT, _D),
    StoreColumn("flags", pa.int64(), _D),
    StoreColumn("trace_state", _TEXT, _D),
    StoreColumn("role", _TEXT, _D),
    StoreColumn("instance", _TEXT, _D),
    StoreColumn("service", _TEXT, _D),
    StoreColumn("scope", _TEXT, _D),
    StoreColumn("resource", _TEXT, _D),  # JSON
    StoreColumn("events", _TEXT, _D),  # JSON
    StoreColumn("links", _TEXT, _D),  # JSON
    StoreColumn("raw_bytes", _SMALL, _D),
    StoreColumn("repeats", _SMALL, _D),  # bits: attributes left out because they repeat others (tables/spans.py: REPEATS)
    StoreColumn("attributes_more", _TEXT, _D),  # JSON: the attributes without a column of their own
)

ROLLUP_COLUMNS: tuple[StoreColumn, ...] = (
    StoreColumn("hour_unix_ns", _INT, _D),
    StoreColumn("measure", _TEXT, _D),  # a value of queries/period.py: Measure
    StoreColumn("scope", _TEXT, _D),
    StoreColumn("model", _TEXT, _D),
    StoreColumn("prefill_host", _TEXT, _D),
    StoreColumn("decode_host", _TEXT, _D),
    StoreColumn("outcome", _TEXT, _D),
    StoreColumn("kv_outcome", _TEXT, _D),
    StoreColumn("bin", _SMALL, _D),  # of the measured time
    StoreColumn("requests", _INT, _D),
    StoreColumn("timed", _INT, _D),  # requests with such a time
    StoreColumn("complete", _INT, _D),
    StoreColumn("value_sum_ns", _INT, _B),
    *(StoreColumn(phase_column(phase.value), _INT, _B) for phase in Phase),
    StoreColumn(UNATTRIBUTED_PREFILL, _INT, _B),
    StoreColumn(UNATTRIBUTED_DECODE, _INT, _B),
    StoreColumn("gap_sum_ns", _INT, _B),
    StoreColumn("gap_min_ns", _INT, _B),
    StoreColumn("gap_max_ns", _INT, _B),
    StoreColumn("gap_buckets", _COUNTS, _B),
    StoreColumn("gap_counts", pa.list_(pa.int64()), _D),
)
"""Columns of rollups: requests counted by place, outcome and time.

Each row holds sums over its requests (``rollups.py``).
"""

ATTRIBUTE_TYPES: dict[str, tuple[pa.DataType, Encoding]] = {
    "s": (_TEXT, _D),
    "i": (_INT, _B),
    "d": (pa.float64(), _S),
    "b": (_BOOL, _P),
    "x": (_BYTES, _L),
    "j": (_TEXT, _D),  # JSON: arrays and key-value lists
}
"""Column types by letter: attribute KEY with integer values is ``a.i.KEY``."""


def attribute_column(letter: str, key: str) -> StoreColumn:
    """Return the column of one span attribute."""
    kind, encoding = ATTRIBUTE_TYPES[letter]
    return StoreColumn(f"a.{letter}.{key}", kind, encoding)


def encode(table: pa.Table, name: Table, columns: tuple[StoreColumn, ...]) -> bytes:
    """Encode ``table`` as a Parquet file; ``columns`` lists its columns in order."""
    chosen = {_leaf(column): _encoding(column, table[column.name]) for column in columns}
    sink = pa.BufferOutputStream()
    blooms = {c.name: _bloom(table[c.name]) for c in columns if c.name in LOOKED_UP} if name is Table.REQUESTS else {}
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=[leaf for leaf, encoding in chosen.items() if encoding is Encoding.DICTIONARY],
        column_encoding={leaf: encoding.value for leaf, encoding in chosen.items() if encoding is not Encoding.DICTIONARY},
        dictionary_pagesize_limit=DICTIONARY_BYTES,
        write_statistics=[c.name for c in columns if c.name in STATISTICS],
        store_schema=False,  # the Arrow schema would be half of a small file and repeats Parquet's
        write_page_checksum=True,
        **({"bloom_filter_options": blooms} if blooms and BLOOM_FILTERS else {}),
    ) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata({SCHEMA_VERSION_KEY: str(SCHEMA_VERSION), TABLE_KEY: name.value})
    return bytes(sink.getvalue())


STATISTICS = frozenset({"started_unix_ns", "start_unix_ns", "at_unix_ns", "version", "ttft_token_ns", "duration_ns"})
"""Columns with minimum and maximum per row group, by which queries prune."""


LOOKED_UP = frozenset({"client_request_id", "request_key", "response_id", "request_id", "trace_id"})
"""Columns of ``requests`` with a Bloom filter per row group.

A look-up by id reads only the groups that may have it (``read.py``).
"""

BLOOM_FILTERS = "bloom_filter_options" in signature(pq.ParquetWriter.__init__).parameters
"""Whether this pyarrow writes Bloom filters.

Files without them are read whole, with the same answers.
"""


def _bloom(values: pa.ChunkedArray) -> dict[str, float]:
    """Choose the Bloom filter options for a row group.

    One group in a hundred is read in vain, at 10 bits per distinct value.
    """
    return {"ndv": max(1, min(ROW_GROUP_ROWS, pc.count_distinct(values).as_py())), "fpp": 0.01}


def _leaf(column: StoreColumn) -> str:
    return f"{column.name}.list.element" if pa.types.is_list(column.type) else column.name


def _encoding(column: StoreColumn, values: pa.ChunkedArray) -> Encoding:
    """Choose the encoding of a column.

    A dictionary of mostly different texts or fractions would be larger than the alternatives.
    """
    words = pa.types.is_string(column.type) or pa.types.is_fixed_size_binary(column.type)
    fractions = pa.types.is_floating(column.type)
    if column.encoding is not Encoding.DICTIONARY or not (words or fractions):
        return column.encoding
    if pc.count_distinct(values).as_py() * 4 <= len(values) - values.null_count:
        return column.encoding
    return Encoding.SPLIT if fractions else Encoding.PREFIX


def column_array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Convert ``values`` to a column.

    Integers out of range become the nearest that fits, so that their rows are kept.
    Raises ``ValueError`` or ``pa.ArrowInvalid`` for values of another type.
    """
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid):
        if not pa.types.is_integer(kind):
            raise
        most = 2 ** (kind.bit_width - 1) - 1
        return pa.array([max(-most - 1, min(v, most)) if isinstance(v, int) else v for v in values], kind)
