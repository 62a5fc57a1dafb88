"""The plugin's records over the wire and back.

Nothing is lost, nothing absurd is accepted, and names are unique.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from builders.any_plugin_record import sane
from builders.exchanges import PROCESS
from handrail import conventions as names
from handrail.records import (
    EngineFacts,
    EngineTimes,
    FetchEffect,
    Iteration,
    KvFetch,
    KvPublish,
    PluginEvent,
    PluginSpan,
    ProcessEvent,
    Role,
    Source,
    SpanIds,
)
from handrail.wire.plugin import TABLES, plugin_log, plugin_spans, read_plugin_log, read_plugin_span

_span_records = sane(EngineTimes) | sane(KvFetch) | sane(KvPublish)
_event_records = sane(Iteration) | sane(ProcessEvent) | sane(EngineFacts)
IDS = SpanIds(trace_id="a" * 32, span_id="b" * 16, parent_span_id="c" * 16, flags=1)


def fetch(**changed: object) -> KvFetch:
    values: dict[str, object] = {
        "process": PROCESS,
        "source": Source.PLUGIN,
        "ids": IDS,
        "engine": "vllm",
        "request_id": "cmpl-lab-0001-0-9c60a41c",
        "known_unix_ns": 1_800_000_000_000_000_000,
    }
    return KvFetch(**{**values, **changed})  # type: ignore[arg-type]


@given(_span_records)
def test_every_span_record_survives_the_wire(original: PluginSpan) -> None:
    carrier, *drawn = (Span.FromString(span.SerializeToString()) for span in plugin_spans(original))
    assert read_plugin_span(carrier, original.process) == original
    assert [read_plugin_span(span, original.process) for span in drawn] == [None] * len(drawn)


@given(_span_records | _event_records)
def test_every_record_survives_as_a_log_record(original: PluginSpan | PluginEvent) -> None:
    received = LogRecord.FromString(plugin_log(original).SerializeToString())
    assert read_plugin_log(received, original.process) == original


@given(_span_records, st.data())
def test_a_damaged_span_is_refused_or_read_never_more(original: PluginSpan, data: st.DataObject) -> None:
    span = plugin_spans(original)[0]
    if span.attributes:
        at = data.draw(st.integers(0, len(span.attributes) - 1))
        span.attributes[at].value.int_value = data.draw(st.integers(-(2**63), 2**63 - 1))
    span.span_id = data.draw(st.binary(max_size=9))
    try:
        read_plugin_span(span, original.process)
    except ValueError:
        return
    assert len(span.span_id) == 8


def test_attribute_names_are_unique() -> None:
    written = [name for table in TABLES for name in table.names]
    assert len(written) == len(set(written))


def test_drawn_spans_have_ids_of_their_own_and_the_same_ones_again() -> None:
    record = EngineTimes(
        process=PROCESS,
        source=Source.PLUGIN,
        ids=IDS,
        engine="vllm",
        request_id="r",
        queued_unix_ns=10**18,
        scheduled_ns=5,
        first_token_ns=9,
        finished_ns=20,
    )
    spans = plugin_spans(record)
    assert [span.name for span in spans] == ["decode.queue", "decode.first_step", "decode.stream"]
    assert len({span.span_id for span in spans}) == 3
    assert [span.span_id for span in spans] == [span.span_id for span in plugin_spans(record)]
    assert [(s.start_time_unix_nano - 10**18, s.end_time_unix_nano - 10**18) for s in spans] == [(0, 5), (5, 9), (9, 20)]


def test_a_fetch_is_a_consumer_below_the_publish_and_linked_to_decode() -> None:
    span = plugin_spans(fetch(publish_span_id="c" * 16, decode_span_id="d" * 16, ended_ns=7))[0]
    assert (span.name, span.kind) == ("kv.fetch", Span.SPAN_KIND_CONSUMER)
    assert span.parent_span_id.hex() == "c" * 16
    assert [link.span_id.hex() for link in span.links] == ["d" * 16]
    assert span.status.code == Status.STATUS_CODE_UNSET


@pytest.mark.parametrize("changed", [{"failure": "handshake_failed"}, {"effect": FetchEffect.RECOMPUTED}], ids=["type", "effect"])
def test_a_failed_fetch_has_status_error(changed: dict[str, object]) -> None:
    span = plugin_spans(fetch(**changed))[0]
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert names.ERROR_TYPE in {a.key for a in span.attributes}


def test_prefill_draws_its_own_names() -> None:
    record = EngineTimes(
        process=replace(PROCESS, role=Role.PREFILL),
        source=Source.PLUGIN,
        ids=IDS,
        engine="vllm",
        request_id="r",
        queued_unix_ns=10**18,
        scheduled_ns=5,
        first_token_ns=9,
        finished_ns=9,
    )
    assert [span.name for span in plugin_spans(record)] == ["prefill.queue", "prefill.compute"]


def test_another_kind_of_event_is_none() -> None:
    assert read_plugin_log(LogRecord(event_name="handrail.something", time_unix_nano=1), PROCESS) is None


@pytest.mark.parametrize("name", [names.LOG_ITERATION, names.LOG_PROCESS_EVENT, names.LOG_ENGINE_FACTS, names.LOG_KV_FETCH])
def test_an_empty_event_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"missing|unknown|length"):
        read_plugin_log(LogRecord(event_name=name), PROCESS)
