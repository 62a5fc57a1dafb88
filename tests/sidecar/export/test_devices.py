"""Device samples as OTLP metrics: written and read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from builders.device_samples import (
    COUNTING_SINCE,
    GPU_TABLE,
    START_UNIX_NS,
    S,
    counter,
    flattened,
    gauge,
    gpu,
    port,
    process,
    sample,
)
from builders.device_samples import busy_host as busy
from handrail import conventions as names
from handrail.records import Source
from handrail.records.devices import Device, DeviceKind, DeviceSample, DeviceValue
from handrail.wire.device_samples import CONVENTIONS, DeviceMetrics, devices_request, named, read_devices
from handrail_sidecar.export.resource import own_resource

TABLES = named(gpu=GPU_TABLE)
OF = process()
_WORD = st.sampled_from(["", "a", "receive", "X:1/2", "b-c.d_e"])
_NAME = st.sampled_from(["energy_joules", names.GPU_NVLINK_BYTES, names.LINK_BYTES, "new_counter", "a.b"])
_VALUE = st.builds(
    DeviceValue,
    name=_NAME,
    value=st.integers(0, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    label=_WORD,
    start_unix_ns=st.sampled_from([0, 1, COUNTING_SINCE]),
)
_DEVICE = st.builds(
    Device,
    kind=st.sampled_from(DeviceKind),
    key=st.sampled_from(["GPU-1", "mlx5_0/1", "eth0"]),
    index=st.none() | st.integers(0, 15),
    product=_WORD,
    pci=_WORD,
    line_rate_bytes=st.none() | st.integers(0, 10**12),
    parent=_WORD,
    engine=_WORD,
)


@st.composite
def _samples(draw: st.DrawFn) -> list[DeviceSample]:
    """Generate samples of devices, oldest first.

    A device's description may change, a value may be missing at some instants, and one key has one kind.
    """
    found: dict[tuple[int, str], DeviceSample] = {}
    kinds: dict[str, DeviceKind] = {}
    for _ in range(draw(st.integers(0, 8))):
        device = draw(_DEVICE)
        device = replace(device, kind=kinds.setdefault(device.key, device.kind))
        at = START_UNIX_NS + draw(st.integers(0, 9)) * S // 10
        values = {(v.name, v.label): v for v in draw(st.lists(_VALUE, max_size=5))}
        found[at, device.key] = DeviceSample(
            process=OF,
            source=draw(st.sampled_from([Source.NVML, Source.RDMA, Source.NIC])),
            device=device,
            at_unix_ns=at,
            values=tuple(values[key] for key in sorted(values)),
            took_ns=draw(st.integers(0, 10**10)),
        )
    return [found[place] for place in sorted(found)]


def sent(samples: list[DeviceSample]) -> list[Metric]:
    """Build the messages in the order of their arrival."""
    metrics = DeviceMetrics(TABLES)
    for one in samples:
        metrics.add(one)
    request = ExportMetricsServiceRequest.FromString(devices_request(own_resource(OF), metrics))
    (entry,) = request.resource_metrics
    (scope,) = entry.scope_metrics
    assert scope.scope.name == names.SCOPE_DEVICES
    return list(scope.metrics)


def back(metrics: list[Metric]) -> list[DeviceSample]:
    """Read them back one by one, oldest first."""
    samples = [one for run in read_devices(metrics, OF) for one in run.samples()]
    return sorted(samples, key=lambda one: (one.at_unix_ns, one.device.key))


@given(_samples())
def test_samples_are_read_back_whole_numbers_to_the_last_digit(samples: list[DeviceSample]) -> None:
    read = back(sent(samples))
    assert read == samples
    assert [[type(v.value) for v in one.values] for one in read] == [[type(v.value) for v in one.values] for one in samples]


def test_a_second_of_a_host_has_one_point_a_series_with_the_earlier_values_as_exemplars() -> None:
    samples = flattened(list(busy(1, gpus=2)))
    metrics = sent(samples)
    read = back(metrics)
    assert [(one.at_unix_ns, one.device, one.took_ns) for one in read] == [(o.at_unix_ns, o.device, o.took_ns) for o in samples]
    assert [v.value for one in read for v in one.values] == pytest.approx([v.value for o in samples for v in o.values], abs=0.051)
    by_name = {metric.name: metric for metric in metrics}
    utilization = by_name["hw.gpu.utilization"]
    assert (utilization.unit, utilization.WhichOneof("data")) == ("1", "gauge")
    assert [len(point.exemplars) for point in utilization.gauge.data_points] == [9, 9]
    reports = [{a.key: a.value.string_value for a in point.attributes} for point in utilization.gauge.data_points]
    assert sorted(reports, key=str) == [{"hw.id": gpu(index).key, "hw.type": "gpu"} for index in range(2)]
    nvlink = by_name["handrail_gpu_nvlink_bytes"]
    assert nvlink.sum.is_monotonic
    assert [a.key for a in nvlink.sum.data_points[0].attributes] == ["hw.id", "direction"]
    last = nvlink.sum.data_points[0]
    assert all(one.time_unix_nano < last.time_unix_nano and one.as_int < last.as_int for one in last.exemplars)


def test_a_ratio_is_rounded_to_what_it_means() -> None:
    fine = [
        sample(gpu(), START_UNIX_NS + at, gauge(names.GPU_BUSY, 1 / (3 + at)), gauge("power_watts", 333.3333)) for at in range(2)
    ]
    assert [[value.value for value in one.values] for one in back(sent(fine))] == [[333.3, 0.3333], [333.3, 0.25]]


@pytest.mark.parametrize("ours", CONVENTIONS)
def test_what_has_a_convention_is_called_by_it_and_read_back(ours: str) -> None:
    name = ours.removeprefix("handrail_gpu_").removeprefix("handrail_link_")
    device = gpu() if ours.startswith(names.METRIC_GPU) else port()
    one = sample(device, START_UNIX_NS, gauge(name, 0.5, "receive"))
    assert back(sent([one])) == [one]
    assert [metric.name[:3] for metric in sent([one])] == ["han", "hw."]


def test_a_counter_that_began_anew_is_another_point() -> None:
    before = sample(port(), START_UNIX_NS, counter(names.LINK_BYTES, 10**15, names.TRANSMIT))
    after = sample(port(), START_UNIX_NS + S, counter(names.LINK_BYTES, 5, names.TRANSMIT, since=START_UNIX_NS + 1))
    (metric,) = (metric for metric in sent([before, after]) if metric.name == "hw.network.io")
    assert [point.start_time_unix_nano for point in metric.sum.data_points] == [COUNTING_SINCE, START_UNIX_NS + 1]
    assert back(sent([before, after])) == [before, after]


def test_a_device_that_gave_nothing_is_a_sample_without_values() -> None:
    silent = sample(gpu(), START_UNIX_NS)
    assert back(sent([silent])) == [silent]


def test_what_makes_no_number_is_left_out_and_what_others_send_is_passed_over() -> None:
    odd = sample(gpu(), START_UNIX_NS, gauge("a", float("nan")), gauge("b", float("inf")), counter("c", 2**63), gauge("d", 1.5))
    (read,) = back(sent([odd]))
    assert [value.name for value in read.values] == ["d"]
    foreign = Metric(name="hw.gpu.utilization")
    foreign.gauge.data_points.add(time_unix_nano=START_UNIX_NS, as_double=0.5)  # no device
    other = Metric(name="system.cpu.time")
    other.sum.data_points.add(time_unix_nano=1, as_double=float("nan"))
    lost = Metric(name=names.METRIC_DEVICE_READ)  # of a kind that a later version has
    point = lost.gauge.data_points.add(time_unix_nano=START_UNIX_NS, as_int=1)
    for key, text in ((names.HW_ID, "x"), (names.DEVICE_KIND, "npu"), (names.SOURCE, "nvml")):
        point.attributes.add(key=key).value.string_value = text
    assert read_devices([foreign, other, lost], OF) == []
