"""Device samples on their way to the exporter, in bounded batches, one per second.

They never delay the records of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from builders.device_samples import START_UNIX_NS, S, counter, flattened, gpu, port, process, sample
from builders.device_samples import busy_host as busy
from handrail.metrics.registry import Registry
from handrail.otlp.signals import Rejected, Retryable, Signal
from handrail.records.devices import DeviceSample
from handrail.wire.device_samples import read_devices
from handrail_sidecar.export import device_batches
from handrail_sidecar.export.device_batches import DeviceBatches, device_rows
from handrail_sidecar.export.resource import own_resource


@dataclass
class Taken:
    """A double of the exporter that keeps what it gets; ``refusal`` is raised instead."""

    payloads: list[bytes] = field(default_factory=list)
    refusal: Exception | None = None
    some: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, signal: Signal, payload: bytes) -> None:
        assert signal is Signal.METRICS
        if self.refusal is not None:
            raise self.refusal
        self.payloads.append(payload)
        self.some.set()

    def samples(self) -> list[DeviceSample]:
        """All samples that were taken."""
        found = []
        for payload in self.payloads:
            (entry,) = ExportMetricsServiceRequest.FromString(payload).resource_metrics
            found += [one for run in read_devices(entry.scope_metrics[0].metrics, process()) for one in run.samples()]
        return found


def batches(taken: Taken, room: Callable[[], bool] = lambda: True, every_s: float = 3600.0) -> DeviceBatches:
    return DeviceBatches(own_resource(process()), {}, taken, room, every_s)


async def test_what_came_from_any_thread_is_one_request() -> None:
    taken = Taken()
    made = batches(taken)
    device_samples = flattened(list(busy(1, gpus=2)))
    by_device = [[one for one in device_samples if one.device.index == index] for index in range(2)]
    await asyncio.gather(*(asyncio.to_thread(lambda of=of: [made.sample(one) for one in of]) for of in by_device))  # type: ignore[misc,func-returns-value]
    assert await made.samples([sample(port(), START_UNIX_NS)])
    await made.flush()
    assert len(taken.payloads) == 1
    assert len(taken.samples()) == len(device_samples) + 1
    assert (made.stats.taken, made.stats.sent) == (21, 21)
    await made.flush()
    assert len(taken.payloads) == 1  # no sample arrived, so nothing is sent


@pytest.mark.parametrize(
    ("room", "refusal", "counted"),
    [(False, None, "no_room"), (True, Retryable("full", 1.0), "no_room"), (True, Rejected("too large"), "rejected")],
    ids=["no_room", "full", "rejected"],
)
async def test_what_is_not_taken_is_counted_and_the_next_batch_goes(room: bool, refusal: Exception | None, counted: str) -> None:
    taken = Taken(refusal=refusal)
    rooms = [room, True]
    made = batches(taken, lambda: rooms.pop(0))
    made.sample(sample(gpu(), START_UNIX_NS))
    await made.flush()
    assert (getattr(made.stats, counted), made.stats.sent) == (1, 0)
    taken.refusal = None
    made.sample(sample(gpu(), START_UNIX_NS + S))
    await made.flush()
    assert [one.at_unix_ns for one in taken.samples()] == [START_UNIX_NS + S]


async def test_a_batch_is_bounded_and_a_sample_that_makes_no_metric_is_a_fault_that_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_batches, "MOST_WAITING", 3)
    made = batches(Taken())
    made.sample(sample(gpu(), START_UNIX_NS, counter("x", 1, since=-5)))  # not an unsigned number
    for at in range(4):
        made.sample(sample(gpu(), START_UNIX_NS + at))
    assert (made.stats.taken, made.stats.overrun, made.stats.faults) == (5, 2, 1)


async def test_what_became_of_samples_is_on_the_metrics_page() -> None:
    rooms = [True, False]
    made = batches(Taken(), lambda: rooms.pop(0))
    for at in range(2):
        made.sample(sample(gpu(), START_UNIX_NS + at))
        await made.flush()
    text = Registry(device_rows(made)).expose("text/plain")[0].decode()
    assert "handrail_sidecar_device_samples_total 2.0" in text
    assert "handrail_sidecar_device_samples_sent_total 1.0" in text
    assert 'handrail_sidecar_device_samples_dropped_total{reason="no_room"} 1.0' in text


async def test_it_sends_by_itself_and_what_waits_at_the_end() -> None:
    taken = Taken()
    made = batches(taken, every_s=0.001)
    await made.start()
    made.sample(sample(gpu(), START_UNIX_NS))
    await asyncio.wait_for(taken.some.wait(), 60)
    await made.shutdown()
    made.sample(sample(gpu(), START_UNIX_NS + 1))
    await made.shutdown()
    late = batches(taken)
    await late.start()
    late.sample(sample(gpu(), START_UNIX_NS + 2))
    await late.shutdown()
    assert [one.at_unix_ns - START_UNIX_NS for one in taken.samples()] == [0, 2]
