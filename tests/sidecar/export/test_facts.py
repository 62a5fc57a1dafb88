"""Facts and reports: written and read back, and damaged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from builders.records import EPOCH, process
from handrail import conventions as names
from handrail.records import LineClock, LogFact, LogKind, Role, SchemaNote, SchemaReport, SchemaState, Source
from handrail.wire.log_events import fact_log, logs_request, read_fact, read_report, report_log
from handrail_sidecar.export.resource import own_resource

_PROCESS = process(Role.DECODE)
_WORD = st.text(alphabet="abcXYZ019-_.:", min_size=1, max_size=20)
_COUNT = st.integers(0, 2**40)


def fact(**more: Any) -> LogFact:
    base: dict[str, Any] = {
        "process": _PROCESS,
        "source": Source.LOG,
        "fact_id": "00ff",
        "kind": LogKind.EXPIRED,
        "recogniser": "vllm.nixl.expired",
        "at_unix_ns": EPOCH,
        "last_unix_ns": EPOCH,
        "clock": LineClock.LINE,
    }
    return LogFact(**{**base, **more})


_FACTS = st.builds(
    fact,
    kind=st.sampled_from(LogKind),
    clock=st.sampled_from(LineClock),
    level=st.sampled_from(["", "INFO", "WARNING", "ERROR"]),
    at_unix_ns=st.integers(1, 2**62 - 1),
    last_unix_ns=st.integers(1, 2**62 - 1),
    resolution_ns=_COUNT,
    lines=_COUNT,
    revision=_COUNT,
    ranks=st.lists(_WORD, max_size=3).map(tuple),
    request_id=st.none() | _WORD,
    peer=st.none() | _WORD,
    failure=st.none() | _WORD,
    reason=st.none() | _WORD,
    numbers=st.dictionaries(_WORD, st.floats(allow_nan=False, allow_infinity=False), max_size=4).map(
        lambda d: tuple(sorted(d.items()))
    ),
    words=st.dictionaries(_WORD, _WORD, max_size=3).map(lambda d: tuple(sorted(d.items()))),
    inferred=st.lists(_WORD, max_size=3).map(tuple),
)


@given(_FACTS)
def test_a_fact_is_read_back(given_fact: LogFact) -> None:
    log = LogRecord.FromString(fact_log(given_fact).SerializeToString())
    assert read_fact(log, _PROCESS) == given_fact


@given(
    st.lists(
        st.builds(SchemaNote, state=st.sampled_from(SchemaState), quantity=_WORD, seen=_WORD | st.just(""), expected=_WORD),
        max_size=6,
    ).map(lambda notes: tuple(sorted(notes, key=lambda note: list(SchemaState).index(note.state))))
)
def test_a_report_is_read_back(notes: tuple[SchemaNote, ...]) -> None:
    report = SchemaReport(process=_PROCESS, source=Source.METRICS, at_unix_ns=EPOCH, emitters=("vllm",), notes=notes)
    assert read_report(report_log(report), _PROCESS) == report


def test_the_request_is_found_by_its_key() -> None:
    (key,) = [
        a.value.string_value for a in fact_log(fact(request_id="cmpl-abc-0-99ae74c8")).attributes if a.key == names.JOIN_KEY
    ]
    assert key == "abc"


@pytest.mark.parametrize("left_out", [names.SOURCE, names.KV_LINE_PREFIX + "kind", names.KV_LINE_PREFIX + "fact_id"])
def test_what_lacks_something_is_refused(left_out: str) -> None:
    log = fact_log(fact())
    kept = [attribute for attribute in log.attributes if attribute.key != left_out]
    del log.attributes[:]
    log.attributes.extend(kept)
    with pytest.raises(ValueError, match="missing"):
        read_fact(log, _PROCESS)


def test_other_events_are_not_ours() -> None:
    assert read_fact(LogRecord(event_name="x"), _PROCESS) is None
    assert read_report(fact_log(fact()), _PROCESS) is None


def test_a_request_holds_one_scope_and_our_resource() -> None:
    sent = ExportLogsServiceRequest.FromString(logs_request(own_resource(_PROCESS), [fact_log(fact()), fact_log(fact())]))
    (entry,) = sent.resource_logs
    (scope,) = entry.scope_logs
    assert (scope.scope.name, len(scope.log_records)) == (names.SCOPE_EVENTS, 2)
