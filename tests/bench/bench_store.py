"""Measure the store: bytes for a span and a request, write rate, query time.

The queries run over a million requests.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does: the synthetic rows are a module of the tests

from builders.store_rows import Fleet, moved, request_rows, spans_of_requests
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import REQUEST_COLUMNS, Table, encode
from handrail_collector.store.tables.requests import requests_table
from handrail_collector.store.tables.spans import spans_table

_REQUESTS = 1_000_000
_PUBLISH_ROWS = 50_000
_MADE = 10_000
_SPAN_PUBLISHES = 3
_FOLDED_PUBLISHES = 100


def run() -> list[dict[str, Any]]:
    """Return the figures with their budgets (DESIGN section 13), None for no budget."""
    figures = [*_sizes()]
    with tempfile.TemporaryDirectory() as folder:
        figures += _speeds(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        figures += _folding(Path(folder))
    return figures


def _sizes() -> list[dict[str, Any]]:
    # Two vLLM spans a request are the worst case: only two spans share what spans of a trace have in common.
    vllm = spans_of_requests(_MADE)
    with_edge = spans_of_requests(_MADE, proxies=True)
    rows = request_rows(_MADE)
    few = Fleet(interval_ns=200_000_000)
    requests = encode(requests_table(rows), Table.REQUESTS, REQUEST_COLUMNS)
    few_requests = encode(requests_table(request_rows(100, few)), Table.REQUESTS, REQUEST_COLUMNS)
    return [
        _figure("store_bytes_per_span", _span_bytes(vllm), "B", 60),
        _figure("store_bytes_per_span_with_edge_proxy", _span_bytes(with_edge), "B", None),
        _figure("store_bytes_per_span_in_files_of_200", _span_bytes(spans_of_requests(100, few)), "B", None),
        _figure("store_bytes_per_request", len(requests) / len(rows), "B", 250),
        _figure("store_bytes_per_request_in_files_of_100", len(few_requests) / 100, "B", None),
    ]


def _span_bytes(spans: list[Any]) -> float:
    table, columns = spans_table(spans)
    return len(encode(table, Table.SPANS, columns)) / len(spans)


def _speeds(folder: Path) -> list[dict[str, Any]]:
    publisher = StorePublisher(folder)
    publisher.open()
    spans = spans_of_requests(_MADE)
    rows = request_rows(_MADE)
    per_second = {}
    offset = 0
    started = time.perf_counter()
    for index in range(_SPAN_PUBLISHES):
        publisher.publish(offset, offset + _MADE, 0, [replace(span, offset=offset + span.offset) for span in spans], [])
        offset += _MADE * (index + 1)
    per_second["spans"] = _SPAN_PUBLISHES * len(spans) / (time.perf_counter() - started)
    started = time.perf_counter()
    known = replace(rows[7], trace_id=spans[14].trace_id, span_ids=(spans[14].span_id,))
    publisher.publish(offset, offset + 1, 0, [], [*rows[:7], known, *rows[8:]])
    per_second["requests"] = len(rows) / (time.perf_counter() - started)
    _fill(publisher, offset + 1, rows)
    publisher.close()
    lookups = _lookups(folder, known.trace_id, str(known.client_request_id))
    return [
        _figure("store_spans_written", per_second["spans"], "1/s", None),
        _figure("store_requests_written", per_second["requests"], "1/s", None),
        *(_figure(f"store_{name}_over_1m_requests", seconds, "s", 1) for name, seconds in lookups.items()),
    ]


def _fill(publisher: StorePublisher, offset: int, rows: list[Any]) -> None:
    """Write a million requests over several hours.

    Each publish has the size to which compaction brings hours of load.
    """
    table = requests_table(rows)
    for at in range(0, _REQUESTS, _PUBLISH_ROWS):
        for part in range(0, _PUBLISH_ROWS, len(rows)):
            # ids never repeat, so they do not compress
            publisher.publish(offset, offset + 1, 0, [], moved(table, (at + part) * Fleet().interval_ns, seed=at + part))
            offset += 1


def _folding(folder: Path) -> list[dict[str, Any]]:
    """Measure the compaction of an hour of small publishes into one file a table.

    The publishes are those of a flush every few seconds.
    """
    publisher = StorePublisher(folder)
    publisher.open()
    spans, rows = spans_of_requests(_MADE), request_rows(_MADE)
    step = _MADE // _FOLDED_PUBLISHES
    for at in range(0, _MADE, step):
        publisher.publish(at, at + step, 0, spans[2 * at : 2 * (at + step)], rows[at : at + step])
    before = _bytes(publisher)
    upkeep = Upkeep(publisher, UpkeepSettings(), lambda: rows[-1].started_unix_ns + 2 * HOUR_NS)
    started, cpu = time.perf_counter(), time.process_time()
    upkeep.run_pass()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    after = _bytes(publisher)
    publisher.close()
    assert upkeep.stats.files_folded == 2 * _FOLDED_PUBLISHES, upkeep.stats
    return [
        _figure("store_rows_compacted", 3 * _MADE / seconds, "1/s", None),
        _figure("store_rows_compacted_per_cpu_second", 3 * _MADE / cpu, "1/s", None),
        _figure("store_bytes_after_compaction", after / before, "ratio", None),
    ]


def _bytes(publisher: StorePublisher) -> int:
    return sum(file.bytes for publish in publisher.publishes() for file in publish.files)


def _lookups(folder: Path, trace_id: str, client_id: str) -> dict[str, float]:
    """Measure the seconds of each query, each on a fresh reader."""
    questions: dict[str, Callable[[StoreReader], object]] = {
        "sort_by_ttft": lambda reader: reader.requests(RequestFilter(sort="ttft")),
        "sort_by_phase": lambda reader: reader.requests(RequestFilter(sort="prefill_compute", outcome="ok")),
        "find_client_id": lambda reader: reader.find(client_id),
        "find_engine_id": lambda reader: reader.find(f"cmpl-{client_id}-0-0123abcd"),
        "find_prefix": lambda reader: reader.find(client_id[:10]),
        "trace_with_spans": lambda reader: [reader.spans(row) for row in reader.find(trace_id)],
    }
    seconds = {}
    for name, ask in questions.items():
        reader = StoreReader(folder)
        started = time.perf_counter()
        found = ask(reader)
        seconds[name] = time.perf_counter() - started
        reader.close()
        assert found, name
    return seconds


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    ratio = None if budget is None else value / budget
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "budget": budget,
        "ratio": ratio,
        "met": None if ratio is None else ratio <= 1,
    }
