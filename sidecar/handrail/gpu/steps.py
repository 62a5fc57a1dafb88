"""One call of NVML each, and the values it gives: a plain call, a batch of field values, a window of performance monitoring.

A step belongs to one device and to the thread that reads it now. ``read`` returns what came and leaves out what did not; a value
that will never come moves to the next way of reading it, or to ``absent``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol

from handrail.families.schema import Kind
from handrail.gpu.counters import EACH_LINK, MOST_LINKS, WINDOW, Call, Field, Gpm, GpuCounter, Link, Read, Value
from handrail.gpu.devices import Gpu, Nvml
from handrail.gpu.failures import BINDING_TOO_OLD, Meaning, NvmlFailed, code_of, failure
from handrail.gpu.growth import Growth, Standing
from handrail.hardware import DeviceValue

GPM_APART_NS: Final = 100_000_000
"""Two samples of performance monitoring closer than this give nothing that means anything (nvml.h)."""

_ENTRY: Final = "IIqqIIQ"  # nvmlFieldValue_t: id, scope, time, latency, type, return code, value
_UNSIGNED_INT: Final = 1


class Slot:
    """One value of one counter on one device: how it is read now, and its last value."""

    __slots__ = ("_last", "_raw", "counter", "growths", "invalid", "label", "reads", "standing", "way")

    def __init__(self, counter: GpuCounter, value: Value) -> None:
        self.counter = counter
        self.label = value.label
        self.reads = value.reads
        self.way = 0
        self.growths: dict[int, Growth] = {}  # by scope
        self.standing = Standing()
        self.invalid = 0
        self._raw: float | None = None
        self._last: DeviceValue | None = None

    @property
    def name(self) -> str:
        return self.counter.name

    @property
    def how(self) -> Read | None:
        """None once there is no way left."""
        return self.reads[self.way] if self.way < len(self.reads) else None

    @property
    def line(self) -> Link | None:
        return self.counter.link

    def gauge(self, raw: float, times: float) -> DeviceValue | None:
        """The value in its unit; None (counted) for a number that makes no sense. What did not change is the same object."""
        if raw == self._raw and self._last is not None:
            return self._last
        value = raw * times
        most = self.counter.most
        if not math.isfinite(value) or value < 0 or (most is not None and value > most):
            self.invalid += 1
            return None
        self._raw = raw
        self._last = DeviceValue(name=self.counter.name, value=value, label=self.label)
        return self._last

    def standing_count(self, raw: float, times: float, at_unix_ns: int) -> DeviceValue | None:
        """The value of a counter that does not wrap."""
        if raw < 0 or not math.isfinite(raw):
            self.invalid += 1
            return None
        if raw == self._raw and self._last is not None:
            return self._last
        self.standing.follow(raw, at_unix_ns)
        self._raw = raw
        value = raw * times
        self._last = DeviceValue(name=self.counter.name, value=value, label=self.label, start_unix_ns=self.standing.since_unix_ns)
        return self._last

    def grown(self) -> DeviceValue:
        """The value of a counter of bytes that wraps: the sum over its scopes, as old as the youngest of them."""
        growths = self.growths.values()
        total = sum(each.total for each in growths)
        since = max(each.since_unix_ns for each in growths)
        last = self._last
        if last is None or last.value != total or last.start_unix_ns != since:
            last = self._last = DeviceValue(name=self.counter.name, value=total, label=self.label, start_unix_ns=since)
        return last


class Clock(Protocol):
    """Both times, passed in."""

    def mono_ns(self) -> int: ...

    def unix_ns(self) -> int: ...


class GivenUp(Exception):  # noqa: N818 - not a fault: the thread that made the call has been replaced
    """The call came back after somebody else had taken over."""


Guard = Callable[..., Any]
"""Calls a function of NVML with its arguments and returns what it returns; raises ``GivenUp`` where it came back too late."""


def unguarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """For a caller that would wait for ever."""
    return function(*arguments)


class Step:
    """One call. ``gone``: slots that it can no longer serve, with the code; whoever reads it moves them on and empties the list."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slots: list[Slot] = []
        self.gone: list[tuple[Slot, int]] = []
        self.failures = 0  # in a row
        self.resume_ns = 0  # not before this, after a failure that may pass
        self.warm = False  # has returned once
        self.calls = 0
        self.spent_ns = 0
        self.longest_ns = 0

    def read(self, guard: Guard) -> list[DeviceValue]:
        """The values that came. Raises ``GivenUp``, and ``NvmlFailed`` for what may pass or took the device along."""
        try:
            return self._read(guard)
        except (GivenUp, NvmlFailed) as ending:
            if isinstance(ending, GivenUp) or failure(ending.code).meaning is not Meaning.ABSENT:
                raise
            code = ending.code
        except Exception as error:
            code = code_of(error)
            if failure(code).meaning is not Meaning.ABSENT:
                raise NvmlFailed(code) from None
        self.gone += [(slot, code) for slot in self.slots]
        self.slots.clear()
        return []

    def _read(self, guard: Guard) -> list[DeviceValue]:
        raise NotImplementedError

    def due_within_ns(self) -> int | None:
        """How soon a counter of bytes here must be read again so that it cannot wrap twice unseen; None: no matter."""
        return None


