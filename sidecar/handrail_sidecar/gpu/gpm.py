"""Read GPU performance monitoring: how busy the GPU was between two samples.

The second sample of a window is the first of the next one.
So windows follow each other without holes, and rate times window adds up to the bytes moved. Hopper and later.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from handrail.device_counters.gpu import WINDOW, Gpm
from handrail.records.devices import DeviceValue
from handrail_sidecar.gpu.devices import GpuDevice, Nvml
from handrail_sidecar.gpu.failures import Meaning, NvmlFailed, failure
from handrail_sidecar.gpu.nvml_calls import NvmlTask, SamplerClock
from handrail_sidecar.gpu.values import Slot

APART_NS: Final = 100_000_000
"""Least time between two samples: NVML refreshes them that often (nvml.h).

Samples that are closer give values without meaning.
"""

_NOT_SUPPORTED: Final = 3
_HEAD: Final = "=24x"  # nvmlGpmMetricsGet_t: version, count, two samples
_METRIC: Final = "4xId24x"  # nvmlGpmMetric_t: id, return code, value, three names


class GpmTask(NvmlTask):
    """One window of performance monitoring.

    Its first read gives nothing. A read that comes too soon leaves the window open.
    """

    __slots__ = ("_before_ns", "_clock", "_later", "_layout", "_nvml", "_of", "_requests", "_samples", "fresh_s", "window")

    def __init__(self, nvml: Nvml, gpu: GpuDevice, clock: SamplerClock) -> None:
        super().__init__(gpu, "nvmlGpmSampleGet")
        self._nvml = nvml
        self._clock = clock
        self._samples: list[Any] = []
        self._requests: list[Any] = []  # the two samples alternate as the later one
        self._later = 0
        self._layout = struct.Struct(_HEAD)
        self._before_ns: int | None = None
        self.window: DeviceValue | None = None
        self.fresh_s = 0.0  # length of the window reported last, until it has been compared
        self._of: list[Slot] = []

    def call(self) -> Any:
        if not self._samples:
            self._prepare()
        if self._of != self.slots:
            self._lay_out()
        now, before = self._clock.mono_ns(), self._before_ns
        if before is not None and now - before < APART_NS:
            return None  # the window goes on
        self._before_ns = None  # until this read has succeeded
        answer = None
        self._nvml.nvmlGpmSampleGet(self.gpu.handle, self._samples[self._later])
        if self._clock.mono_ns() - now > APART_NS:
            return None  # the time of the sample is not known
        if before is not None:
            request = self._requests[self._later]
            self._nvml.nvmlGpmMetricsGet(request)
            answer = (self._of, self._layout.unpack_from(request), (now - before) / 1e9)
        self._later, self._before_ns = 1 - self._later, now
        return answer

    def _prepare(self) -> None:
        if not self._nvml.nvmlGpmQueryDeviceSupport(self.gpu.handle).isSupportedDevice:
            raise NvmlFailed(_NOT_SUPPORTED)
        self._samples = [self._nvml.nvmlGpmSampleAlloc(), self._nvml.nvmlGpmSampleAlloc()]

    def _lay_out(self) -> None:
        first, second = self._samples
        self._of = list(self.slots)
        self._requests = [self._request(second, first), self._request(first, second)]
        self._layout = struct.Struct(_HEAD + _METRIC * len(self._of))

    def _request(self, earlier: Any, later: Any) -> Any:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._of)
        request.sample1, request.sample2 = earlier, later
        for place, slot in enumerate(self._of):
            assert isinstance(slot.how, Gpm)
            request.metrics[place].metricId = slot.how.id
        return request

    def values(self, answer: Any, began_ns: int, ended_ns: int, at_unix_ns: int) -> list[DeviceValue]:
        of, numbers, self.fresh_s = answer
        found = []
        flat = iter(numbers)
        for slot, code, raw in zip(of, flat, flat, strict=True):
            if slot.how is None:
                continue  # no longer trusted (``cross_check.py``)
            if code:
                if failure(code).meaning is Meaning.ABSENT and slot in self.slots:
                    self.gone.append((slot, code))
                continue
            value = slot.gauge(raw)
            if value is not None:
                found.append(value)
        if self.gone:
            left = {id(slot) for slot, _ in self.gone}
            self.slots[:] = [slot for slot in self.slots if id(slot) not in left]
        self.window = DeviceValue(name=WINDOW.name, value=self.fresh_s)
        return [*found, self.window] if found else []

    def close(self) -> None:
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []
