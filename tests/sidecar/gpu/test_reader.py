"""What the reader of a device makes of answers, without NVML and without threads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from handrail.device_counters.gpu import Pace
from handrail.records import Process, Role
from handrail.records.devices import Device, DeviceKind
from handrail_sidecar.gpu.devices import GpuDevice
from handrail_sidecar.gpu.failures import NvmlFailed
from handrail_sidecar.gpu.nvml_calls import FIRST_CALL_NS, FieldTask, NvmlTask
from handrail_sidecar.gpu.reader import DeviceReader, window_ns
from handrail_sidecar.gpu.state import SamplerStats
from handrail_sidecar.sampling.worker import Reading, Worker
from nvml.virtual import at_pace, in_loop, read_once

MS = 1_000_000
SECOND = 1000 * MS
UNKNOWN, LOST = 999, 15


class Clock:
    """A clock that stays where the test sets it."""

    def __init__(self) -> None:
        self.now_ns = SECOND

    def mono_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        return self.now_ns


def reader(period_ms: int, clock: Clock | None = None, stats: SamplerStats | None = None, **nvml: Any) -> DeviceReader:
    gpu = GpuDevice(device=Device(kind=DeviceKind.GPU, key="GPU-a", index=0), handle=None)
    process = Process(role=Role.UNKNOWN, instance="", host="")
    return DeviceReader(SimpleNamespace(**nvml), gpu, clock or Clock(), process, period_ms * MS, stats=stats)


def task_of(of: DeviceReader, name: str) -> NvmlTask:
    (task,) = [each for each in of.tasks if each.name == name]
    return task


@pytest.mark.parametrize(("period_ms", "window_ms"), [(10, 110), (20, 120), (50, 150), (100, 200), (101, 101), (1000, 1000)])
def test_windows_end_with_a_tick_and_are_longer_than_100_ms(period_ms: int, window_ms: int) -> None:
    assert {task.period_ns for task in at_pace(reader(period_ms), Pace.WINDOW)} == {window_ms * MS}


@pytest.mark.parametrize(
    ("period_ms", "devices", "expected_ms"),
    [(100, 4, 200), (100, 5, 300), (100, 8, 400), (100, 16, 800), (1000, 56, 3000), (10, 16, 110)],
)
def test_many_gpus_have_longer_windows_unless_they_are_sampled_faster_than_usual(
    period_ms: int, devices: int, expected_ms: int
) -> None:
    assert window_ns(period_ms * MS, devices) == expected_ms * MS


def test_a_binding_without_any_function_makes_everything_absent() -> None:
    empty, clock = reader(100), Clock()
    calls = [task for task in in_loop(empty) if task.name.startswith("nvmlDevice")]
    assert read_once(empty, calls, clock) is None
    assert empty.absent["utilization_ratio", ""] == -1
    assert not set(calls) & set(empty.tasks)


def test_a_failure_that_may_pass_is_retried_at_once_and_then_after_growing_pauses() -> None:
    clock, stats = Clock(), SamplerStats()
    failing = reader(100, clock, stats, nvmlDeviceGetPowerUsage=raises(UNKNOWN))
    task = task_of(failing, "nvmlDeviceGetPowerUsage")
    pauses = []
    for _ in range(12):
        read_once(failing, [task], clock)
        pauses.append(-(-(task.next_ns - clock.now_ns) // SECOND))
        clock.now_ns = task.next_ns
    assert pauses == [1, 1, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert stats.by_code() == {UNKNOWN: 12}


def test_an_error_of_ours_in_one_call_is_counted_and_hides_no_other() -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError

    clock, stats = Clock(), SamplerStats()
    of = reader(100, clock, stats, nvmlDeviceGetPowerUsage=breaks, nvmlDeviceGetTemperature=lambda *_: 40)
    sample = read_once(of, [task_of(of, "nvmlDeviceGetPowerUsage"), task_of(of, "nvmlDeviceGetTemperature 0")], clock)
    assert sample is not None
    assert [(value.name, value.value) for value in sample.values] == [("temperature_celsius", 40)]
    assert stats.faults == 1


def test_what_was_read_before_a_device_is_lost_is_a_sample_and_the_rest_is_not() -> None:
    clock = Clock()
    of = reader(100, clock, nvmlDeviceGetTemperature=lambda *_: 40, nvmlDeviceGetPowerUsage=raises(LOST))
    temperature, power = task_of(of, "nvmlDeviceGetTemperature 0"), task_of(of, "nvmlDeviceGetPowerUsage")
    sample = read_once(of, [temperature, power, temperature], clock)
    assert sample is not None
    assert len(sample.values) == 1
    assert of.lost == LOST


def test_a_call_has_more_time_when_it_is_made_for_the_first_time() -> None:
    clock = Clock()
    of = reader(100, clock, nvmlDeviceGetPowerUsage=lambda *_: 5)
    task = task_of(of, "nvmlDeviceGetPowerUsage")
    assert task.limit_ns == FIRST_CALL_NS
    read_once(of, [task], clock)
    assert task.limit_ns == 50 * MS


def test_a_batch_that_hangs_is_read_by_field_and_becomes_one_again_without_the_field_that_hangs() -> None:
    changes: list[tuple[list[str], list[str]]] = []
    of = reader(100)
    of._update = lambda new, gone: changes.append((sorted(each.name for each in new), [each.name for each in gone]))
    batch = task_of(of, "fields second")
    slots = list(batch.slots)
    of.split(batch)
    parts = [task for task in at_pace(of, Pace.SECOND) if isinstance(task, FieldTask)]
    assert [slot for part in parts for slot in part.slots] == slots
    assert {part.limit_ns for part in parts} == {50 * MS}
    assert changes == [(sorted(part.name for part in parts), ["fields second"])]
    assert of.take([Reading(batch, None, 0, 1, 0)]) is None  # its late answer is nobody's
    hangs = parts[0]
    hangs.worker = Worker("", "", 0, 0, alone=hangs)
    of.join_fields()
    assert sorted(task.name for task in at_pace(of, Pace.SECOND) if isinstance(task, FieldTask)) == [hangs.name, "fields second"]
    hangs.worker.alone = None
    of.join_fields()
    (batch,) = [task for task in at_pace(of, Pace.SECOND) if isinstance(task, FieldTask)]
    assert {id(slot) for slot in batch.slots} == {id(slot) for slot in slots}
    of.split(task_of(of, "nvmlDeviceGetPowerUsage"))  # is no batch
    assert len(changes) == 3


def raises(code: int) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise NvmlFailed(code)

    return call
