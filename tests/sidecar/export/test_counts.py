"""A proxy's counts, to the collector and back.

They are sent at the start and at the end, whatever happens to single messages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from builders.records import EPOCH, process
from handrail.conventions import METRIC_FINISHED, SCOPE_COUNTS
from handrail.otlp.signals import Rejected, Retryable, Signal
from handrail.records import Outcome, RequestCounts, Role
from handrail.wire.counts import counts_request, read_counts
from handrail.wire.exchange import resource_of
from handrail_sidecar.catalogue import everything
from handrail_sidecar.components import make_sidecar
from handrail_sidecar.export.evidence import CountsExport

EDGE = process(Role.EDGE)


def counts_read(payload: bytes) -> list[RequestCounts]:
    request = ExportMetricsServiceRequest.FromString(payload)
    (scope,) = request.resource_metrics[0].scope_metrics
    assert scope.scope.name == SCOPE_COUNTS
    return read_counts(scope.metrics, EDGE)


@given(st.dictionaries(st.sampled_from(Outcome), st.integers(0, 2**62), min_size=1))
def test_exported_counts_are_read_back(finished: dict[Outcome, int]) -> None:
    payload = counts_request(resource_of(replace(EDGE, sender="s")), finished, EPOCH, EPOCH + 5)
    (found,) = counts_read(payload)
    assert found == RequestCounts(
        process=EDGE, at_unix_ns=EPOCH + 5, start_unix_ns=EPOCH, finished={k.value: n for k, n in finished.items()}
    )


def test_what_is_not_of_them_is_passed_over() -> None:
    request = ExportMetricsServiceRequest()
    scope = request.resource_metrics.add().scope_metrics.add()
    scope.metrics.add(name="other").sum.data_points.add().as_int = 3
    scope.metrics.add(name=METRIC_FINISHED).gauge.data_points.add().as_int = 3
    scope.metrics.add(name=METRIC_FINISHED).sum.data_points.add().as_int = -3
    assert read_counts(scope.metrics, EDGE) == []
    many = scope.metrics.add(name=METRIC_FINISHED)
    for _ in range(10_000):
        many.sum.data_points.add(as_int=1)
    assert [found.finished for found in read_counts(scope.metrics, EDGE)] == [{"unknown": 1}]


async def test_it_tells_at_its_start_and_at_its_end() -> None:
    taken: list[bytes] = []

    async def take(signal: Signal, payload: bytes) -> None:
        assert signal is Signal.METRICS
        taken.append(payload)

    finished = {Outcome.OK: 0, Outcome.HTTP_ERROR: 0}
    now = EPOCH
    export = CountsExport(resource_of(replace(EDGE, sender="s")), finished, take, every_s=3600, now_unix_ns=lambda: now)
    await export.shutdown()
    await export.start()
    finished[Outcome.OK] = 7
    now += 10**9
    await export.shutdown()
    await export.shutdown()
    assert [(c.finished["ok"], c.start_unix_ns, c.at_unix_ns) for payload in taken for c in counts_read(payload)] == [
        (0, EPOCH, EPOCH),
        (7, EPOCH, EPOCH + 10**9),
    ]


@pytest.mark.parametrize("refusal", [Retryable("full", 1.0), Rejected("never")], ids=["retryable", "rejected"])
async def test_one_that_is_refused_is_left_out(refusal: Exception) -> None:
    async def take(*_: Any) -> None:
        raise refusal

    export = CountsExport(resource_of(replace(EDGE, sender="s")), {Outcome.OK: 1}, take, every_s=3600)
    await export.start()
    await export.shutdown()
    assert export.not_taken == 2


@pytest.mark.parametrize("role", list(Role))
def test_only_an_edge_is_counted_over(role: Role) -> None:
    made = make_sidecar(replace(everything(), role=role))
    assert (made.find(CountsExport) is not None) is (role is Role.EDGE)
