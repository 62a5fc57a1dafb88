"""A store of schema version 1 answers as before.

A maintenance pass turns it into one of this version.
``tests/data/store_version_1`` was written by the last code of version 1, which also gave ``answers.json.gz``
(with the names of version 2). Some of its rows have later versions in other files, and one hour has a rollup.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from handrail_collector.api.schema import fetch_to_json, row_to_json, span_to_json, stall_to_json
from handrail_collector.explain.period.answer import answered
from handrail_collector.explain.period.question import Question
from handrail_collector.explain.period.request_comparison import compared
from handrail_collector.links.answer import answered as links_answered
from handrail_collector.links.question import LinksQuestion
from handrail_collector.rows import RequestRow
from handrail_collector.store.filters import FetchFilter, RequestFilter, SampleFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.manifest import MANIFEST, StoreDamagedError
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import SCHEMA_VERSION, Table

DATA = Path(__file__).parents[2] / "data" / "store_version_1"
ANSWERS = json.loads(gzip.decompress((DATA / "answers.json.gz").read_bytes()))
FIRST = 498_889 * HOUR_NS
UNTIL = FIRST + 2 * HOUR_NS
ALWAYS = SampleFilter(since_unix_ns=0, until_unix_ns=1 << 62)
EVENTS = (Table.PROCESS_EVENTS, Table.FINDINGS, Table.CLOCK_PAIRS, Table.ITERATIONS, Table.LINK_FACTS)


def rows(reader: StoreReader) -> list[RequestRow]:
    return reader.requests(RequestFilter(limit=1000, descending=False))


QUESTIONS: dict[str, Callable[[StoreReader], Any]] = {
    "requests": lambda reader: [row_to_json(row) for row in rows(reader)],
    "fetches": lambda reader: [fetch_to_json(row) for row in reader.fetches(FetchFilter(limit=1000, descending=False))],
    "stalls": lambda reader: [stall_to_json(stall) for stall in reader.stalls_of(rows(reader)[1])],
    "spans": lambda reader: [span_to_json(span) for span in reader.spans(rows(reader)[0])],
    "events": lambda reader: {t.value: [asdict(row) for row in reader.events(t, 0, 1 << 62)] for t in EVENTS},
    "samples": lambda reader: {
        table.value: [repr(sample) for sample in reader.samples(table, ALWAYS)]
        for table in (Table.GPU_SAMPLES, Table.LINK_SAMPLES, Table.ENGINE_SAMPLES)
    },
    "explain_exact": lambda reader: answered(reader, Question(since_unix_ns=FIRST, until_unix_ns=UNTIL), UNTIL),
    "compared": lambda reader: compared(reader, rows(reader)[40]),
    "links": lambda reader: links_answered(reader, LinksQuestion(since_unix_ns=FIRST, until_unix_ns=UNTIL), UNTIL),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "store", tmp_path / "store")
    return tmp_path / "store"


def plain(answer: Any) -> Any:
    return json.loads(json.dumps(answer))


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_store_of_version_1_answers_as_before(name: str) -> None:
    reader = StoreReader(DATA / "store")
    try:
        assert plain(QUESTIONS[name](reader)) == ANSWERS[name]
    finally:
        reader.close()


def test_a_maintenance_pass_rewrites_it_and_every_answer_stays(root: Path) -> None:
    publisher = StorePublisher(root, now_unix_ns=lambda: UNTIL + HOUR_NS)
    publisher.open()
    upkeep = Upkeep(publisher, UpkeepSettings(rollups=True), lambda: UNTIL + HOUR_NS)
    upkeep.run_pass()
    assert not upkeep.stats.failures
    files = [file for publish in publisher.publishes() for file in publish.files]
    publisher.close()
    rewritten = {Table.REQUESTS, Table.KV_FETCHES, Table.ITERATIONS, Table.ROLLUPS}
    assert {file.schema for file in files if file.table in rewritten} == {SCHEMA_VERSION}
    assert {file.covers for file in files if file.covers} == {file.path for file in files if file.table is Table.REQUESTS}
    reader = StoreReader(root)
    for name in QUESTIONS.keys() - {"compared"}:  # replaced rows are gone, which it may have counted twice
        assert plain(QUESTIONS[name](reader)) == ANSWERS[name], name
    fast = plain(answered(reader, Question(since_unix_ns=FIRST, until_unix_ns=UNTIL, fast=True), UNTIL))
    assert fast["rolled_hours"] == 2
    assert fast["scopes"][0]["gap_ns"] == ANSWERS["explain_exact"]["scopes"][0]["gap_ns"]
    reader.close()


def test_a_collector_goes_on_in_it(root: Path) -> None:
    publisher = StorePublisher(root)
    recovered = publisher.open()
    assert set(recovered.rows) == {(row["trace_id"], row["request_id"]) for row in ANSWERS["requests"]}
    reader = StoreReader(root)
    known = rows(reader)
    later = replace(known[5], version=known[5].version + 1, outcome="aborted", gap_buckets=(3, 9), gap_counts=(1, 2))
    publisher.publish(recovered.end_offset, recovered.end_offset + 10, 0, [], [later])
    assert rows(reader) == [*known[:5], later, *known[6:]]
    reader.close()
    publisher.close()


def test_a_store_of_a_later_version_is_refused(root: Path) -> None:
    manifest = root / MANIFEST
    text = json.dumps({"v": 7, "schema": SCHEMA_VERSION + 1}).encode()
    manifest.write_bytes(manifest.read_bytes() + b"%08x %s\n" % (crc32(text), text))
    reader = StoreReader(root)
    with pytest.raises(StoreDamagedError, match="later version of Handrail"):
        rows(reader)