class CallStep(Step):
    """One function of the handle; several values may come from one answer."""

    def __init__(self, nvml: Nvml, gpu: Gpu, call: Call) -> None:
        super().__init__(call.function + "".join(f" {each}" for each in call.arguments if each < 1000))
        self.call = (call.function, call.arguments)
        self._function: Callable[..., Any] | None = getattr(nvml, call.function, None)
        self._arguments = (gpu.handle, *call.arguments)

    def _read(self, guard: Guard) -> list[DeviceValue]:
        if self._function is None:
            raise NvmlFailed(BINDING_TOO_OLD)
        answer = guard(self._function, *self._arguments)
        found = []
        for slot in self.slots:
            how = slot.how
            assert isinstance(how, Call)
            raw = getattr(answer, how.attribute) if how.attribute else answer
            if isinstance(raw, list):
                raw = len(raw)
            if how.bit:
                raw = 1 if raw & how.bit else 0
            value = slot.gauge(raw, how.times)
            if value is not None:
                found.append(value)
        return found


class FieldStep(Step):
    """One batch of field values. Each has its own return code, which is looked at before the value is (case F08)."""

    def __init__(self, nvml: Nvml, gpu: Gpu, clock: Clock, name: str) -> None:
        super().__init__(name)
        self._ask = nvml.nvmlDeviceGetFieldValues
        self._gpu = gpu
        self._clock = clock
        self._entries: list[tuple[Slot, Field, int]] = []
        self._ids: list[tuple[int, int]] = []
        self._layout = struct.Struct("=")
        self._known: list[Slot] = []

    def _read(self, guard: Guard) -> list[DeviceValue]:
        if self._known != self.slots:
            self._lay_out()
        if not self._entries:
            return []
        began_ns, at_unix_ns = self._clock.mono_ns(), self._clock.unix_ns()
        answer = guard(self._ask, self._gpu.handle, self._ids)
        ended_ns = self._clock.mono_ns()
        return self._values(self._layout.unpack_from(answer), began_ns, ended_ns, at_unix_ns)

    def _lay_out(self) -> None:
        self._entries = []
        for slot in self.slots:
            how = slot.how
            assert isinstance(how, Field)
            scopes = range(MOST_LINKS) if how.scope == EACH_LINK else (how.scope,)
            self._entries += [(slot, how, scope) for scope in scopes]
        self._settle()

    def _settle(self) -> None:
        self._ids = [(how.id, scope) for _, how, scope in self._entries]
        self._layout = struct.Struct("=" + _ENTRY * len(self._ids))
        self._known = list(self.slots)

    def _values(self, flat: tuple[int, ...], began_ns: int, ended_ns: int, at_unix_ns: int) -> list[DeviceValue]:
        found: list[DeviceValue] = []
        sums: dict[int, Slot] = {}
        refused: list[tuple[int, int]] = []
        for place, (slot, how, scope) in enumerate(self._entries):
            at = 7 * place
            code = flat[at + 5]
            if code:
                refused.append((place, code))
                continue
            raw = decoded(flat[at + 4], flat[at + 6])
            value: DeviceValue | None
            if slot.counter.link is not None and slot.counter.counter.kind is Kind.COUNTER:
                self._grow(slot, how, scope, flat[at + 4], raw, (began_ns, ended_ns, at_unix_ns))
                sums[id(slot)] = slot
                continue
            if slot.counter.counter.kind is Kind.COUNTER:
                value = slot.standing_count(raw, how.times, at_unix_ns)
            else:
                value = slot.gauge(raw, how.times)
            if value is not None:
                found.append(value)
        found += [slot.grown() for slot in sums.values() if slot.growths]
        if refused:
            self._refused(refused)
        return found

    def _grow(self, slot: Slot, how: Field, scope: int, kind: int, raw: float, when: tuple[int, int, int]) -> None:
        growth = slot.growths.get(scope)
        if not isinstance(raw, int) or raw < 0:
            slot.invalid += 1
            return
        if growth is None:
            growth = slot.growths[scope] = Growth(int(how.times), 32 if kind == _UNSIGNED_INT else 0)
        line = self._gpu.pcie_line_bytes if slot.counter.link is Link.PCIE else self._gpu.nvlink_line_bytes
        growth.follow(raw, *when, line)

    def _refused(self, refused: list[tuple[int, int]]) -> None:
        """Entries that failed: those that will never come are not asked for again; a lost device is one, whatever else came."""
        lost = next((code for _, code in refused if failure(code).meaning in (Meaning.DEVICE_LOST, Meaning.SESSION_LOST)), None)
        if lost is not None:
            raise NvmlFailed(lost)
        never = {place: code for place, code in refused if failure(code).meaning is Meaning.ABSENT}
        if not never:
            return
        codes: dict[int, int] = {id(self._entries[place][0]): code for place, code in never.items()}
        self._entries = [entry for place, entry in enumerate(self._entries) if place not in never]
        served = {id(slot) for slot, _, _ in self._entries}
        self.gone += [(slot, codes[id(slot)]) for slot in self.slots if id(slot) not in served]
        self.slots[:] = [slot for slot in self.slots if id(slot) in served]
        self._settle()

    def due_within_ns(self) -> int | None:
        line = {Link.PCIE: self._gpu.pcie_line_bytes, Link.NVLINK: self._gpu.nvlink_line_bytes}
        spans = [
            growth.due_within_ns(line[slot.counter.link])
            for slot in self.slots
            if slot.counter.link is not None
            for growth in slot.growths.values()
        ]
        return min((each for each in spans if each is not None), default=None)


class GpmStep(Step):
    """One window of performance monitoring: from the last sample to this one, so that windows follow each other without holes."""

    def __init__(self, nvml: Nvml, gpu: Gpu, clock: Clock) -> None:
        super().__init__("nvmlGpmSampleGet")
        self._nvml = nvml
        self._gpu = gpu
        self._clock = clock
        self._samples: list[Any] = []
        self._request: Any = None
        self._before_ns: int | None = None
        self._known: list[Slot] = []

    def _read(self, guard: Guard) -> list[DeviceValue]:
        if not self._samples:
            if not guard(self._nvml.nvmlGpmQueryDeviceSupport, self._gpu.handle).isSupportedDevice:
                raise NvmlFailed(3)
            self._samples = [self._nvml.nvmlGpmSampleAlloc(), self._nvml.nvmlGpmSampleAlloc()]
        now, before = self._clock.mono_ns(), self._before_ns
        if before is not None and now - before < GPM_APART_NS:
            return []  # the window goes on
        self._before_ns = None  # until this look has worked
        earlier, later = self._samples
        guard(self._nvml.nvmlGpmSampleGet, self._gpu.handle, later)
        self._samples, self._before_ns = [later, earlier], now
        if before is None:
            return []
        if self._known != self.slots:
            self._ask_for_slots()
        self._request.sample1, self._request.sample2 = earlier, later
        guard(self._nvml.nvmlGpmMetricsGet, self._request)
        return self._values((now - before) / 1e9)

    def _ask_for_slots(self) -> None:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self.slots)
        for place, slot in enumerate(self.slots):
            assert isinstance(slot.how, Gpm)
            request.metrics[place].metricId = slot.how.id
        self._request, self._known = request, list(self.slots)

    def _values(self, window_s: float) -> list[DeviceValue]:
        found = []
        for place, slot in enumerate(self._known):
            metric = self._request.metrics[place]
            if metric.nvmlReturn:
                if failure(metric.nvmlReturn).meaning is Meaning.ABSENT:
                    self.gone.append((slot, metric.nvmlReturn))
                continue
            assert isinstance(slot.how, Gpm)
            value = slot.gauge(metric.value, slot.how.times)
            if value is not None:
                found.append(value)
        if self.gone:
            left = {id(slot) for slot, _ in self.gone}
            self.slots[:] = [slot for slot in self.slots if id(slot) not in left]
        if found:
            found.append(DeviceValue(name=WINDOW.name, value=window_s))
        return found

    def close(self) -> None:
        """Free the buffers; not while a call may still be using them."""
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []


def decoded(kind: int, bits: int) -> float:
    """The number in an nvmlValue_t of this nvmlValueType_t: its 8 bytes as one unsigned number. -1 for a type that is not known."""
    if kind in (2, 3):  # unsigned long, unsigned long long
        return bits
    if kind == _UNSIGNED_INT:
        return bits & 0xFFFF_FFFF
    if kind == 0:
        number: float = struct.unpack("=d", struct.pack("=Q", bits))[0]
        return number
    if kind == 4:
        return bits - (1 << 64) if bits >> 63 else bits
    if kind == 5:
        low = bits & 0xFFFF_FFFF
        return low - (1 << 32) if low >> 31 else low
    return bits & 0xFFFF if kind == 6 else -1
