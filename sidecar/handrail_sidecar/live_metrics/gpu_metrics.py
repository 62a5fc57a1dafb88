"""Define the metrics of the host's GPUs, and what sampling them costs and misses.

The counters are those of the table in ``device_counters/gpu.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

from handrail import conventions as names
from handrail.device_counters.gpu import ALL
from handrail.metrics.registry import MetricDef
from handrail.records.devices import CounterDef, Device, DeviceValue
from handrail.records.quantities import QuantityKind
from handrail_sidecar.gpu.failures import FAILURES, failure
from handrail_sidecar.gpu.nvml_calls import NvmlTask
from handrail_sidecar.gpu.sampler import Sampler
from handrail_sidecar.gpu.view import all_tasks, fresh_values, supported
from handrail_sidecar.sources.dcgm import DcgmSource

_DEVICE: Final = ("gpu", "uuid")
_SAME_SCRAPE_S: Final = 0.1

Values = Mapping[tuple[str, ...], float]


class _Page:
    """The fresh values by counter, gathered once per scrape and not once per metric."""

    def __init__(self, fresh: Callable[[], Sequence[tuple[Device, DeviceValue]]], monotonic_s: Callable[[], float]) -> None:
        self._fresh = fresh
        self._monotonic_s = monotonic_s
        self._at_s = -_SAME_SCRAPE_S
        self._values: dict[str, dict[tuple[str, ...], float]] = {}

    def of(self, counter: CounterDef) -> Values:
        now = self._monotonic_s()
        if now - self._at_s >= _SAME_SCRAPE_S:
            self._at_s, self._values = now, {}
            for device, value in self._fresh():
                key = (*_labels(device), value.label) if value.label else _labels(device)
                self._values.setdefault(value.name, {})[key] = value.value
        return self._values.get(counter.name, {})


def gpu_rows(sampler: Sampler, *, monotonic_s: Callable[[], float] = time.monotonic) -> list[MetricDef]:
    """Return the GPU metrics for ``Registry``.

    Label ``gpu`` is NVML's index; a MIG device has its GPU's index. The hardware bounds both labels.
    """
    page, stats, prefix = _Page(partial(fresh_values, sampler), monotonic_s), sampler.stats, f"{names.METRIC_SIDECAR}_gpu"
    return [
        MetricDef(
            f"{names.METRIC_GPU}_up",
            "gauge",
            "1 while NVML answers",
            lambda: float(sampler.state.problem is None and bool(sampler.readers)),
        ),
        MetricDef(f"{names.METRIC_GPU}_lost", "gauge", "1 for a GPU that does not answer", lambda: _lost(sampler), ("gpu",)),
        *(_counter_row(page, counter) for counter in ALL),
        MetricDef(
            f"{names.METRIC_GPU}_counter_supported",
            "gauge",
            "0 for a counter that this device lacks: its series is absent, not 0",
            lambda: {(*_labels(device), name): float(given) for device, name, given in supported(sampler)},
            (*_DEVICE, "counter"),
        ),
        MetricDef(f"{prefix}_samples", "counter", "Samples of GPUs taken", lambda: float(stats.samples)),
        MetricDef(f"{prefix}_samples_missed", "counter", "Samples that were due and are missing", lambda: float(stats.missed)),
        MetricDef(
            f"{prefix}_call_failures",
            "counter",
            "Failed calls of NVML, by code",
            lambda: _failures(sampler),
            ("reason",),
        ),
        MetricDef(f"{prefix}_calls", "counter", "Calls of NVML that returned", lambda: _by_call(sampler, _calls), ("call",)),
        MetricDef(
            f"{prefix}_call_seconds",
            "counter",
            "Time inside NVML calls, not processor time",
            lambda: _by_call(sampler, _seconds),
            ("call",),
        ),
        MetricDef(f"{prefix}_call_longest_seconds", "gauge", "Longest NVML call", lambda: _longest(sampler), ("call",)),
        MetricDef(
            f"{prefix}_calls_given_up",
            "counter",
            "NVML calls that took too long and got a thread of their own",
            lambda: float(stats.given_up),
        ),
        MetricDef(
            f"{prefix}_calls_not_replaced",
            "counter",
            "NVML calls that hang without a spare thread: the sidecar does not read that GPU",
            lambda: float(stats.not_replaced),
        ),
        MetricDef(
            f"{prefix}_stuck_seconds", "gauge", "Time since a hanging call began", lambda: _stuck(sampler), (*_DEVICE, "call")
        ),
        MetricDef(
            f"{prefix}_threads",
            "gauge",
            "Threads that read GPUs",
            lambda: float(len(sampler.pool.workers()) if sampler.pool else 0),
        ),
        MetricDef(f"{prefix}_invalid_values", "counter", "Readings that make no sense", lambda: _invalid(sampler)),
        MetricDef(
            f"{prefix}_counts_restarted",
            "counter",
            "Counters that restarted: after a driver restart, or because a read came too late to tell",
            lambda: _restarted(sampler),
        ),
        MetricDef(f"{prefix}_sessions", "counter", "Sessions with NVML", lambda: float(sampler.state.sessions)),
        MetricDef(f"{prefix}_faults", "counter", "Faults of Handrail while reading GPUs", lambda: float(stats.faults)),
    ]


def dcgm_rows(source: DcgmSource, *, monotonic_s: Callable[[], float] = time.monotonic) -> list[MetricDef]:
    """Return the GPU metrics when dcgm-exporter's page is the source.

    A series that it does not provide is unknown, not 0.
    """
    page, prefix = _Page(source.fresh, monotonic_s), f"{names.METRIC_SIDECAR}_gpu"
    return [
        MetricDef(f"{names.METRIC_GPU}_up", "gauge", "1 while dcgm-exporter answers", lambda: float(source.up)),
        *(_counter_row(page, counter) for counter in ALL),
        MetricDef(
            f"{names.METRIC_GPU}_profiling_paused",
            "gauge",
            "1 while profiling values stop and other values continue",
            lambda: {_labels(sample.device): float(sample.device.key in source.page.paused) for sample in source.samples},
            _DEVICE,
        ),
        MetricDef(f"{prefix}_scrapes", "counter", "Scrapes of dcgm-exporter", lambda: float(source.scrapes)),
        MetricDef(
            f"{prefix}_scrape_failures", "counter", "Scrapes of dcgm-exporter without an answer", lambda: float(source.failures)
        ),
        MetricDef(
            f"{prefix}_invalid_values", "counter", "Blank or senseless values of the page", lambda: float(source.page.invalid)
        ),
    ]


def _counter_row(page: _Page, counter: CounterDef) -> MetricDef:
    labels = (*_DEVICE, counter.label) if counter.label else _DEVICE
    kind: Literal["counter", "gauge"] = "gauge" if counter.kind is QuantityKind.GAUGE else "counter"
    text = f"{counter.help}. Absent {counter.absent}"
    return MetricDef(f"{names.METRIC_GPU}_{counter.name}", kind, text, lambda: page.of(counter), labels)


def _labels(device: Device) -> tuple[str, str]:
    return str(device.index), device.key


def _lost(sampler: Sampler) -> Values:
    lost = dict(sampler.state.lost)
    alive = {reader.gpu.device.index for reader in list(sampler.readers.values())}
    return {(str(index),): float(index in lost) for index in sorted({*lost, *(each for each in alive if each is not None)})}


def _failures(sampler: Sampler) -> Values:
    counts = sampler.stats.by_code()
    return {(failure(code).name.lower(),): float(counts.get(code, 0)) for code in sorted({*FAILURES, *counts})}


def _by_call(sampler: Sampler, of: Callable[[NvmlTask], float]) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for task in all_tasks(sampler):
        found[(task.name,)] = found.get((task.name,), 0.0) + of(task)
    return found


def _calls(task: NvmlTask) -> float:
    return task.calls


def _seconds(task: NvmlTask) -> float:
    return task.spent_ns / 1e9


def _longest(sampler: Sampler) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for task in all_tasks(sampler):
        found[(task.name,)] = max(found.get((task.name,), 0.0), task.longest_ns / 1e9)
    return found


def _stuck(sampler: Sampler) -> Values:
    return {(*_labels(task.gpu.device), task.name): ns / 1e9 for task, ns in sampler.hanging()}


def _invalid(sampler: Sampler) -> float:
    return float(sum(slot.invalid for reader in list(sampler.readers.values()) for slot in reader.slots))


def _restarted(sampler: Sampler) -> float:
    slots = [slot for reader in list(sampler.readers.values()) for slot in reader.slots]
    return float(sum(slot.standing.lost + sum(each.lost for each in list(slot.growths.values())) for slot in slots))
