"""Sample every GPU of this host, and recover from whatever fails.

The *keeper* opens the NVML session, looks for devices and retries lost ones; only the keeper may wait inside NVML.
Workers read, and their monitor gives up calls that hang (``sampling/worker.py``); one more thread waits for Xid events.
None of these threads belongs to the event loop, and stopping waits for no call that hangs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from opentelemetry.trace import Tracer

from handrail.device_counters.gpu import XID
from handrail.records import Process, ProcessEventKind, Source
from handrail.records.devices import DeviceSample, DeviceValue
from handrail.telemetry.tracing import NO_TRACES
from handrail_sidecar.gpu.devices import GpuDevice, Nvml, NvmlUnavailable, gpu_at, list_gpus, mig_keys, open_nvml, versions
from handrail_sidecar.gpu.events import News, Tell
from handrail_sidecar.gpu.failures import HANGS, Meaning, NvmlFailed, code_of, failure
from handrail_sidecar.gpu.nvml_calls import NvmlTask, SamplerClock
from handrail_sidecar.gpu.reader import DeviceReader
from handrail_sidecar.gpu.state import Deliver, SamplerSettings, SamplerState, SamplerStats, SystemClock
from handrail_sidecar.gpu.visible import visible
from handrail_sidecar.gpu.xids import XidWatch
from handrail_sidecar.sampling.worker import Reading, TimedCalls, WorkerPool, trace_late

log = logging.getLogger(__name__)

STUCK_NS: Final = 5_000_000_000
"""A call that has not returned for so long is reported: the GPU is stuck."""

_LONGEST_RETRY_S: Final = 60.0
_ROLL_CALL_S: Final = 10.0
_REOPEN_FOR_LOST_S: Final = 300.0
_LONGEST_REOPEN_S: Final = 86_400.0
_MOST_HANGING: Final = 32  # threads inside calls that do not return
_SAY_NS: Final = 500_000_000


class Sampler:
    """Samples every GPU of this host.

    ``deliver`` and ``tell`` are called in the sampler's threads. Call ``start`` and ``stop`` once each.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        process: Process,
        deliver: Deliver,
        tell: Tell,
        *,
        clock: SamplerClock = SystemClock,
        environment: Mapping[str, str] = os.environ,
        open_session: Callable[[], Nvml] = open_nvml,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self.settings = settings
        self.state = SamplerState()
        self.stats = SamplerStats()
        self.xids: Counter[tuple[str, int]] = Counter()
        self.xid_watch: XidWatch | None = None
        self.readers: dict[str, DeviceReader] = {}
        self._process = process
        self._deliver = deliver
        self._clock = clock
        self._news = News(process, self.state, clock, tell)
        self._environment = environment
        self._open = open_session
        self._tracer = tracer
        self._began_unix_ns = clock.unix_ns()
        self._timed = TimedCalls("gpu asks", settings.answer_within_s)
        self._stop = threading.Event()
        self._wake = threading.Event()  # the keeper has something to do
        self._pool: WorkerPool | None = None
        self._old: list[WorkerPool] = []  # of earlier sessions, with calls that have not returned
        self._reported_ns = 0  # when hanging calls were last looked for
        self._reopen_s = _REOPEN_FOR_LOST_S
        self._session_lost: int | None = None
        self._newly_lost: list[DeviceReader] = []
        self._keeper = threading.Thread(target=self._keep, name="gpu keeper", daemon=True)

    def start(self) -> None:
        """Start the keeper. Never fails: a missing NVML is a state, and is reported."""
        self._keeper.start()

    def stop(self, wait_s: float = 1.0) -> None:
        """Stop without waiting for a call that hangs."""
        self._stop.set()
        self._wake.set()
        pool = self._pool
        if pool is not None:
            pool.stop(wait_s)
        if self._keeper.is_alive():
            self._keeper.join(0.0 if self.state.opening_since_ns else wait_s)

    def now_ns(self) -> int:
        """Return the sampler's monotonic time."""
        return self._clock.mono_ns()

    @property
    def pool(self) -> WorkerPool | None:
        """Workers of the present session."""
        return self._pool

    def hanging(self, longer_than_ns: int = 0) -> list[tuple[NvmlTask, int]]:
        """Return (call, ns) for every call that hangs, for at least that time."""
        pool = self._pool
        return pool.hanging(longer_than_ns) if pool is not None else []

    # --- the keeper ---------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        pause = self.settings.first_retry_s
        while not self._stop.is_set():
            try:
                nvml = self._opened()
                if nvml is not None:
                    pause = self.settings.first_retry_s
                    self._in_session(nvml)
                    self._close(nvml)
                    continue
            except Exception:  # an error of ours must not end the sampling for good
                self._fault("GPUs: the thread that supervises sampling failed; it starts again")
            self._stop.wait(pause)
            pause = min(pause * 2, _LONGEST_RETRY_S)

    def _opened(self) -> Nvml | None:
        self._old = [each for each in self._old if each.workers()]
        if sum(len(each.workers()) for each in self._old) >= _MOST_HANGING:
            return None  # too many threads inside calls that do not return
        self.state.opening_since_ns = self._clock.mono_ns()
        try:
            nvml = self._open()
            gpus, failed = list_gpus(nvml, self._ask)
        except NvmlUnavailable as problem:
            self._news.unavailable(problem)
            return None
        except NvmlFailed as problem:
            reported_failure = failure(problem.code)
            self._news.unavailable(NvmlUnavailable(reported_failure.code, reported_failure.words, reported_failure.remedy))
            return None
        finally:
            self.state.opening_since_ns = 0
        if not gpus and not failed:
            self._news.unavailable(
                NvmlUnavailable(28, "NVML answers but lists no GPU", "give this container the GPU (--gpus, nvidia.com/gpu)")
            )
            return None
        self._begin(nvml, gpus, failed)
        return nvml

    def _begin(self, nvml: Nvml, gpus: Sequence[GpuDevice], failed: Mapping[int, int]) -> None:
        state = self.state
        again = state.problem is not None and state.sessions > 0
        state.driver, state.nvml = versions(nvml)
        state.problem, state.lost = None, dict(failed)
        state.visible = visible([each.device for each in gpus], self._environment, self.settings.devices)
        state.sessions += 1
        self._session_lost = None
        self._newly_lost.clear()
        self._pool = WorkerPool(
            "gpu",
            self._take,
            now_ns=self._clock.mono_ns,
            stats=self.stats,
            hangs=self._split,
            rejoined=self._rejoined,
            checked=self._report_hanging,
            most_hanging=_MOST_HANGING,
        )
        self._pool.start()
        wanted = [self._owned(each) for each in gpus if self._wanted(each)]
        self.readers = {}
        self.xid_watch = XidWatch(nvml, wanted, self.xids, self._on_xid)
        self.xid_watch.start()
        self._read(nvml, wanted)
        self._news.opened(wanted, failed, again=again)

    def _read(self, nvml: Nvml, gpus: Sequence[GpuDevice]) -> None:
        """Begin to read these devices."""
        pool = self._pool
        assert pool is not None
        together = len(self.readers) + len(gpus)
        for gpu in gpus:
            reader = self.readers[gpu.device.key] = DeviceReader(
                nvml,
                gpu,
                self._clock,
                self._process,
                self.settings.period_ns,
                self.settings.without,
                together=together,
                stats=self.stats,
                update=pool.update,
            )
            reader.counted = partial(self._xid_values, gpu.device.key)
        pool.update([task for gpu in gpus for task in self.readers[gpu.device.key].tasks])

    def _in_session(self, nvml: Nvml) -> None:
        """Look after lost GPUs and changing MIG devices until the session ends.

        The session ends when it is lost or the sampler stops.
        """
        pause, retry_ns = self.settings.first_retry_s, 0
        looked_ns = opened_ns = self._clock.mono_ns()
        while not self._stop.is_set() and self._session_lost is None:
            self._wake.wait(min(1.0, self.settings.first_retry_s))
            self._wake.clear()
            now = self._clock.mono_ns()
            self._note_lost()
            if self.state.lost and now >= retry_ns:
                self._look_for_lost(nvml)
                retry_ns, pause = now + int(pause * 1e9), min(pause * 2, _LONGEST_RETRY_S)
                if self.state.lost and (not self.readers or now - opened_ns > self._reopen_s * 1e9):
                    self._reopen_s = min(self._reopen_s * 2, _LONGEST_REOPEN_S)  # it costs the other GPUs a second
                    return
            if not self.state.lost:
                pause, self._reopen_s = self.settings.first_retry_s, _REOPEN_FOR_LOST_S
            if now - looked_ns > _ROLL_CALL_S * 1e9:
                looked_ns = now
                if self._mig_changed(nvml):
                    log.info("GPUs: MIG devices have changed; the sidecar lists them again")
                    return

    def _close(self, nvml: Nvml) -> None:
        """End the session; shut NVML down only when no call is left inside it."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        readers, self.readers = self.readers, {}
        ended = pool.stop(1.0)
        if self.xid_watch is not None:
            self.xid_watch.stop(2.0)
        if not ended:
            self._old.append(pool)
            return
        try:
            for reader in readers.values():
                for task in reader.tasks:
                    task.close()
            self._ask("shutdown", nvml.nvmlShutdown)
        except Exception as error:
            log.debug("NVML did not shut down: %s", error)

    # --- lost devices ----------------------------------------------------------------------------------------------------------

    def _on_lost(self, reader: DeviceReader) -> None:
        """Stop reading a lost device, or all devices when the session is lost.

        Runs in a worker's thread.
        """
        session, index, pool = failure(reader.lost).meaning is Meaning.SESSION_LOST, reader.gpu.device.index, self._pool
        if pool is not None:
            gone = [each for each in list(self.readers.values()) if session or each.gpu.device.index == index]
            pool.update(remove=[task for each in gone for task in list(each.tasks)])
        self._newly_lost.append(reader)
        self._wake.set()

    def _note_lost(self) -> None:
        while self._newly_lost:
            reader = self._newly_lost.pop(0)
            code = reader.lost
            if not any(reader is each for each in self.readers.values()):
                continue  # from before the device came back
            device = reader.gpu.device
            if failure(code).meaning is Meaning.SESSION_LOST:
                self._session_lost = code
                self._news.unavailable(NvmlUnavailable(code, failure(code).words, failure(code).remedy))
                return
            index = device.index or 0
            for key in [key for key, each in self.readers.items() if each.gpu.device.index == index]:
                del self.readers[key]
            if index not in self.state.lost:
                self.state.lost[index] = code
                self._news.lost(f"GPU {index} ({device.key})", code)

    def _look_for_lost(self, nvml: Nvml) -> None:
        for index in list(self.state.lost):
            try:
                gpus = self._ask(f"GPU {index}", _found_again, nvml, index)
            except NvmlFailed:
                continue
            del self.state.lost[index]
            wanted = [self._owned(each) for each in gpus if self._wanted(each)]
            if wanted:
                self._read(nvml, wanted)
            self._news.event(ProcessEventKind.GPU_BACK, f"GPU {index} answers again")

    def _mig_changed(self, nvml: Nvml) -> bool:
        parents = [reader for reader in list(self.readers.values()) if reader.gpu.mig_mode is not None]
        for parent in parents:
            known = {key for key, each in self.readers.items() if each.gpu.device.parent == parent.gpu.device.key}
            try:
                now = set(self._ask(f"GPU {parent.gpu.device.index}", mig_keys, nvml, parent.gpu))
            except NvmlFailed:
                continue
            if self.state.visible.keys is None and known != now:
                return True
        return False

    def _ask(self, key: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a rare call with a time limit; raises ``NvmlFailed`` (``HANGS``) after it."""
        try:
            return self._timed(key, function, *arguments)
        except TimeoutError:
            raise NvmlFailed(HANGS) from None

    # --- in the workers' threads --------------------------------------------------------------------------------------------

    def _take(self, readings: Sequence[Reading]) -> None:
        """Deliver one sample for each device that was read."""
        trace_late(self._tracer, "gpu", readings, self._clock.unix_ns() - self._clock.mono_ns())
        by_device: dict[str, list[Reading]] = {}
        for reading in readings:
            by_device.setdefault(reading.task.gpu.device.key, []).append(reading)
        for key, of in by_device.items():
            reader = self.readers.get(key)
            if reader is None or reader.lost:
                continue
            sample = reader.take(of)
            self.stats.missed += max([reading.missed for reading in of])
            if sample is not None:
                self.stats.samples += 1
                self._deliver(sample)
            if reader.lost:
                self._on_lost(reader)

    def _split(self, task: NvmlTask) -> None:
        reader = self.readers.get(task.gpu.device.key)
        if reader is not None:
            reader.split(task)

    def _rejoined(self, tasks: Iterable[NvmlTask]) -> None:
        for key in {task.gpu.device.key for task in tasks}:
            reader = self.readers.get(key)
            if reader is not None:
                reader.join_fields()

    def _report_hanging(self) -> None:
        """Report calls that have hung for long; runs in the monitor's thread."""
        now = self._clock.mono_ns()
        if now - self._reported_ns > _SAY_NS or self.state.stuck:
            self._reported_ns = now
            hanging = self.hanging(STUCK_NS)
            self._news.stuck({(task.gpu.device.key, task.name): (task.gpu.device, ns) for task, ns in hanging})

    def _fault(self, words: str) -> None:
        self.stats.faults += 1
        if self.stats.faults == 1:
            log.exception(words)

    def _on_xid(self, gpu: GpuDevice, code: int) -> None:
        """Report an Xid error; runs in the events' thread."""
        if self._news.xid(gpu.device, code):
            values = tuple(self._xid_values(gpu.device.key))
            at = self._clock.unix_ns()
            self._deliver(
                DeviceSample(process=self._process, source=Source.NVML, device=gpu.device, at_unix_ns=at, values=values)
            )

    def _xid_values(self, key: str) -> list[DeviceValue]:
        return [
            DeviceValue(name=XID.name, value=count, label=str(code), start_unix_ns=self._began_unix_ns)
            for (uuid, code), count in list(self.xids.items())
            if uuid == key
        ]

    def _wanted(self, gpu: GpuDevice) -> bool:
        keys = self.state.visible.keys
        return keys is None or gpu.device.key in keys or gpu.device.parent in keys

    def _owned(self, gpu: GpuDevice) -> GpuDevice:
        """Assign the GPU to the engine only when the environment or a setting names it.

        A pid is never enough (case F07).
        """
        if self.state.visible.keys is None or not self._process.instance:
            return gpu
        return replace(gpu, device=replace(gpu.device, engine=self._process.instance))


def _found_again(nvml: Nvml, index: int) -> list[GpuDevice]:
    """Return a GPU that answers again, and its MIG devices.

    Raises ``NvmlFailed`` while it is lost: NVML also returns a handle for a GPU that answers nothing else.
    """
    gpus = gpu_at(nvml, index)
    try:
        nvml.nvmlDeviceGetTemperature(gpus[0].handle, 0)
    except Exception as error:
        code = code_of(error)
        if failure(code).meaning in (Meaning.DEVICE_LOST, Meaning.SESSION_LOST):
            raise NvmlFailed(code) from None
    return gpus
