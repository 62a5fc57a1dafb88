"""Convert ``RequestRow`` to columns of the ``requests`` table and back, lossless.

Fields that queries sort or filter by have columns of their own. Fields that are only displayed are packed:
the sources of the phases and the joins of the evidence form a few shapes that repeat, so they are dictionary text.
The figures in them are variable-length integers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter

import pyarrow as pa

from handrail.phases import Phase, Place
from handrail_collector.rows import JoinRow, PhaseRow, RequestRow
from handrail_collector.store.schema import REQUEST_COLUMNS, UNATTRIBUTED_DECODE, UNATTRIBUTED_PREFILL, column_array, phase_column

PHASES = tuple(phase.value for phase in Phase)
_COMPUTED = frozenset(
    {"trace_id", "request_id", "other_trace_ids", "request_key", "response_id"}
    | {"phase_shape", "phase_rest", "evidence_shape", "evidence_ids"}
    | {phase_column(phase) for phase in PHASES}
    | {UNATTRIBUTED_PREFILL, UNATTRIBUTED_DECODE}
)
_PLAIN = tuple(c.name for c in REQUEST_COLUMNS if c.name not in _COMPUTED)
_LATER = frozenset(
    {"kv_reason", "kv_evidence", "kv_bytes", "kv_lost_ns", "kv_returned_tokens", "prefill_paused_ns", "decode_paused_ns"}
)
"""Columns that files of the first schema may lack."""

_REQUIRED = tuple(f.name for f in fields(RequestRow) if f.name in _PLAIN and f.name not in _LATER and "None" not in str(f.type))
"""Columns with a value in every written row.

DuckDB may read null where a bit of the file flipped.
"""

_plain_values = attrgetter(*_PLAIN)

SAME = "="
"""Marker for an equal id.

It stands for ``client_request_id`` in a stored ``request_key``, and for ``request_key`` in a stored ``response_id``.
"""

LITERAL = "\\"
"""Prefix of a stored id that is read literally.

