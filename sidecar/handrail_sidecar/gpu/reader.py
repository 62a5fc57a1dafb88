"""Decide what to read from one device and when, and build its samples.

It holds the steps by pace and the values that turned out to be absent.
It starts no threads: the holder of a job reads its steps in order (``worker.py``; the tests do it in virtual time).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import Any, Final

from handrail import conventions as names
from handrail.device_counters.gpu import BY_NAME, COUNTERS, NVLINK_LINE, PCIE_LINE, LineRateOf, NvmlCall, NvmlField, Pace, Read
from handrail.records import Process, Source
from handrail.records.devices import DeviceSample, DeviceValue
from handrail_sidecar.gpu.cross_check import Agreement
from handrail_sidecar.gpu.devices import GpuDevice, Nvml
from handrail_sidecar.gpu.steps import CallStep, FieldStep, NvmlStep, SamplerClock
from handrail_sidecar.gpu.values import Slot
from handrail_sidecar.gpu.window import GpmStep

_S: Final = 1_000_000_000
_APART_NS: Final = 100_000_000  # samples of performance monitoring must lie further apart than this (nvml.h)
_WINDOWS_A_SECOND: Final = 20
"""Most windows per second for all devices together, at 10 Hz and slower.

Windows are the most expensive part of sampling: calls that wait leave cold caches.
A window of eight GPUs costs the thread 0.8 ms to read and 0.4 ms to report; a tick without one takes 0.5 ms
(measured with the test double).
"""

_LEAST_PERIOD_NS: Final = 5_000_000
_SELDOM: Final = 0xFF  # rounds between two checks of whether a counter must be read often
_NEW_ROUNDS: Final = 2
_PERIODS: Final = {Pace.SECOND: _S, Pace.RARE: 10 * _S, Pace.SNAPSHOT: _S}

_FINER: Final = {names.GPU_BUSY: names.GPU_SM_ACTIVE, "memory_busy_ratio": names.GPU_DRAM_ACTIVE}
"""Values that the driver averages over 1/6 to 1 s, and their finer counterparts.

