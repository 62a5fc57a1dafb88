"""Read values with one NVML call: a device function or a batch of field values.

A task belongs to one device. Its call may hang; ``took`` decodes the answer, under the lock of the device's reader.
``took`` returns the values that came and leaves out the others.
A value that will never come moves to the next way of reading it, or to ``absent``.
Tasks run ten times a second for eight GPUs, on caches that went cold in between.
So numbers are taken out of NVML's structures in one go, and unchanged values are not rebuilt.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, Protocol

from handrail.device_counters.gpu import EACH_LINK, MOST_LINKS, LineRateOf, NvmlCall, NvmlField, Pace
from handrail.records.devices import DeviceValue
from handrail.records.quantities import QuantityKind
from handrail_sidecar.gpu.devices import GpuDevice, Nvml
from handrail_sidecar.gpu.failures import BINDING_TOO_OLD, Meaning, NvmlFailed, code_of, failure
from handrail_sidecar.gpu.monotonic import Growth
from handrail_sidecar.gpu.values import UNSIGNED_INT, Slot, decoded
from handrail_sidecar.sampling.worker import Task

FIRST_CALL_NS: Final = 1_000_000_000
"""Limit of the first call of a task: a driver may have to wake a GPU for it."""

_WHOLE_NS: Final = 1_000_000_000
_ENTRY: Final = "24xIIQ"  # nvmlFieldValue_t from its type on: type, return code, value


class SamplerClock(Protocol):
    """Monotonic and Unix clock, passed in."""

    def mono_ns(self) -> int: ...

    def unix_ns(self) -> int: ...


class NvmlTask(Task):
    """One NVML call that is repeated, and the slots that it fills.

    ``gone``: slots that it can no longer serve, with the code; its reader moves them on and empties the list.
    The reader sets ``pace`` and the period, and the usual limit after the first call.
    """

    __slots__ = ("calls", "failures", "gone", "gpu", "longest_ns", "name", "pace", "read_ns", "slots", "spent_ns")

    def __init__(self, gpu: GpuDevice, name: str) -> None:
        super().__init__(device=str(gpu.device.index), period_ns=_WHOLE_NS, limit_ns=FIRST_CALL_NS)
        self.gpu = gpu
        self.name = name
        self.pace = Pace.TICK
        self.slots: list[Slot] = []
        self.gone: list[tuple[Slot, int]] = []
        self.failures = 0  # in a row
        self.calls = 0  # calls that returned
        self.read_ns = 0  # when the last call began, monotonic
        self.spent_ns = 0
        self.longest_ns = 0

    def values(self, answer: Any, began_ns: int, ended_ns: int, at_unix_ns: int) -> list[DeviceValue]:
        """Return the values in an answer; the list must not be changed.

        ``began_ns``, ``ended_ns``: of its call, monotonic. ``at_unix_ns``: when that began.
        Raises ``NvmlFailed`` when the answer itself reports a failure.
        """
        raise NotImplementedError

    def took(self, answer: Any, began_ns: int, ended_ns: int, at_unix_ns: int) -> list[DeviceValue]:
        """Count the call and return its ``values``.

        An exception as answer is what the call raised, and is raised again.
        """
        if answer is None:
            return []
        if isinstance(answer, Exception):
            raise answer
        took_ns = ended_ns - began_ns
        self.calls += 1
        self.read_ns = began_ns
        self.spent_ns += took_ns
        if took_ns > self.longest_ns:
            self.longest_ns = took_ns
        return self.values(answer, began_ns, ended_ns, at_unix_ns)

    def due_within_ns(self) -> int | None:
        """Return how soon to read again so that no byte counter wraps twice unseen.

        None means that it does not matter.
        """
        return None

    def close(self) -> None:
        """Release what NVML lent; no call may still be using it."""

    def failed(self, error: Exception) -> None:
        """Handle a call that raised: move its slots on, or raise what the error means."""
        code = code_of(error)
        if failure(code).meaning is not Meaning.ABSENT:
            raise NvmlFailed(code) from None
        self.gone += [(slot, code) for slot in self.slots]
        self.slots.clear()


class CallTask(NvmlTask):
    """One function of the handle; several values may come from one answer."""

    __slots__ = (
        "_active",
        "_answer",
        "_ask",
        "_attributes",
        "_bits",
        "_of",
        "_only",
        "_seldom",
        "_values",
        "_whole_ns",
        "function",
    )

    def __init__(self, nvml: Nvml, gpu: GpuDevice, call: NvmlCall) -> None:
        super().__init__(gpu, call.function + "".join(f" {each}" for each in call.arguments if each < 1000))
        self.function = (call.function, call.arguments)
        function = getattr(nvml, call.function, None)
        self._ask = partial(function, gpu.handle, *call.arguments) if function is not None else _not_in_binding
        self._attributes: Callable[[Any], Any] | None = None
        self._of = 0  # number of slots that the layout is made for
        self._answer: Any = None  # the answer that the values belong to
        self._values: list[DeviceValue] = []
        self._bits: list[int] = []
        self._seldom = False
        self._only: Slot | None = None  # the only slot, when the answer is one number
        self._whole_ns = -_WHOLE_NS  # when all were last reported
        self._active: list[DeviceValue] = []  # the rarely reported ones that were not 0 at the last look

    def call(self) -> Any:
        return self._ask()

    def values(self, answer: Any, began_ns: int, ended_ns: int, at_unix_ns: int) -> list[DeviceValue]:
        if not self.slots:
            return []  # it has failed for good in the meantime
        if self._of != len(self.slots):
            self._lay_out()
        if self._attributes is not None:
            answer = self._attributes(answer)  # a tuple when there are several attributes
        elif isinstance(answer, list):
            answer = len(answer)
        if answer == self._answer and not self._seldom:
            return self._values
        return self._rarely_reported(answer, began_ns) if self._seldom else self._value(answer)

    def _value(self, answer: Any) -> list[DeviceValue]:
        self._answer = answer
        if self._only is not None:
            value = self._only.gauge(answer)
            self._values = [] if value is None else [value]
            return self._values
        raw: Sequence[float] = answer if isinstance(answer, tuple) else (answer,) * len(self.slots)
        if self._bits:
            raw = [bool(int(of) & bit) if bit else of for of, bit in zip(raw, self._bits, strict=True)]
        self._values = [value for slot, of in zip(self.slots, raw, strict=True) if (value := slot.gauge(of)) is not None]
        return self._values

    def _rarely_reported(self, answer: Any, began_ns: int) -> list[DeviceValue]:
        """Return all values once a second, otherwise those not 0 or just become 0."""
        before = self._values
        changed = answer != self._answer
        values = self._value(answer) if changed else before
        if began_ns - self._whole_ns >= _WHOLE_NS:
            self._whole_ns, self._active = began_ns, [each for each in values if each.value]
            return values
        if changed:
            was = {each.label for each in self._active}
            reports = [each for each in values if each.value or each.label in was]
            self._active = [each for each in values if each.value]
            return reports
        return self._active

    def _lay_out(self) -> None:
        named = [slot.how.attribute for slot in self.slots if isinstance(slot.how, NvmlCall)]
        self._attributes = attrgetter(*named) if all(named) else None
        bits = [slot.how.bit for slot in self.slots if isinstance(slot.how, NvmlCall)]
        self._bits = bits if any(bits) else []
        self._seldom = all(slot.counter.seldom for slot in self.slots)
        self._of, self._answer = len(self.slots), None
        self._only = self.slots[0] if len(self.slots) == 1 and not self._bits else None


class _Entry:
    """One field value of a batch.

    ``line``: for a byte counter, what its link can carry (bytes per second and direction); otherwise 0.
    """

    __slots__ = ("bits", "growth", "how", "line", "scope", "slot", "stands", "value")

    def __init__(self, slot: Slot, how: NvmlField, scope: int, gpu: GpuDevice) -> None:
        counter = slot.counter
        self.slot = slot
        self.how = how
        self.scope = scope
        self.stands = counter.counter.kind is QuantityKind.COUNTER
        self.line = {LineRateOf.PCIE: gpu.pcie_line_bytes, LineRateOf.NVLINK: gpu.nvlink_line_bytes}.get(counter.link, 0.0)  # type: ignore[arg-type]
        self.growth = slot.growths.get(scope)
        self.bits = -1  # the last raw value
        self.value: DeviceValue | None = None

    def decode(self, kind: int, bits: int, at_unix_ns: int) -> DeviceValue | None:
        """Decode a value that changed since the last look."""
        raw = decoded(kind, bits)
        self.value = self.slot.standing_count(raw, at_unix_ns) if self.stands else self.slot.gauge(raw)
        self.bits = bits
        return self.value

    def grow(self, kind: int, bits: int, began_ns: int, ended_ns: int, at_unix_ns: int) -> None:
        raw = bits if kind in (2, 3) else decoded(kind, bits)
        if not isinstance(raw, int) or raw < 0:
            self.slot.invalid += 1
            return
        growth = self.growth
        if growth is None:
            growth = self.growth = self.slot.growths[self.scope] = Growth(self.how.times, 32 if kind == UNSIGNED_INT else 0)
        growth.follow(raw, began_ns, ended_ns, at_unix_ns, self.line)


class FieldTask(NvmlTask):
    """One batch of field values.

    Each value has its own return code, which is checked before the value is read (case F08).
    ``nvmlDeviceGetFieldValues`` builds a new array in Python at each call: 8.6 us for ten fields; reusing one array takes 0.5 us
    (measured here, with the double). So its inner look-up is used when the binding has it.
    """

    __slots__ = ("_array", "_entries", "_inner", "_layout", "_nvml", "_of", "single")

    def __init__(self, nvml: Nvml, gpu: GpuDevice, name: str, *, single: bool = False) -> None:
        super().__init__(gpu, name)
        self.single = single  # one field of a batch that hung, read alone
        self._nvml = nvml
        self._of: list[Slot] = []  # the slots that the entries are made for
        self._entries: list[_Entry] = []
        self._layout = struct.Struct("=")
        self._array: Any = None
        self._inner: Callable[[], int] | None = None  # fills the array

    def call(self) -> tuple[list[_Entry], tuple[int, ...]] | None:
        slots = self.slots
        if self._of != slots:
            slots = list(slots)  # another thread may move some of them
            self._lay_out([_Entry(*each, self.gpu) for slot in slots for each in _scopes(slot)], slots)
        if not self._entries:
            return None
        entries, layout = self._entries, self._layout
        if self._inner is None:
            self._array = self._nvml.nvmlDeviceGetFieldValues(self.gpu.handle, [(each.how.id, each.scope) for each in entries])
        elif code := self._inner():
            raise NvmlFailed(code)
        return entries, layout.unpack_from(self._array)

    def values(self, answer: Any, began_ns: int, ended_ns: int, at_unix_ns: int) -> list[DeviceValue]:
        entries, numbers = answer
        stale = entries is not self._entries
        flat = iter(numbers)
        found: list[DeviceValue] = []
        refused: list[tuple[_Entry, int]] = []
        growing: dict[int, Slot] = {}
        for entry, kind, code, bits in zip(entries, flat, flat, flat, strict=True):
            if stale and entry.slot.how is not entry.how:
                continue  # another task reads it now
            if code:
                refused.append((entry, code))
            elif entry.line:
                entry.grow(kind, bits, began_ns, ended_ns, at_unix_ns)
            else:
                value = entry.value if bits == entry.bits else entry.decode(kind, bits, at_unix_ns)
                if value is not None:
                    found.append(value)
            if entry.line and entry.slot.growths:
                growing[id(entry.slot)] = entry.slot
        found += [slot.grown() for slot in growing.values()]
        if refused:
            self._refused(entries, refused)
        return found

    def _lay_out(self, entries: list[_Entry], slots: list[Slot]) -> None:
        self._of, self._entries = slots, entries
        self._layout = struct.Struct("=" + _ENTRY * len(entries))
        pointer = getattr(self._nvml, "_nvmlGetFunctionPointer", None)
        if pointer is not None and entries:
            self._array = (self._nvml.c_nvmlFieldValue_t * len(entries))()
            for value, entry in zip(self._array, entries, strict=True):
                value.fieldId, value.scopeId = entry.how.id, entry.scope
            count = ctypes.c_int32(len(entries))
            self._inner = partial(pointer("nvmlDeviceGetFieldValues"), self.gpu.handle, count, ctypes.byref(self._array))

    def _refused(self, entries: list[_Entry], refused: list[tuple[_Entry, int]]) -> None:
        """Handle entries that failed.

        Entries that will never come are not requested again. A lost device raises ``NvmlFailed``, whatever else came.
        """
        lost = [code for _, code in refused if failure(code).meaning in (Meaning.DEVICE_LOST, Meaning.SESSION_LOST)]
        if lost:
            raise NvmlFailed(lost[0])
        never = {id(entry): code for entry, code in refused if failure(code).meaning is Meaning.ABSENT}
        if not never:
            return
        codes = {id(entry.slot): never[id(entry)] for entry, _ in refused if id(entry) in never}
        left = [entry for entry in entries if id(entry) not in never]
        served = {id(entry.slot) for entry in left}
        gone = [slot for slot in self.slots if id(slot) in codes and id(slot) not in served]
        as_planned = entries is self._entries and self._of == self.slots
        self.gone += [(slot, codes[id(slot)]) for slot in gone]
        self.slots[:] = [slot for slot in self.slots if slot not in gone]
        if as_planned:  # otherwise the next request is built from the slots left then
            self._lay_out(left, list(self.slots))

    def due_within_ns(self) -> int | None:
        spans = [
            entry.slot.growths[entry.scope].due_within_ns(entry.line)
            for entry in self._entries
            if entry.line and entry.scope in entry.slot.growths
        ]
        return min((each for each in spans if each is not None), default=None)


def _not_in_binding() -> Any:
    raise NvmlFailed(BINDING_TOO_OLD)


def _scopes(slot: Slot) -> list[tuple[Slot, NvmlField, int]]:
    how = slot.how
    assert isinstance(how, NvmlField)
    return [(slot, how, scope) for scope in (range(MOST_LINKS) if how.scope == EACH_LINK else (how.scope,))]
