"""From a request's bytes to Parquet rows, with absurd numbers and texts.

None of them costs a row.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from builders.device_samples import busy_host, flattened
from builders.engine_samples import engine_sample
from builders.extremes import make_extreme
from builders.records import EPOCH, exchange
from doubles.otlp import RAW
from handrail.otlp.decode import PROTOBUF, decode, receive
from handrail.otlp.payload import with_batch_seq
from handrail.otlp.signals import Signal
from handrail.records import Role
from handrail.wire.engine_samples import metrics_request
from handrail_collector.explain.period.answer import answered as explained
from handrail_collector.explain.period.question import Question
from handrail_collector.links.answer import answered as linked
from handrail_collector.links.question import LinksQuestion
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.filters import SORTS, RequestFilter
from handrail_collector.store.manifest import ManifestReader, files_of
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_sidecar.export.resource import own_resource
from harness.pipelines import Clock, a_request, batch, device_batch, plugin_batch, running, stored, taken

SEEDS = range(16)


def everything() -> list[tuple[Signal, bytes]]:
    """Return all that sidecars and an engine send of one request, samples included."""
    edge_p_d, (at_p, at_d) = a_request()
    sent = [(Signal.TRACES, batch([one], number, one.process.role.value)) for number, one in enumerate(edge_p_d, 1)]
    sent += [(Signal.TRACES, plugin_batch(answer, 10 + at)) for at, answer in enumerate((at_p, at_d))]
    sent += [(Signal.TRACES, path.read_bytes()) for path in RAW[:4]]
    sent.append((Signal.METRICS, device_batch(flattened(list(busy_host(1, gpus=1))), 20)))
    sample = engine_sample(3)
    sent.append((Signal.METRICS, with_batch_seq(metrics_request(own_resource(sample.process), [sample]), 21)))
    return sent


def extreme(signal: Signal, payload: bytes, rng: random.Random, share: float) -> bytes:
    request = decode(signal, payload, PROTOBUF)
    make_extreme(request, rng, share)
    return receive(signal, request.SerializeToString(), PROTOBUF, "").payload


def rows_in(root: Path, table: Table) -> int:
    return sum(file.rows for file in files_of(ManifestReader(root / "store").publishes(), table))


@pytest.mark.parametrize("seed", SEEDS)
async def test_numbers_at_the_edges_of_their_types_cost_no_row(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    share = rng.choice([0.02, 0.1, 0.5, 1.0])
    clock = Clock()
    sent = [(signal, extreme(signal, payload, rng, share)) for signal, payload in everything()]
    async with running(tmp_path, clock) as (journal, pipeline):
        for signal, payload in sent:
            await journal.consume(signal, payload)
        await taken(pipeline, journal)
        for _ in range(2):  # two passes decide everything that is open
            clock.now += 3600 * SECOND
            await journal.consume(Signal.TRACES, batch([exchange(Role.EDGE, 0, 1, rid="later", trace="t9")], clock.now % 97, "o"))
            await taken(pipeline, journal)
        pipeline.rows()
        await pipeline.flush()
        stats = pipeline.stats
        assert (stats.faults, stats.publish_failures, stats.undecodable) == (0, 0, 0)
        assert stats.spans_stored == stats.spans
    assert rows_in(tmp_path, Table.SPANS) == stats.spans
    reader = StoreReader(tmp_path / "store", threads=1)
    try:
        for row in stored(tmp_path):
            reader.spans(row)
            reader.fetches_of(row)
            reader.stalls_of(row)
        for sort in SORTS:
            reader.requests(RequestFilter(sort=sort, min_ttft_ns=1))
        for since in (EPOCH, 0, 2**61):
            explained(reader, Question(since_unix_ns=since, until_unix_ns=since + 10**13), clock.now)
            linked(reader, LinksQuestion(since_unix_ns=since, until_unix_ns=since + 10**13), clock.now)
    finally:
        reader.close()
