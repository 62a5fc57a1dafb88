"""Sample every GPU of this host, and recover from whatever fails.

The *keeper* opens the NVML session, looks for devices and retries lost ones; only the keeper may wait inside NVML.
The *watch* gives up calls that hang, and reports them.
Lanes read (``worker.py``); one more thread waits for Xid events.
None of these threads belongs to the event loop, and stopping waits for no call that hangs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from handrail.device_counters.gpu import XID, Pace
from handrail.records import Process, ProcessEventKind, Source
from handrail.records.devices import DeviceSample, DeviceValue
from handrail_sidecar.gpu.alarm import Alarm
from handrail_sidecar.gpu.asking import Asker
from handrail_sidecar.gpu.devices import GpuDevice, Nvml, NvmlUnavailable, gpu_at, list_gpus, mig_keys, open_nvml, versions
from handrail_sidecar.gpu.events import News, Tell
from handrail_sidecar.gpu.failures import Meaning, NvmlFailed, code_of, failure
from handrail_sidecar.gpu.halt import Halt
from handrail_sidecar.gpu.reader import DeviceReader, ReadingJob
from handrail_sidecar.gpu.state import SamplerSettings, SamplerState, SystemClock
from handrail_sidecar.gpu.steps import SamplerClock
from handrail_sidecar.gpu.visible import visible
from handrail_sidecar.gpu.worker import Deliver, LaneStats
from handrail_sidecar.gpu.workers import MOST_GIVEN_UP, GpuWorkers
from handrail_sidecar.gpu.xids import XidWatch

log = logging.getLogger(__name__)

STUCK_NS: Final = 5_000_000_000
"""A call that has not returned for so long is reported: the GPU is stuck."""

_LONGEST_RETRY_S: Final = 60.0
_ROLL_CALL_S: Final = 10.0
_REOPEN_FOR_LOST_S: Final = 300.0
_LONGEST_REOPEN_S: Final = 86_400.0
_SNAPSHOT_LIMIT_NS: Final = 1_000_000_000
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
    ) -> None:
        self.settings = settings
        self.state = SamplerState()
        self.stats = LaneStats()
        self.xids: Counter[tuple[str, int]] = Counter()
        self.xid_watch: XidWatch | None = None
        self.readers: dict[str, DeviceReader] = {}
        self._process = process
        self._deliver = deliver
        self._clock = clock
        self._news = News(process, self.state, clock, tell)
        self._environment = environment
        self._open = open_session
        self._began_unix_ns = clock.unix_ns()
        self._ask = Asker(settings.answer_within_s)
        self._stop = Halt()
        self._alarm = Alarm()  # the watch has something to do
        self._wake = threading.Event()  # the keeper has something to do
        self._lanes: GpuWorkers | None = None
        self._old: list[GpuWorkers] = []  # of earlier sessions, with calls that have not returned
        self._reopen_s = _REOPEN_FOR_LOST_S
        self._session_lost: int | None = None
        self._newly_lost: list[tuple[DeviceReader, int]] = []
        self._threads = [
            threading.Thread(target=self._keep, name="gpu keeper", daemon=True),
            threading.Thread(target=self._watch, name="gpu watch", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads. Never fails: a missing NVML is a state, and is reported."""
        self._alarm.open()
        for thread in self._threads:
            thread.start()

    def stop(self, wait_s: float = 1.0) -> None:
        """Stop without waiting for a call that hangs."""
        self._stop.set()
        self._wake.set()
        lanes = self._lanes
        if lanes is not None:
            lanes.stop(wait_s)
        self._alarm.set(1)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(0.0 if self.state.opening_since_ns else wait_s)

    def now_ns(self) -> int:
        """Return the sampler's monotonic time."""
        return self._clock.mono_ns()

    @property
    def lanes(self) -> GpuWorkers | None:
        """Lanes of the present session."""
        return self._lanes

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
                self._fault("GPUs: the sampler's keeper failed and begins again")
            self._stop.wait(pause)
            pause = min(pause * 2, _LONGEST_RETRY_S)

    def _opened(self) -> Nvml | None:
        self._old = [each for each in self._old if any(lane.inside() for lane in each.all())]
        if sum(len(each.all()) for each in self._old) >= MOST_GIVEN_UP:
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
                NvmlUnavailable(28, "NVML answers and shows no GPU", "give this container the GPU (--gpus, nvidia.com/gpu)")
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
        limit_ns = self.settings.limit_ns
        self._lanes = GpuWorkers(
            self._clock, self._deliver, self._on_lost, limit_ns=limit_ns, alarm=self._alarm, stats=self.stats
        )
        wanted = [self._owned(each) for each in gpus if self._wanted(each)]
        self.readers = {}
        self.xid_watch = XidWatch(nvml, wanted, self.xids, self._on_xid, self._lanes.stopping)
        self.xid_watch.start()
        self._start_lane(nvml, wanted)
        self._news.opened(wanted, failed, again=again)

    def _start_lane(self, nvml: Nvml, gpus: Sequence[GpuDevice]) -> None:
        assert self._lanes is not None
        jobs: list[ReadingJob] = []
        period_ns, without, together = self.settings.period_ns, self.settings.without, len(self.readers) + len(gpus)
        for gpu in gpus:
            reader = DeviceReader(nvml, gpu, self._clock, self._process, period_ns, without, together=together)
            reader.counted = partial(self._xid_values, gpu.device.key)
            self.readers[gpu.device.key] = reader
            jobs += reader.lane_jobs()
        if jobs:
            self._lanes.start("reads", jobs)

    def _in_session(self, nvml: Nvml) -> None:
        """Look after lost GPUs and changing MIG devices until the session ends.

        The session ends when it is lost or the sampler stops.
        """
        pause, retry_ns = self.settings.first_retry_s, 0
        looked_ns = opened_ns = self._clock.mono_ns()
        snapshots: set[str] = set()
        while not self._stop.is_set() and self._session_lost is None:
            self._wake.wait(min(1.0, self.settings.first_retry_s))
            self._wake.clear()
            now = self._clock.mono_ns()
            self._note_lost()
            self._start_snapshots(snapshots)
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
                    log.info("GPUs: MIG devices have changed; looking again")
                    return

    def _close(self, nvml: Nvml) -> None:
        """End the session; shut NVML down only when no call is left inside it."""
        lanes, self._lanes = self._lanes, None
        if lanes is None:
            return
        readers, self.readers = self.readers, {}
        if not lanes.stop(1.0):
            self._old.append(lanes)
            return
        if self.xid_watch is not None:
            self.xid_watch.thread.join(2.0)
        try:
            for reader in readers.values():
                for job in reader.jobs.values():
                    for step in job.steps:
                        step.close()
            self._ask("shutdown", nvml.nvmlShutdown)
        except Exception as error:
            log.debug("NVML did not shut down: %s", error)

    # --- lost devices ----------------------------------------------------------------------------------------------------------

    def _on_lost(self, reader: DeviceReader, code: int) -> None:
        """Note a lost device; runs in a lane's thread, which ends with it."""
        self._newly_lost.append((reader, code))
        self._wake.set()

    def _note_lost(self) -> None:
        while self._newly_lost:
            reader, code = self._newly_lost.pop(0)
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
                self._start_lane(nvml, wanted)
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

    def _start_snapshots(self, started: set[str]) -> None:
        """Start the calls that block for 20 ms, where the device provides nothing better.

        One thread makes all of them, once a second.
        """
        assert self._lanes is not None
        jobs = [
            reader.jobs[Pace.SNAPSHOT]
            for key, reader in list(self.readers.items())
            if Pace.SNAPSHOT in reader.jobs and key not in started
        ]
        if jobs:
            started |= {job.reader.gpu.device.key for job in jobs}
            self._lanes.start("snapshots", jobs, limit_ns=_SNAPSHOT_LIMIT_NS)

    # --- the watch ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        reported_ns = 0
        while not self._stop.is_set():
            self._alarm.wait()
            lanes, now = self._lanes, self._clock.mono_ns()
            if lanes is None:
                continue  # the first lane of a session sets the alarm
            try:
                self._alarm.set(now + lanes.look())
                if now - reported_ns > _SAY_NS or self.state.stuck:
                    reported_ns = now
                    hanging = lanes.hanging(now, STUCK_NS)
                    self._news.stuck({(reader.gpu.device.key, call): (reader, ns) for reader, call, ns in hanging})
            except Exception:  # an error must not end the watch either
                self._fault("GPUs: the watch over hanging calls failed and goes on")
                self._alarm.set(now + self.settings.limit_ns)
        self._alarm.close()

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