The finer value is preferred where performance monitoring is available.
"""

Key = tuple[str, str]
"""Name and label of a value."""


class Laid:
    """Steps in reading order: the call of each, followed by the clock."""

    __slots__ = ("calls", "steps")

    def __init__(self, steps: Sequence[NvmlStep], mono_ns: Callable[[], int]) -> None:
        self.steps = list(steps)
        self.calls: list[Callable[[], Any]] = []
        for step in steps:
            self.calls += (step.asking(), mono_ns)


class ReadingJob:
    """Steps of one device that are read together.

    ``next_ns``: when they are due, monotonic. ``paused_ns``: before it, a step must not be read after a temporary failure.
    """

    __slots__ = ("_base_ns", "_laid", "_rounds", "isolated", "next_ns", "pace", "paused_ns", "period_ns", "reader", "steps")

    def __init__(self, reader: DeviceReader, pace: Pace, period_ns: int) -> None:
        self.reader = reader
        self.pace = pace
        self.steps: list[NvmlStep] = []
        self.next_ns = 0
        self.isolated = False  # holds one step that hung, in a thread of its own
        self.period_ns = period_ns  # the pace's, or shorter when a counter would wrap unseen
        self.paused_ns = 0
        self._base_ns = period_ns
        self._laid = Laid((), int)
        self._rounds = 0

    @property
    def index(self) -> int | None:
        """NVML's index of the GPU."""
        return self.reader.gpu.device.index

    @property
    def is_new(self) -> bool:
        """Whether it may still turn out what the device does not provide.

        A window takes two rounds.
        """
        return self._rounds < _NEW_ROUNDS

    def laid_out(self, now_ns: int, mono_ns: Callable[[], int]) -> Laid:
        """Return the calls to make now.

        The list is rebuilt only when the steps change: 30 steps took 0.1 ms, ten times a second.
        """
        if now_ns < self.paused_ns:
            return Laid([step for step in tuple(self.steps) if step.resume_ns <= now_ns], mono_ns)
        if self._laid.steps != self.steps:
            self._laid = Laid(tuple(self.steps), mono_ns)
        return self._laid

    def alone(self, step: NvmlStep) -> ReadingJob:
        """Return a job of the same pace for one step that was taken out of this one."""
        job = ReadingJob(self.reader, self.pace, self._base_ns)
        job.steps.append(step)
        job.isolated = True
        return job

    def add(self, steps: Sequence[NvmlStep]) -> None:
        """Add steps, which may come from another thread."""
        with self.reader.lock:
            self.steps += steps

    def remove(self, step: NvmlStep) -> bool:
        """Remove a step; return False when another step serves its values by now."""
        with self.reader.lock:
            if step not in self.steps:
                return False
            self.steps.remove(step)
            return True

    def plan_next(self, now_ns: int) -> int:
        """Plan the next round after the one due at ``next_ns``; return the periods missed.

        Missed periods are not made up for.
        """
        self._rounds += 1
        if self.pace is Pace.BYTES or self._rounds & _SELDOM == 1:
            due = [each for each in (step.due_within_ns() for step in self.steps) if each is not None]
            self.period_ns = max(_LEAST_PERIOD_NS, min([self._base_ns, *due]))
        period, due_ns = self.period_ns, self.next_ns or now_ns
        late = max(0, (now_ns - due_ns) // period)
        self.next_ns = due_ns + (late + 1) * period
        return late

    def begin_at(self, now_ns: int) -> None:
        """Set the first due time."""
        self.next_ns = self.next_ns or now_ns


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

    ``jobs`` is by pace. ``absent``: the return code for each value that the device does not provide.
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
    ) -> None:
        self.gpu = gpu
        self.absent: dict[Key, int] = {}
        self.slots: list[Slot] = []
        self.counted: Callable[[], list[DeviceValue]] = list  # values counted elsewhere, reported with the rare ones
        self.jobs: dict[Pace, ReadingJob] = {}
        self._nvml = nvml
        self._clock = clock
        self._process = process
        self._tick_ns = period_ns
        self._window_ns = window_ns(period_ns, together)
        self.lock = Lock()  # guards the lists of steps, which several threads may read
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

    def lane_jobs(self) -> list[ReadingJob]:
        """Return the jobs that the device's own lane reads."""
        return [job for job in self.jobs.values() if job.steps and job.pace is not Pace.SNAPSHOT]

    def settle(self, job: ReadingJob) -> bool:
        """Finish a round: move values that a step cannot serve to their next way.

        Byte counters that can wait join the tick.
        Returns True when the device's jobs have changed.
        """
        changed = False
        if job.pace is Pace.WINDOW:
            changed = self._compare(job)
        for step in list(job.steps):
            if step.gone:
                moved, step.gone = step.gone, []
                for slot, code in moved:
                    self._move_on(slot, code)
                changed = True
        if changed and job.pace is Pace.WINDOW and not job.isolated:
            self._join_windows(job.period_ns)  # a rate that has become absent is replaced by its count
        if job.pace is Pace.BYTES and not job.isolated and not any(map(self._in_haste, job.steps)):
            self._join_tick(job)
            changed = True
        if changed:
            with self.lock:
                for each in (job, *self.jobs.values()):
                    each.steps[:] = [step for step in each.steps if step.slots or step.gone]
        return changed

    def split(self, step: NvmlStep) -> list[NvmlStep]:
        """Split a batch that hung into one step per field; one of them hangs.

        Returns [] when there is nothing to split.
        """
        if not isinstance(step, FieldStep) or len(step.slots) < 2:
            return []
        parts = []
        for slot in step.slots:
            part = FieldStep(self._nvml, self.gpu, f"field {slot.how.id}" if isinstance(slot.how, NvmlField) else "")
            part.slots.append(slot)
            part.warm = True
            parts.append(part)
        return list(parts)

    def take_back(self, job: ReadingJob, steps: Sequence[NvmlStep]) -> None:
        """Put steps that work again back into the job that they were taken from.

        Fields become one batch again.
        """
        with self.lock:
            fields = [step for step in (*job.steps, *steps) if isinstance(step, FieldStep)]
            others = [step for step in (*job.steps, *steps) if not isinstance(step, FieldStep)]
            if len(fields) > 1:
                batch = FieldStep(self._nvml, self.gpu, f"fields {job.pace.value}")
                batch.slots = [slot for step in fields for slot in step.slots]
                batch.gone = [each for step in fields for each in step.gone]
                batch.warm = True
                fields = [batch]
            job.steps[:] = [*others, *fields]

    def seldom(self) -> list[DeviceValue]:
        """Return the values that need no call: counted elsewhere, and link capacities.

        They are reported with the rare counters.
        """
        return [*self.counted(), *self.lines()]

    def sample(self, values: list[DeviceValue], at_unix_ns: int, took_ns: int) -> DeviceSample:
        """Build the record of what the device reported at one wake."""
        return DeviceSample(
            process=self._process,
            source=Source.NVML,
            device=self.gpu.device,
            at_unix_ns=at_unix_ns,
            values=tuple(values),
            took_ns=took_ns,
        )

    def _compare(self, job: ReadingJob) -> bool:
        """Move on values that wrongly stay at 0; return whether other values moved.

        They are handled like values that the device does not provide.
        """
        moved = False
        for step in tuple(job.steps):
            if isinstance(step, GpmStep) and step.fresh_s:
                window_s, step.fresh_s = step.fresh_s, 0.0
                not_believed = self._agreement.window(window_s)
                for slot, code in not_believed or ():
                    holder = next((each for one in self.jobs.values() for each in one.steps if slot in each.slots), None)
                    if holder is not None:
                        holder.slots.remove(slot)
                        holder.gone.append((slot, code))
                moved = not_believed is not None and not job.isolated and self._join_windows(job.period_ns)
        return moved

    def _join_tick(self, job: ReadingJob) -> None:
        """Move byte counters that can wait into the batch of the tick, which saves a call."""
        with self.lock:
            steps, job.steps = job.steps, []
            tick = self._job(Pace.TICK)
            for step in steps:
                for slot in step.slots:
                    slot.pace = Pace.TICK
            batch = next((step for step in tick.steps if _is_batch(step)), None)
            if batch is None:
                tick.steps += steps
            else:
                batch.slots += [slot for step in steps for slot in step.slots]

    def _join_windows(self, window_ns: int) -> bool:
        """Choose the pace of byte counters and coarse values; return whether some moved.

        Bytes whose rate performance monitoring reports are read with the window, others at every tick.
        They are by far the most expensive fields (0.2 to 0.4 ms each, ``tests/nvml/measured.py``), and a total loses nothing.
        A driver average with a finer value from performance monitoring is read once a second.
        """
        moved = False
        for slot, rated in self._agreement.counts():
            pace = Pace.WINDOW if rated and not self._turns_within(slot, window_ns) else Pace.TICK
            moved |= slot.pace is not Pace.BYTES and self._move(slot, pace)
        for slot, finer in self._coarse:
            pace = Pace.SECOND if finer.how is not None and finer.last is not None else Pace.WINDOW
            moved |= self._move(slot, pace)
        return moved

    def _move(self, slot: Slot, pace: Pace) -> bool:
        """Read a slot at another pace from now on.

        Returns False when it already is at that pace, or is read alone since it hung.
        """
        if slot.pace is pace:
            return False
        with self.lock:
            step = next((step for step in self._job(slot.pace).steps if slot in step.slots), None)
            if step is None or (isinstance(step, FieldStep) and not _is_batch(step)):
                return False
            step.slots.remove(slot)
        slot.pace = pace
        placed = self._place(slot)
        placed.read_ns = placed.read_ns or step.read_ns  # a new step has read nothing yet, but its values are not old
        return True

    def _turns_within(self, slot: Slot, span_ns: int) -> bool:
        line = self.gpu.pcie_line_bytes if slot.counter.link is LineRateOf.PCIE else self.gpu.nvlink_line_bytes
        spans = [growth.due_within_ns(line) for growth in slot.growths.values()]
        return not spans or any(span is not None and span < span_ns for span in spans)

    def _in_haste(self, step: NvmlStep) -> bool:
        due = step.due_within_ns()
        if any(slot.counter.link is not None and not slot.growths for slot in step.slots):
            return True  # not read yet, so its width is unknown
        return due is not None and due < self._tick_ns

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

    def _place(self, slot: Slot) -> NvmlStep:
        """Put a slot into the step that reads it in its present way."""
        how = slot.how
        assert how is not None
        with self.lock:
            job = self._job(slot.pace)
            for step in job.steps:
                if _serves(step, how):
                    step.slots.append(slot)
                    return step
            step = self._step(how, slot.pace)
            step.slots.append(slot)
            job.steps.append(step)
            return step

    def _step(self, how: Read, pace: Pace) -> NvmlStep:
        if isinstance(how, NvmlCall):
            return CallStep(self._nvml, self.gpu, how)
        if isinstance(how, NvmlField):
            return FieldStep(self._nvml, self.gpu, f"fields {pace.value}")
        return GpmStep(self._nvml, self.gpu, self._clock)

    def _job(self, pace: Pace) -> ReadingJob:
        job = self.jobs.get(pace)
        if job is None:
            period_ns = self._window_ns if pace is Pace.WINDOW else max(_PERIODS.get(pace, 0), self._tick_ns)
            job = self.jobs[pace] = ReadingJob(self, pace, period_ns)
        return job


def _serves(step: NvmlStep, how: Read) -> bool:
    if isinstance(how, NvmlCall):
        return isinstance(step, CallStep) and step.call == (how.function, how.arguments)
    return _is_batch(step) if isinstance(how, NvmlField) else isinstance(step, GpmStep)


def _is_batch(step: NvmlStep) -> bool:
    """Return whether a step is a batch of fields; a field read alone is not."""
    return isinstance(step, FieldStep) and step.name.startswith("fields")
