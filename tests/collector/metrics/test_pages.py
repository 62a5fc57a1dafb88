"""The collector's metrics page as Prometheus reads it.

Some series exist from the start; others are absent until their value is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as text_format

from builders.records import MS
from handrail.metrics.histogram import LATENCY_SECONDS
from handrail.metrics.registry import Registry
from handrail_collector.counters import CounterKey, Timed
from handrail_collector.explain.request.findings import FINDINGS
from handrail_collector.explain.stalls.evidence import StallCause
from handrail_collector.metrics.coverage import By
from handrail_collector.metrics.request_metrics import OUTCOMES, joined_rows
from handrail_collector.metrics.slow_links import SlowLinks
from handrail_collector.pipeline import Pipeline
from handrail_collector.store.read import StoreReader
from harness.pipelines import Clock, running

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def page(pipeline: Pipeline, root: Path, clock: Clock, accept: str = "") -> dict[str, Any]:
    links = SlowLinks(StoreReader(root / "store", threads=1), now_unix_ns=clock)
    links.found = {("p:1", "d:1", "slow_path"): 1.0}
    rows = joined_rows(pipeline.counting, pipeline.stitcher.clocks, links, clock)
    text, _ = Registry(rows).expose(accept)
    parse = open_metrics if accept else text_format
    return {family.name: family for family in parse(text.decode())}


def values(family: Any) -> dict[tuple[tuple[str, str], ...], float]:
    return {
        tuple(sorted(sample.labels.items())): sample.value for sample in family.samples if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("accept", ["", OPEN_METRICS], ids=["text", "openmetrics"])
async def test_counters_of_what_goes_wrong_are_there_from_the_start(tmp_path: Path, accept: str) -> None:
    async with running(tmp_path, Clock()) as (_, pipeline):
        found = page(pipeline, tmp_path, Clock(), accept)
    assert {kind for ((_, kind),) in values(found["handrail_findings"])} == set(FINDINGS)
    assert {labels[0][1] for labels in values(found["handrail_stalls"])} == {cause.value for cause in StallCause}
    assert {dict(labels)["outcome"] for labels in values(found["handrail_joined_requests"])} == set(OUTCOMES)
    assert values(found["handrail_counted_requests"]) == {(("by", by.value),): 0.0 for by in By}
    born = [value for name in ("findings", "stalls", "joined_requests") for value in values(found[f"handrail_{name}"]).values()]
    assert set(born) == {0.0}


async def test_coverage_that_nobody_counted_is_absent_and_not_zero(tmp_path: Path) -> None:
    async with running(tmp_path, Clock()) as (_, pipeline):
        found = page(pipeline, tmp_path, Clock())
        assert found["handrail_trace_coverage_ratio"].samples == []
        assert found["handrail_phase_seconds"].samples == []


@pytest.mark.parametrize("accept", ["", OPEN_METRICS], ids=["text", "openmetrics"])
async def test_a_known_model_has_every_outcome_and_cause_from_zero(tmp_path: Path, accept: str) -> None:
    clock = Clock()
    async with running(tmp_path, clock) as (_, pipeline):
        seen = pipeline.observed
        pipeline.counting.models.serve("org/model-1.5")
        seen.add(CounterKey.JOINED, 3, "ok.org/model-1.5")
        seen.add(CounterKey.STALLS, 2, "kv_landing")  # as an earlier release stored it, which knew no models
        for ns in (1 * MS, 66 * MS, 200_000 * MS):
            seen.time(Timed.PHASES, ("kv_transfer", "org/model-1.5"), ns, f"{ns:032x}", clock.now)
        assert "handrail_phase_seconds" in page(pipeline, tmp_path, clock, accept)
        await pipeline.flush()
        clock.now += 1
        taken = seen.take()
        seen.done(seen.with_added(taken), taken)
        found = page(pipeline, tmp_path, clock, accept)
    slow = values(found["handrail_slow_phase_seconds"])
    assert slow == {(("model_name", "org/model-1.5"), ("phase", "kv_transfer")): 0.0}, "there before the first slow request"
    joined = values(found["handrail_joined_requests"])
    of_model = {
        dict(labels)["outcome"]: value for labels, value in joined.items() if dict(labels)["model_name"] == "org/model-1.5"
    }
    assert of_model == dict.fromkeys(OUTCOMES, 0.0) | {"ok": 3.0}
    assert values(found["handrail_stalls"])[("cause", "kv_landing"), ("model_name", "unknown")] == 2.0
    samples = found["handrail_phase_seconds"].samples
    buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
    assert len(buckets) == len(LATENCY_SECONDS) + 1
    assert {tuple(sorted(s.labels)) for s in buckets} == {("le", "model_name", "phase")}
    assert [s.value for s in buckets if s.labels["le"] in ("0.001", "100.0", "+Inf")] == [1.0, 2.0, 3.0]
    assert [s.value for s in samples if s.name.endswith("_sum")] == [200.067]
    exemplars = [s.exemplar.labels["trace_id"] for s in buckets if s.exemplar is not None]
    assert exemplars == ([f"{ns * MS:032x}" for ns in (1, 66, 200_000)] if accept else []), "text has none"
    assert values(found["handrail_link_slow"]) == {
        (("finding", "slow_path"), ("source", "p:1"), ("target", "d:1")): 1.0,
    }


def test_help_says_how_exact_a_quantile_is(tmp_path: Path) -> None:
    from handrail_collector.metrics.counting import Counting
    from handrail_collector.stitch.clocks import HostClocks
    from handrail_collector.store.recovery import Recovered

    counting = Counting(Recovered(end_offset=0, low_water_offset=0, evidence={}), 0)
    rows = joined_rows(counting, HostClocks(), SlowLinks(StoreReader(tmp_path, threads=1)))
    assert "10 %" in rows[0].help
    assert not {"trace_id", "request_id", "instance", "job", "host_id"} & {label for row in rows for label in row.labels}
