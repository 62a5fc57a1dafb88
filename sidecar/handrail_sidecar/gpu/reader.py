"""Decide what to read from one device and when, and build its samples.

It holds the device's tasks and the values that turned out to be absent.
It starts no threads: workers make the calls (``sampling/worker.py``; the tests do it in virtual time).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import Final

from handrail import conventions as names
from handrail.device_counters.gpu import BY_NAME, COUNTERS, NVLINK_LINE, PCIE_LINE, LineRateOf, NvmlCall, NvmlField, Pace, Read
from handrail.records import Process, Source
from handrail.records.devices import DeviceSample, DeviceValue
from handrail_sidecar.gpu.cross_check import Agreement
from handrail_sidecar.gpu.devices import GpuDevice, Nvml
from handrail_sidecar.gpu.failures import Meaning, NvmlFailed, failure
from handrail_sidecar.gpu.gpm import GpmTask
from handrail_sidecar.gpu.nvml_calls import FIRST_CALL_NS, CallTask, FieldTask, NvmlTask, SamplerClock
from handrail_sidecar.gpu.state import SamplerStats
from handrail_sidecar.gpu.values import Slot
from handrail_sidecar.sampling.worker import Reading

log = logging.getLogger(__name__)

_S: Final = 1_000_000_000
_APART_NS: Final = 100_000_000  # samples of performance monitoring must lie further apart than this (nvml.h)
_WINDOWS_A_SECOND: Final = 20
"""Most windows per second for all devices together, at 10 Hz and slower.

Windows are the most expensive part of sampling: calls that wait leave cold caches.
"""

_LEAST_PERIOD_NS: Final = 5_000_000
_SELDOM: Final = 0xFF  # calls between two checks of whether a counter must be read often
_LEAST_LIMIT_NS: Final = 20_000_000
_LONGEST_PAUSE_NS: Final = 60_000_000_000
_FIRST_PAUSE_NS: Final = 1_000_000_000
_RETRIES_AT_ONCE: Final = 2
_SNAPSHOTS: Final = "snapshots"  # the group of calls that block by design
_PERIODS: Final = {Pace.SECOND: _S, Pace.RARE: 10 * _S, Pace.SNAPSHOT: _S}

_FINER: Final = {names.GPU_BUSY: names.GPU_SM_ACTIVE, "memory_busy_ratio": names.GPU_DRAM_ACTIVE}
"""Values that the driver averages over 1/6 to 1 s, and their finer counterparts.