An id gets it when it holds ``=`` or ``\\`` itself.
"""

PhaseShape = tuple[tuple[str, str, str, tuple[str, ...]], ...]
EvidenceShape = tuple[tuple[int, ...], tuple[tuple[str, str, int], ...]]


def requests_table(rows: Sequence[RequestRow]) -> pa.Table:
    """Encode ``rows`` as a table in the order of their start.

    Raises ``ValueError`` for ids that are not hex or phases outside the enum.
    """
    rows = sorted(rows, key=lambda row: row.started_unix_ns)
    columns: dict[str, Sequence[object]] = (
        dict(zip(_PLAIN, zip(*map(_plain_values, rows), strict=True), strict=True)) if rows else {}
    )
    columns["trace_id"] = [bytes.fromhex(row.trace_id) for row in rows]
    columns["request_id"] = [bytes.fromhex(row.request_id) for row in rows]
    columns["other_trace_ids"] = [pack_ids(row.other_trace_ids) or None for row in rows]
    columns["request_key"] = [_shorten(row.request_key, row.client_request_id) for row in rows]
    columns["response_id"] = [_shorten(row.response_id, row.request_key) for row in rows]
    phases = [_phases(row.phases) for row in rows]
    columns["phase_shape"] = [shape for shape, _, _ in phases]
    columns["phase_rest"] = [rest for _, rest, _ in phases]
    for phase in PHASES:
        columns[phase_column(phase)] = [sums.get(phase) for _, _, sums in phases]
    columns[UNATTRIBUTED_PREFILL] = [_unattributed(row.phases, Place.PREFILL) for row in rows]
    columns[UNATTRIBUTED_DECODE] = [_unattributed(row.phases, Place.DECODE) for row in rows]
    evidence = [_evidence(row) for row in rows]
    columns["evidence_shape"] = [shape for shape, _ in evidence]
    columns["evidence_ids"] = [ids for _, ids in evidence]
    return pa.table(
        [column_array(columns.get(c.name, ()), c.type) for c in REQUEST_COLUMNS],
        schema=pa.schema([(c.name, c.type) for c in REQUEST_COLUMNS]),
    )


def request_row(stored: Mapping[str, object]) -> RequestRow:
    """Decode one row, given by column name.

    Raises ``ValueError`` for a damaged row.
    """
    columns = {name: stored[name] for name in _PLAIN if name not in _LATER} | {name: stored.get(name) for name in _LATER}
    for name in _REQUIRED:
        if columns[name] is None:
            raise ValueError(f"a damaged row: {name} has no value")
    columns["gap_buckets"] = tuple(_integers(stored["gap_buckets"]))
    columns["gap_counts"] = tuple(_integers(stored["gap_counts"]))
    columns["kv_evidence"] = tuple(_strings(stored.get("kv_evidence") or ()))
    columns["findings"] = tuple(_strings(stored["findings"]))
    columns["hints"] = tuple(_strings(stored["hints"]))
    request_id = _bytes(stored["request_id"]).hex()
    columns["request_id"] = request_id
    columns["trace_id"] = _bytes(stored["trace_id"]).hex()
    columns["other_trace_ids"] = unpack_ids(_bytes(stored["other_trace_ids"]), 16)
    key, response = (stored.get(f"stored_{name}", stored[name]) for name in ("request_key", "response_id"))  # a view has both
    columns["request_key"] = _lengthen(key, columns["client_request_id"])
    columns["response_id"] = _lengthen(response, columns["request_key"])
    columns["phases"] = tuple(_phase_rows(stored))
    columns["span_ids"], columns["joins"] = _evidence_rows(stored, request_id)
    return RequestRow(**columns)  # type: ignore[arg-type]  # column types are the schema's; checked by the round-trip test


def _shorten(text: str | None, known: str | None) -> str | None:
    if text is None:
        return None
    if SAME in text or LITERAL in text:
        return LITERAL + text
    return text.replace(known, SAME, 1) if known else text


def _lengthen(text: object, known: object) -> str | None:
    if not isinstance(text, str):
        return None
    if text.startswith(LITERAL):
        return text[len(LITERAL) :]
    return text.replace(SAME, known, 1) if isinstance(known, str) else text


def _phases(phases: Sequence[PhaseRow]) -> tuple[str, bytes | None, Mapping[str, int]]:
    sums: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for row in phases:
        if row.phase not in _KNOWN:
            raise ValueError(f"phase {row.phase!r}: not one of {', '.join(PHASES)}")
        sums[row.phase] += row.duration_ns
        named[row.phase] += 1
    shape = _phase_text(tuple((row.phase, row.process, row.source, row.may_be) for row in phases))
    rest: list[int] = []
    for row in phases:
        if named[row.phase] > 1:
            rest.append(row.duration_ns)
        rest.append(row.bound_ns)
    return shape, pack_integers(rest) if any(rest) else None, sums


def _unattributed(phases: Sequence[PhaseRow], place: Place) -> int:
    return sum(row.duration_ns for row in phases if row.phase == Phase.UNATTRIBUTED.value and row.process == place.value)


_KNOWN = frozenset(PHASES)


@lru_cache(maxsize=1024)
def _phase_text(shape: PhaseShape) -> str:
    return json.dumps(shape, separators=(",", ":"))


@lru_cache(maxsize=1024)
def _phase_shape(text: str) -> PhaseShape:
    return tuple((phase, process, source, tuple(may_be)) for phase, process, source, may_be in json.loads(text))


def may_be(shape: str, process: str) -> frozenset[str]:
    """List the phases that the ``unattributed`` time inside ``process`` may hide.

    ``shape``: a stored ``phase_shape``.
    """
    rests = (each for each in _phase_shape(shape) if each[:2] == (Phase.UNATTRIBUTED.value, process))
    return frozenset(name for _, _, _, hidden in rests for name in hidden)


def _phase_rows(stored: Mapping[str, object]) -> Iterator[PhaseRow]:
    shape = _phase_shape(str(stored["phase_shape"]))
    named = Counter(phase for phase, *_ in shape)
    packed = stored["phase_rest"]
    rest = iter(unpack_integers(_bytes(packed)) if packed is not None else ())
    for phase, process, source, may_be in shape:
        duration = next(rest, 0) if named[phase] > 1 else stored[phase_column(phase)]
        if not isinstance(duration, int):
            raise ValueError(f"phase {phase} has no duration")
        yield PhaseRow(phase=phase, duration_ns=duration, process=process, source=source, bound_ns=next(rest, 0), may_be=may_be)


def _evidence(row: RequestRow) -> tuple[str, bytes | None]:
    index = {row.request_id: 0}
    spans = tuple(index.setdefault(span_id, len(index)) for span_id in row.span_ids)
    joins = tuple((j.evidence, j.how, index.setdefault(j.span_id, len(index))) for j in row.joins)
    return _evidence_text((spans, joins)), pack_ids(list(index)[1:]) or None


@lru_cache(maxsize=1024)
def _evidence_text(shape: EvidenceShape) -> str:
    return json.dumps(shape, separators=(",", ":"))


@lru_cache(maxsize=1024)
def _evidence_shape(text: str) -> EvidenceShape:
    spans, joins = json.loads(text)
    return tuple(spans), tuple((evidence, how, index) for evidence, how, index in joins)


def _evidence_rows(stored: Mapping[str, object], request_id: str) -> tuple[tuple[str, ...], tuple[JoinRow, ...]]:
    spans, joins = _evidence_shape(str(stored["evidence_shape"]))
    ids = (request_id, *unpack_ids(_bytes(stored["evidence_ids"]), 8))
    return (
        tuple(ids[at] for at in spans),
        tuple(JoinRow(evidence=evidence, how=how, span_id=ids[at]) for evidence, how, at in joins),
    )


def _bytes(value: object) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, bytes):
        raise ValueError(f"bytes expected, not {type(value).__name__}")
    return value


def _integers(value: object) -> Iterable[int]:
    if not isinstance(value, Iterable):
        raise ValueError(f"a list expected, not {type(value).__name__}")
    return value


def _strings(value: object) -> Iterable[str]:
    if not isinstance(value, Iterable):
        raise ValueError(f"a list expected, not {type(value).__name__}")
    return (str(item) for item in value)


def pack_integers(values: Iterable[int]) -> bytes:
    """Encode each value as a zigzag LEB128 number of any size, like protobuf's sint64."""
    out = bytearray()
    for value in values:
        rest = value * 2 if value >= 0 else -value * 2 - 1
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def unpack_integers(data: bytes) -> list[int]:
    """Decode what ``pack_integers`` encoded.

    Raises ``ValueError`` when the last number is cut off.
    """
    values, shift, rest = [], 0, 0
    for byte in data:
        rest |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
            continue
        values.append(rest >> 1 if not rest & 1 else -(rest >> 1) - 1)
        shift = rest = 0
    if shift:
        raise ValueError("a packed integer is cut off")
    return values


def pack_ids(ids: Sequence[str]) -> bytes:
    """Concatenate hex ids of equal length as bytes."""
    return bytes.fromhex("".join(ids))


def unpack_ids(data: bytes, size: int) -> tuple[str, ...]:
    """Split bytes into hex ids of ``size`` bytes each."""
    text = data.hex()
    return tuple(text[at : at + 2 * size] for at in range(0, len(text), 2 * size))
