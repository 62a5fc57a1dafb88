"""Samples as OTLP metrics: written and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from builders.records import EPOCH, process
from handrail import conventions as names
from handrail.records import EngineHistogram, EngineSample, EngineValue, Role, Source
from handrail.records.quantities import QUANTITIES, QuantityKind
from handrail.wire.engine_samples import metrics_request, read_samples, sample_metrics
from handrail_sidecar.engine_metrics.counters import CounterTracks
from handrail_sidecar.engine_metrics.page import PageReader
from handrail_sidecar.export.resource import own_resource
from handrail_sidecar.sources.engine_metrics import sample_of

_PROCESS = process(Role.DECODE)
_WORD = st.text(alphabet="abcXYZ019-_.:", max_size=8)
_NUMBER = st.floats(0, 1e15, allow_nan=False)


def _value(name: str, counter: bool, labelled: bool) -> st.SearchStrategy[EngineValue]:
    return st.builds(
        EngineValue,
        name=st.just(name),
        value=_NUMBER,
        engine=_WORD,
        label=_WORD if labelled else st.just(""),
        start_unix_ns=st.integers(1, EPOCH) if counter else st.just(0),
    )


_PLAIN = [quantity for quantity in QUANTITIES if quantity.kind is not QuantityKind.HISTOGRAM]
_VALUES = st.tuples(
    *(st.lists(_value(each.name, each.kind is QuantityKind.COUNTER, bool(each.label)), max_size=2) for each in _PLAIN[::6])
).map(lambda lists: tuple(value for values in lists for value in values))
_HISTOGRAMS = st.lists(
    st.builds(
        EngineHistogram,
        name=st.just("kv_transfer_seconds"),
        bounds=st.just((0.1, 1.0)),
        counts=st.tuples(*[st.integers(0, 2**40)] * 3),
        count=st.integers(0, 2**40),
        total=st.none() | _NUMBER,
        engine=_WORD,
        label=_WORD,
        start_unix_ns=st.integers(1, EPOCH),
    ),
    max_size=2,
).map(tuple)


@given(_VALUES, _HISTOGRAMS, _WORD)
def test_a_sample_is_read_back(values: tuple[EngineValue, ...], histograms: tuple[EngineHistogram, ...], model: str) -> None:
    sample = EngineSample(
        process=_PROCESS, source=Source.METRICS, at_unix_ns=EPOCH, model=model, values=values, histograms=histograms
    )
    written = [Metric.FromString(metric.SerializeToString()) for metric in sample_metrics(sample)]
    assert read_samples(written, _PROCESS) == ([sample] if values or histograms else [])


@pytest.mark.parametrize("page", ["metrics_decode", "metrics_prefill", "metrics_router", "metrics_decode_after_one_failure"])
def test_a_recorded_page_travels_whole(page: str) -> None:
    text = (Path(__file__).parents[2] / f"data/recordings/{page}.txt").read_bytes()
    sample = sample_of(PageReader().read(text), _PROCESS, EPOCH, CounterTracks())
    later = sample_of(PageReader().read(text), _PROCESS, EPOCH + 5, CounterTracks())
    sent = ExportMetricsServiceRequest.FromString(metrics_request(own_resource(_PROCESS), [sample, later]))
    (entry,) = sent.resource_metrics
    (scope,) = entry.scope_metrics
    assert scope.scope.name == names.SCOPE_SAMPLES
    assert read_samples(scope.metrics, _PROCESS) == [sample, later]


def test_what_others_send_is_passed_over() -> None:
    assert read_samples([Metric(name="x"), Metric(name="handrail_engine_nothing")], _PROCESS) == []