The finer value is preferred where performance monitoring is available.
"""

Key = tuple[str, str]
"""Name and label of a value."""


def window_ns(tick_ns: int, together: int) -> int:
    """Return the length of a window of performance monitoring, in whole ticks.

    ``together``: number of devices that are sampled together.
    """
    ticks = _APART_NS // tick_ns + 1
    if tick_ns >= _APART_NS:  # a rate above 10 Hz is for a short look, and costs more
        ticks = max(ticks, -(-together * _S // (_WINDOWS_A_SECOND * tick_ns)))
    return ticks * tick_ns


class DeviceReader:
    """Reader of one GPU or MIG device, of ``together`` devices that are sampled.

    ``tasks``: its calls. ``absent``: the return code for each value that the device does not provide.
    ``lost``: the return code with which the device was lost, or 0.
    ``update`` takes the tasks that are new and those that are no longer made.
    """

    def __init__(
        self,
        nvml: Nvml,
        gpu: GpuDevice,
        clock: SamplerClock,
        process: Process,
        period_ns: int,
        without: Collection[str] = (),
        *,
        together: int = 1,
        stats: SamplerStats | None = None,
        update: Callable[[Sequence[NvmlTask], Sequence[NvmlTask]], None] = lambda new, gone: None,
    ) -> None:
        self.gpu = gpu
        self.tasks: list[NvmlTask] = []
        self.absent: dict[Key, int] = {}
        self.lost = 0
        self.slots: list[Slot] = []
        self.counted: Callable[[], list[DeviceValue]] = list  # values counted elsewhere, reported with the rare ones
        self._nvml = nvml
        self._clock = clock
        self._process = process
        self._stats = stats if stats is not None else SamplerStats()
        self._update = update
        self._tick_ns = period_ns
        self._window_ns = window_ns(period_ns, together)
        self._lock = Lock()  # guards the tasks and their slots: several threads may read the device
        rows = [row for row in COUNTERS if row.name not in without and (row.on_mig or not gpu.is_mig)]
        self._later = [row for row in rows if row.only_without]
        for row in rows:
            if not row.only_without:
                self._add(row.name)
        self._agreement = Agreement(self.slots)
        by_name = {slot.name: slot for slot in self.slots}
        self._coarse = [
            (slot, by_name[_FINER[slot.name]]) for slot in self.slots if slot.name in _FINER and _FINER[slot.name] in by_name
        ]

    @property
    def wanted(self) -> set[str]:
        """Names of the counters that the reader looks for."""
        return {slot.name for slot in self.slots}

    def take(self, readings: Sequence[Reading]) -> DeviceSample | None:
        """Decode what was read from the device at one wake; None when no value came.

        Sets ``lost`` when the device is lost.
        """
        unix_offset_ns = self._clock.unix_ns() - self._clock.mono_ns()
        values: list[DeviceValue] = []
        with self._lock:
            before = list(self.tasks)
            taken = [reading for reading in readings if reading.task in before]  # the others were replaced meanwhile
            for reading in taken:
                if not self.lost:
                    self._decode(reading, unix_offset_ns, values)
            self._settle([reading.task for reading in taken])
            if any(reading.task.pace is Pace.RARE for reading in taken):
                values += [*self.counted(), *self.lines()]
            self._changed(before)
        first, last = readings[0], readings[-1]
        if not values:
            return None
        return DeviceSample(
            process=self._process,
            source=Source.NVML,
            device=self.gpu.device,
            at_unix_ns=first.began_ns + unix_offset_ns,
            values=tuple(values),
            took_ns=last.ended_ns - first.began_ns,
        )

    def split(self, task: NvmlTask) -> None:
        """Replace a batch that hangs by one task per field; one of them hangs."""
        with self._lock:
            if not isinstance(task, FieldTask) or len(task.slots) < 2 or task not in self.tasks:
                return
            before = list(self.tasks)
            self.tasks.remove(task)
            for slot in task.slots:
                name = f"field {slot.how.id}" if isinstance(slot.how, NvmlField) else ""
                part = self._add_task(FieldTask(self._nvml, self.gpu, name, single=True), task.pace)
                part.limit_ns = self._limit_ns(task.pace)  # not the first call of its field
                part.slots.append(slot)
            self._changed(before)

    def join_fields(self) -> None:
        """Read single fields as one batch again, except those that hang."""
        with self._lock:
            before = list(self.tasks)
            for task in before:
                alone = task.worker is not None and task.worker.alone is task
                if isinstance(task, FieldTask) and task.single and not alone:
                    self.tasks.remove(task)
                    for slot in task.slots:
                        self._place(slot).limit_ns = self._limit_ns(slot.pace)  # not the first call of its fields
            self._changed(before)

    def _changed(self, before: Sequence[NvmlTask]) -> None:
        self.tasks[:] = [task for task in self.tasks if task.slots]
        if self.tasks != before:
            self._update([task for task in self.tasks if task not in before], [task for task in before if task not in self.tasks])

    def _decode(self, reading: Reading, unix_offset_ns: int, values: list[DeviceValue]) -> None:
        task: NvmlTask = reading.task
        if not task.calls:
            task.limit_ns = self._limit_ns(task.pace)
        try:
            values += task.took(reading.answer, reading.began_ns, reading.ended_ns, reading.began_ns + unix_offset_ns)
            task.failures = 0
        except Exception as error:  # one call must not hide the others
            self._failed(task, error)

    def _failed(self, task: NvmlTask, error: Exception) -> None:
        """Handle a failed call: its values move on, it is retried later, or all is lost."""
        try:
            task.failed(error)
        except NvmlFailed as problem:
            self._stats.failures[problem.code] += 1
            if failure(problem.code).meaning is Meaning.RETRY:
                self._pause(task)
            else:
                self.lost = problem.code
        except Exception:  # an error of ours in one call must not end the reading of the others
            self._stats.faults += 1
            if self._stats.faults == 1:
                log.exception("reading a GPU counter failed: %s", task.name)
            self._pause(task)

    def _pause(self, task: NvmlTask) -> None:
        """Retry after a failure that may pass: at once at first, then with growing pauses."""
        task.failures += 1
        if task.failures > _RETRIES_AT_ONCE:
            pause_ns = _FIRST_PAUSE_NS << min(task.failures - _RETRIES_AT_ONCE - 1, 10)
            task.next_ns = max(task.next_ns, self._clock.mono_ns() + min(pause_ns, _LONGEST_PAUSE_NS))

    def _settle(self, tasks: Sequence[NvmlTask]) -> None:
        """Finish a round: move values that a task cannot serve to their next way.

        Byte counters that can wait join the tick; others may have to be read more often.
        """
        join = False
        for task in tasks:
            if isinstance(task, GpmTask) and task.fresh_s:
                join |= self._compare(task)
            gone, task.gone = task.gone, []
            for slot, code in gone:
                self._move_on(slot, code)
            join |= bool(gone) and task.pace is Pace.WINDOW
        if join:
            self._join_windows()  # a rate that has become absent is replaced by its count
        for task in tasks:
            if isinstance(task, FieldTask) and (task.pace is Pace.BYTES or task.calls & _SELDOM == 1):
                self._set_period(task)

    def _set_period(self, task: FieldTask) -> None:
        due_ns = task.due_within_ns()
        if task.pace is Pace.BYTES and not self._in_haste(task, due_ns):
            for slot in list(task.slots):
                self._move(slot, Pace.TICK)
        period_ns = self._period_ns(task.pace)
        if due_ns is not None:
            period_ns = max(_LEAST_PERIOD_NS, min(period_ns, due_ns))
        if period_ns != task.period_ns:
            task.period_ns = period_ns
            task.plan(self._clock.mono_ns())

    def _compare(self, task: GpmTask) -> bool:
        """Move on values that wrongly stay at 0; return whether a comparison was made.

        They are handled like values that the device does not provide.
        """
        span_s, task.fresh_s = task.fresh_s, 0.0
        not_believed = self._agreement.window(span_s)
        for slot, code in not_believed or ():
            holder = self._holder(slot)
            if holder is not None:
                holder.slots.remove(slot)
                self._move_on(slot, code)
        return not_believed is not None

    def _join_windows(self) -> None:
        """Choose the pace of byte counters and coarse values.

        Bytes whose rate performance monitoring reports are read with the window, others at every tick.
        They are by far the most expensive fields (0.2 to 0.4 ms each, ``tests/nvml/measured.py``), and a total loses nothing.
        A driver average with a finer value from performance monitoring is read once a second.
        """
        for slot, rated in self._agreement.counts():
            if slot.pace is not Pace.BYTES:
                self._move(slot, Pace.WINDOW if rated and not self._turns_within(slot, self._window_ns) else Pace.TICK)
        for slot, finer in self._coarse:
            self._move(slot, Pace.SECOND if finer.how is not None and finer.last is not None else Pace.WINDOW)

    def _move(self, slot: Slot, pace: Pace) -> None:
        """Read a slot at another pace from now on, unless it is read singly since it hung."""
        task = self._holder(slot) if slot.pace is not pace else None
        if task is None or (isinstance(task, FieldTask) and task.single):
            return
        task.slots.remove(slot)
        slot.pace = pace
        placed = self._place(slot)
        placed.read_ns = placed.read_ns or task.read_ns  # a new task has read nothing yet, but its values are not old

    def _holder(self, slot: Slot) -> NvmlTask | None:
        return next((task for task in self.tasks if slot in task.slots), None)

    def _turns_within(self, slot: Slot, span_ns: int) -> bool:
        line = self.gpu.pcie_line_bytes if slot.counter.link is LineRateOf.PCIE else self.gpu.nvlink_line_bytes
        spans = [growth.due_within_ns(line) for growth in slot.growths.values()]
        return not spans or any(span is not None and span < span_ns for span in spans)

    def _in_haste(self, task: FieldTask, due_ns: int | None) -> bool:
        if any(slot.counter.link is not None and not slot.growths for slot in task.slots):
            return True  # not read yet, so its width is unknown
        return due_ns is not None and due_ns < self._tick_ns

    def lines(self) -> list[DeviceValue]:
        """Return what the device's links can carry, where it is known."""
        lines = []
        if self.gpu.pcie_known:
            lines.append(DeviceValue(name=PCIE_LINE.name, value=self.gpu.pcie_line_bytes))
        if self.gpu.nvlink_known:
            lines.append(DeviceValue(name=NVLINK_LINE.name, value=self.gpu.nvlink_line_bytes))
        return lines

    def _add(self, name: str) -> None:
        for value in BY_NAME[name].values:
            slot = Slot(BY_NAME[name], value)
            self.slots.append(slot)
            self._place(slot)

    def _move_on(self, slot: Slot, code: int) -> None:
        if slot.move_on():
            self._place(slot)
            return
        self.absent[slot.name, slot.label] = code
        for row in [row for row in self._later if row.only_without == slot.name]:
            if all((slot.name, value.label) in self.absent for value in BY_NAME[slot.name].values):
                self._later.remove(row)
                self._add(row.name)

    def _place(self, slot: Slot) -> NvmlTask:
        """Put a slot into the task that reads it in its present way."""
        how = slot.how
        assert how is not None
        for task in self.tasks:
            if task.pace is slot.pace and _serves(task, how):
                break
        else:
            task = self._add_task(self._task(how, slot.pace), slot.pace)
        task.slots.append(slot)
        return task

    def _task(self, how: Read, pace: Pace) -> NvmlTask:
        if isinstance(how, NvmlCall):
            return CallTask(self._nvml, self.gpu, how)
        if isinstance(how, NvmlField):
            return FieldTask(self._nvml, self.gpu, f"fields {pace.value}")
        return GpmTask(self._nvml, self.gpu, self._clock)

    def _add_task(self, task: NvmlTask, pace: Pace) -> NvmlTask:
        task.pace, task.period_ns = pace, self._period_ns(pace)
        task.group = _SNAPSHOTS if pace is Pace.SNAPSHOT else ""
        self.tasks.append(task)
        return task

    def _period_ns(self, pace: Pace) -> int:
        return self._window_ns if pace is Pace.WINDOW else max(_PERIODS.get(pace, 0), self._tick_ns)

    def _limit_ns(self, pace: Pace) -> int:
        return FIRST_CALL_NS if pace is Pace.SNAPSHOT else _call_limit_ns(self._tick_ns)


def _call_limit_ns(period_ns: int) -> int:
    """Return how long one call may take before the others go on without it."""
    return min(max(period_ns // 2, _LEAST_LIMIT_NS), FIRST_CALL_NS)


def _serves(task: NvmlTask, how: Read) -> bool:
    if isinstance(how, NvmlCall):
        return isinstance(task, CallTask) and task.function == (how.function, how.arguments)
    if isinstance(how, NvmlField):
        return isinstance(task, FieldTask) and not task.single
    return isinstance(task, GpmTask)
