"""What is read of one device and when: its steps by pace, which values turned out to be absent, and its samples.

No threads here: whoever has a job reads its steps one after the other (``lanes.py``; the tests do it in virtual time).
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
_APART_NS: Final = 100_000_000  # samples of performance monitoring lie more than that apart (nvml.h)
_WINDOWS_A_SECOND: Final = 20
"""Of all devices together, at 10 Hz and slower. Windows are the dearest part of sampling: calls that wait leave cold caches.
For a window of eight GPUs the thread pays 0.8 ms to ask and 0.4 to tell, where a tick without one takes 0.5 (the double)."""

_LEAST_PERIOD_NS: Final = 5_000_000
_SELDOM: Final = 0xFF  # rounds after which it is seen whether a counter still needs haste
_NEW_ROUNDS: Final = 2
_PERIODS: Final = {Pace.SECOND: _S, Pace.RARE: 10 * _S, Pace.SNAPSHOT: _S}

_FINER: Final = {names.GPU_BUSY: names.GPU_SM_ACTIVE, "memory_busy_ratio": names.GPU_DRAM_ACTIVE}
"""What the driver means over 1/6 to 1 s, and what tells the same better where performance monitoring is given."""

Key = tuple[str, str]
"""Name and label of a value."""


class Laid:
    """Steps as they are asked: the call of each, and the time after it."""

    __slots__ = ("calls", "steps")

    def __init__(self, steps: Sequence[NvmlStep], mono_ns: Callable[[], int]) -> None:
        self.steps = list(steps)
        self.calls: list[Callable[[], Any]] = []
        for step in steps:
            self.calls += (step.asking(), mono_ns)


class ReadingJob:
    """Steps of one device that are read together. ``next_ns``: when they are due, monotonic.

    ``paused_ns``: until then one of them may not be asked, after failures that may pass.
    """

    __slots__ = ("_base_ns", "_laid", "_rounds", "isolated", "next_ns", "pace", "paused_ns", "period_ns", "reader", "steps")

    def __init__(self, reader: DeviceReader, pace: Pace, period_ns: int) -> None:
        self.reader = reader
        self.pace = pace
        self.steps: list[NvmlStep] = []
        self.next_ns = 0
        self.isolated = False  # holds one step that hung, on a thread of its own
        self.period_ns = period_ns  # the pace's, or less where a counter would wrap unseen
        self.paused_ns = 0
        self._base_ns = period_ns
        self._laid = Laid((), int)
        self._rounds = 0

    @property
    def index(self) -> int | None:
        """NVML's, of the GPU."""
        return self.reader.gpu.device.index

    @property
    def is_new(self) -> bool:
        """Whether it may still turn out what of it the device does not give: a window takes two rounds."""
        return self._rounds < _NEW_ROUNDS

    def laid_out(self, now_ns: int, mono_ns: Callable[[], int]) -> Laid:
        """What is to be asked now. Made anew only where the steps are others: 30 steps took 0.1 ms, ten times a second."""
        if now_ns < self.paused_ns:
            return Laid([step for step in tuple(self.steps) if step.resume_ns <= now_ns], mono_ns)
        if self._laid.steps != self.steps:
            self._laid = Laid(tuple(self.steps), mono_ns)
        return self._laid

    def alone(self, step: NvmlStep) -> ReadingJob:
        """A job of the same pace for one step that was taken out of this one."""
        job = ReadingJob(self.reader, self.pace, self._base_ns)
        job.steps.append(step)
        job.isolated = True
        return job

    def add(self, steps: Sequence[NvmlStep]) -> None:
        """Steps may come from another thread."""
        with self.reader.lock:
            self.steps += steps

    def remove(self, step: NvmlStep) -> bool:
        """False where it is gone: another step serves its values by now."""
        with self.reader.lock:
            if step not in self.steps:
                return False
            self.steps.remove(step)
            return True

    def plan_next(self, now_ns: int) -> int:
        """After a round that was due at ``next_ns``: how many periods passed meanwhile. They are not made up for."""
        self._rounds += 1
        if self.pace is Pace.BYTES or self._rounds & _SELDOM == 1:
            due = [each for each in (step.due_within_ns() for step in self.steps) if each is not None]
            self.period_ns = max(_LEAST_PERIOD_NS, min([self._base_ns, *due]))
        period, due_ns = self.period_ns, self.next_ns or now_ns
        late = max(0, (now_ns - due_ns) // period)
        self.next_ns = due_ns + (late + 1) * period
        return late

    def begin_at(self, now_ns: int) -> None:
        """Due for the first time."""
        self.next_ns = self.next_ns or now_ns


def window_ns(tick_ns: int, together: int) -> int:
    """How long a window of performance monitoring is, in whole ticks, where so many devices are sampled together."""
    ticks = _APART_NS // tick_ns + 1
    if tick_ns >= _APART_NS:  # who asks for more than 10 Hz looks at something for a while, and pays
        ticks = max(ticks, -(-together * _S // (_WINDOWS_A_SECOND * tick_ns)))
    return ticks * tick_ns


class DeviceReader:
    """One GPU or MIG device, of so many sampled ``together``.

    ``jobs`` by pace; ``absent``: the code for each value that it does not give.
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
        self.counted: Callable[[], list[DeviceValue]] = list  # what is counted elsewhere, told with the rare ones
        self.jobs: dict[Pace, ReadingJob] = {}
        self._nvml = nvml
        self._clock = clock
        self._process = process
        self._tick_ns = period_ns
        self._window_ns = window_ns(period_ns, together)
        self.lock = Lock()  # guards the lists of steps: those of one device may be read by several threads
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
        """Names of the counters that are looked for."""
        return {slot.name for slot in self.slots}

    def lane_jobs(self) -> list[ReadingJob]:
        """What the device's own lane reads."""
        return [job for job in self.jobs.values() if job.steps and job.pace is not Pace.SNAPSHOT]

    def settle(self, job: ReadingJob) -> bool:
        """After a round: values that a step cannot serve move to their next way; bytes that need no haste join the others.

        True where the device's jobs are others now.
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
            self._join_windows(job.period_ns)  # a rate that is no longer given gives way to its count
        if job.pace is Pace.BYTES and not job.isolated and not any(map(self._in_haste, job.steps)):
            self._join_tick(job)
            changed = True
        if changed:
            with self.lock:
                for each in (job, *self.jobs.values()):
                    each.steps[:] = [step for step in each.steps if step.slots or step.gone]
        return changed

    def split(self, step: NvmlStep) -> list[NvmlStep]:
        """A batch that hung, as one step a field: one of them is the one that hangs. [] where there is nothing to split."""
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
        """Steps that are well again, into the job that they were taken from; fields become one batch again."""
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
        """What is not asked for, and told with the rare counters: what is counted elsewhere and what its links can carry."""
        return [*self.counted(), *self.lines()]

    def sample(self, values: list[DeviceValue], at_unix_ns: int, took_ns: int) -> DeviceSample:
        """The record of what it said at one waking."""
        return DeviceSample(
            process=self._process,
            source=Source.NVML,
            device=self.gpu.device,
            at_unix_ns=at_unix_ns,
            values=tuple(values),
            took_ns=took_ns,
        )

    def _compare(self, job: ReadingJob) -> bool:
        """Values that stand at 0 and should not go the way of those that are not given; whether others moved."""
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
        """Bytes that need no haste are asked for in the batch of the tick: one call less."""
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
        """Bytes of which performance monitoring tells the rate are read with it, others at every tick; whether some moved.

        They are the dearest fields by far (0.2 to 0.4 ms each, ``tests/nvml/measured.py``), and a total loses nothing by that.
        What it tells better than the driver's means is asked of these once a second.
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
        """Read a slot at another pace from now on; False where it is at that already, or read alone since it hung."""
        if slot.pace is pace:
            return False
        with self.lock:
            step = next((step for step in self._job(slot.pace).steps if slot in step.slots), None)
            if step is None or (isinstance(step, FieldStep) and not _is_batch(step)):
                return False
            step.slots.remove(slot)
        slot.pace = pace
        placed = self._place(slot)
        placed.read_ns = placed.read_ns or step.read_ns  # what was read is not old because a new step has read nothing yet
        return True

    def _turns_within(self, slot: Slot, span_ns: int) -> bool:
        line = self.gpu.pcie_line_bytes if slot.counter.link is LineRateOf.PCIE else self.gpu.nvlink_line_bytes
        spans = [growth.due_within_ns(line) for growth in slot.growths.values()]
        return not spans or any(span is not None and span < span_ns for span in spans)

    def _in_haste(self, step: NvmlStep) -> bool:
        due = step.due_within_ns()
        if any(slot.counter.link is not None and not slot.growths for slot in step.slots):
            return True  # not read yet: nobody knows how wide it is
        return due is not None and due < self._tick_ns

    def lines(self) -> list[DeviceValue]:
        """What its links can carry, where that is told."""
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
    """Of fields; one that hung is read alone and is none."""
    return isinstance(step, FieldStep) and step.name.startswith("fields")
