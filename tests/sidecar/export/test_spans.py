"""An exchange as a span and back: nothing is lost, nothing absurd gets through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from builders.exchanges import PROCESS, exchange, exchanges
from handrail import conventions as names
from handrail.records import Exchange, Gaps, Hint, KvParams, Outcome, Process, Role, Source, SpanIds
from handrail.stalls import Stall, Stalls
from handrail.wire.exchange import TABLES, process_of, read_exchange, resource_of, to_span

ATTRIBUTES = [name for table in TABLES for name in table.names]


@given(exchanges())
def test_every_exchange_survives_the_wire(original: Exchange) -> None:
    received = Span.FromString(to_span(original).SerializeToString())
    assert read_exchange(received, original.process) == original


def test_every_field_has_a_row() -> None:
    carried_otherwise = {"process", "source", "ids", "arrival_unix_ns", "outcome", "gaps", "itl", "stalls"}
    assert TABLES[0].fields | carried_otherwise == {field.name for field in fields(Exchange)}


def test_the_whole_of_an_exchange_on_the_wire(golden: Callable[[Path | str, str], None]) -> None:
    changed: dict[str, Any] = {
        "request_id_hash": "9f",
        "request_id_added": True,
        "inspected": "prefix",
        "error_type": "ServerError",
        "error_code": "500",
        "write_blocked_ns": 1_000,
        "content_encoding": "gzip",
        "itl": Gaps(unit="token", count=2, sum_ns=3, max_ns=2, max_at_ns=9, sketch=b"\x01\x02"),
        "stalls": Stalls(
            count=1,
            sum_ns=40,
            longest=(Stall(end_ns=90, gap_ns=40, median_ns=10, index=3, held_ns=5, turn="a>b"),),
            times=b"\x05",
        ),
        "tpot_mean_ns": 11_000_000,
        "kv_out": KvParams(remote_num_tokens=128, transfer_mode="pull", transfer_id="t-1", bootstrap_room="7"),
        "hints": (Hint.BUFFERED, Hint.CLIENT_SLOW),
        "method": "PUT",
        "resend_count": 1,
        "exemplar": True,
    }
    whole = exchange(**changed)
    assert [field.name for field in fields(Exchange) if getattr(whole, field.name) == field.default] == []
    golden("wire/exchange.textproto", text_format.MessageToString(to_span(whole)))


def test_attribute_names_are_unique() -> None:
    assert len(ATTRIBUTES) == len(set(ATTRIBUTES))


@pytest.mark.parametrize("outcome", Outcome, ids=lambda outcome: outcome.value)
def test_status_is_error_unless_nothing_failed(outcome: Outcome) -> None:
    fine = outcome in (Outcome.OK, Outcome.INCOMPLETE, Outcome.CLIENT_DISCONNECT)
    code = to_span(exchange(outcome=outcome)).status.code
    assert code == (Status.STATUS_CODE_UNSET if fine else Status.STATUS_CODE_ERROR)


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (Role.EDGE, "handrail.request"),
        (Role.ROUTER, "handrail.request"),
        (Role.PREFILL, "prefill"),
        (Role.DECODE, "decode"),
        (Role.COLLOCATED, "handrail.request"),
    ],
)
def test_span_is_named_by_its_role(role: Role, name: str) -> None:
    assert to_span(exchange(process=replace(PROCESS, role=role))).name == name


def test_unseen_is_absent() -> None:
    bare = Exchange(
        process=PROCESS,
        source=Source.PROXY,
        ids=SpanIds(trace_id="1" * 32, span_id="2" * 16),
        arrival_unix_ns=5,
        duration_ns=7,
        outcome=Outcome.UNKNOWN,
    )
    span = to_span(bare)
    assert {a.key for a in span.attributes} == {names.SOURCE, names.OUTCOME, names.JOIN_KEY, names.TIME_DURATION_NS}
    assert (span.start_time_unix_nano, span.end_time_unix_nano, span.parent_span_id) == (5, 12, b"")


@pytest.mark.parametrize(
    ("request_id", "key"),
    [
        ("user-42-7", "user-42-7"),
        ("7", f"{1:032x}"),
        (None, f"{1:032x}"),
        ("___prefill_addr_a:1___decode_addr_b:2_" + "0f" * 16, "0f" * 16),
    ],
    ids=["client", "counter", "none", "vllm-router"],
)
def test_join_key(request_id: str | None, key: str) -> None:
    assert _attribute(to_span(exchange(request_id=request_id)), names.JOIN_KEY).string_value == key


def test_what_no_protobuf_string_holds_is_escaped_not_lost() -> None:
    read = read_exchange(to_span(exchange(request_id="caf\udce9")), PROCESS)
    assert read.request_id == "caf\\udce9"


def test_a_count_beyond_int64_is_left_out_not_fatal() -> None:
    assert read_exchange(to_span(exchange(prompt_tokens=10**30, output_tokens=-1)), PROCESS) == exchange(
        prompt_tokens=None, output_tokens=None
    )


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (names.TIME_FIRST_TOKEN_NS, "ttft_token_ns", AnyValue(int_value=-1)),
        (names.TIME_FIRST_TOKEN_NS, "ttft_token_ns", AnyValue(int_value=2**53)),
        (names.TIME_FIRST_TOKEN_NS, "ttft_token_ns", AnyValue(double_value=0.25)),
        (names.TIME_FIRST_TOKEN_NS, "ttft_token_ns", AnyValue()),
        (names.GEN_AI_MODEL, "model", AnyValue(int_value=3)),
        (names.STREAM, "stream", AnyValue(string_value="true")),
        (names.KV_IN, "kv_in", AnyValue(string_value="{}")),
        (names.GAP_COUNT, "gaps", AnyValue(int_value=-5)),
        (names.GAP_UNIT, "gaps", AnyValue(string_value="furlong")),
        (names.GAP_SKETCH, "gaps", AnyValue(string_value="text")),
    ],
)
def test_absurd_values_read_as_not_seen(name: str, field: str, value: AnyValue) -> None:
    span = to_span(exchange())
    _attribute(span, name).CopyFrom(value)
    unseen: dict[str, Any] = {field: None}
    assert read_exchange(span, PROCESS) == exchange(**unseen)


def test_words_of_a_later_version_are_no_error() -> None:
    span = to_span(exchange(hints=(Hint.BUFFERED,)))
    _attribute(span, names.HINTS).array_value.values.add(string_value="from_the_future")
    _attribute(span, names.OUTCOME).string_value = "vanished"
    span.attributes.add(key="handrail.not_yet", value=AnyValue(int_value=1))
    assert read_exchange(span, PROCESS) == exchange(hints=(Hint.BUFFERED,), outcome=Outcome.UNKNOWN)


def test_duration_falls_back_to_the_span_itself() -> None:
    span = to_span(exchange())
    _attribute(span, names.TIME_DURATION_NS).int_value = -1
    assert read_exchange(span, PROCESS) == exchange()


@pytest.mark.parametrize(
    "change",
    [
        {"trace_id": b""},
        {"span_id": b"\0" * 7},
        {"parent_span_id": b"\0" * 9},
        {"start_time_unix_nano": 0},
        {"start_time_unix_nano": 2**64 - 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_unusable_span_is_refused(change: dict[str, Any]) -> None:
    span = to_span(exchange())
    for field, value in change.items():
        setattr(span, field, value)
    with pytest.raises(ValueError, match=r"ids|start"):
        read_exchange(span, PROCESS)


def test_a_span_of_another_origin_is_refused() -> None:
    span = Span(trace_id=b"1" * 16, span_id=b"2" * 8, name="llm_request", start_time_unix_nano=1, end_time_unix_nano=2)
    with pytest.raises(ValueError, match="no exchange"):
        read_exchange(span, PROCESS)


def test_unusable_duration_is_refused() -> None:
    span = to_span(exchange())
    _attribute(span, names.TIME_DURATION_NS).Clear()
    span.end_time_unix_nano = 0
    with pytest.raises(ValueError, match="duration"):
        read_exchange(span, PROCESS)


_values = st.one_of(
    st.builds(AnyValue, string_value=st.text(max_size=8)),
    st.builds(AnyValue, int_value=st.integers(-(2**63), 2**63 - 1)),
    st.builds(AnyValue, double_value=st.floats()),
    st.builds(AnyValue, bool_value=st.booleans()),
    st.builds(AnyValue, bytes_value=st.binary(max_size=8)),
    st.just(AnyValue()),
)


@given(
    st.lists(st.tuples(st.sampled_from(ATTRIBUTES), _values), max_size=12),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_no_attribute_raises_anything_but_value_error(attributes: list[tuple[str, AnyValue]], start: int, end: int) -> None:
    span = to_span(exchange())
    span.start_time_unix_nano, span.end_time_unix_nano = start, end
    span.attributes.extend(KeyValue(key=key, value=value) for key, value in attributes)
    try:
        read = read_exchange(span, PROCESS)
    except ValueError:
        return
    assert 0 <= read.duration_ns < 2**53


@given(
    st.builds(
        Process,
        role=st.sampled_from(Role),
        instance=st.text(max_size=9),
        host=st.text(min_size=1, max_size=9),
        service=st.text(max_size=9),
        sender=st.text(max_size=9),
        host_name=st.text(max_size=9),
    )
)
def test_process_survives_its_resource(process: Process) -> None:
    assert process_of(Resource.FromString(resource_of(process).SerializeToString())) == process


@pytest.mark.parametrize(
    ("attributes", "process"),
    [
        ({}, Process(role=Role.UNKNOWN, instance="", host="")),
        ({"handrail.role": "chef"}, Process(role=Role.UNKNOWN, instance="", host="")),
        (
            {"service.name": "vllm", "service.instance.id": "pod-7", "host.name": "n1"},
            Process(role=Role.UNKNOWN, instance="pod-7", host="n1", service="vllm", host_name="n1"),
        ),
        (
            {
                "handrail.role": "prefill",
                "handrail.instance": "a:1",
                "service.instance.id": "pod-7",
                "host.id": "h",
                "host.name": "n",
            },
            Process(role=Role.PREFILL, instance="a:1", host="h", host_name="n"),
        ),
        ({"handrail.sender.id": "s", "service.instance.id": "s"}, Process(role=Role.UNKNOWN, instance="", host="", sender="s")),
        ({"handrail.sender.id": "s"}, Process(role=Role.UNKNOWN, instance="", host="", sender="s")),
    ],
    ids=["empty", "bad-role", "foreign", "ours", "sidecar-itself", "sender-only"],
)
def test_process_of_any_resource(attributes: dict[str, str], process: Process) -> None:
    resource = Resource(attributes=[KeyValue(key=k, value=AnyValue(string_value=v)) for k, v in attributes.items()])
    assert process_of(resource) == process


def test_resource_keeps_what_the_user_set_and_our_own_names_win() -> None:
    resource = resource_of(PROCESS, cluster="blue", extra={"handrail.role": "chef", "zone": "a", "n": 3, "x": 0.5, "on": True})
    found = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in resource.attributes}
    assert found["handrail.role"] == "decode"
    assert found["handrail.cluster"] == "blue"
    assert [found[key] for key in ("zone", "n", "x", "on")] == ["a", 3, 0.5, True]


def _attribute(span: Span, name: str) -> AnyValue:
    return next(a.value for a in span.attributes if a.key == name)
