"""Run the reading threads, and replace a thread whose call hangs.

All GPUs begin in one lane, since a thread that wakes pays more for cold caches than for its reads.
When one lane cannot keep up, each GPU gets its own.
A call inside the driver cannot be cancelled. One that takes longer than ``limit_ns`` is given up: its thread keeps that call
alone, the rest of its GPU goes on in a second thread from the step after it, and the other GPUs in a third.
A batch of fields that does not return either is read field by field from then on, so that only the field at fault stays alone.
When a call returns, its thread goes on reading only that; after ``QUIET_ROUNDS`` quick rounds it rejoins its GPU's lane.

So threads are bounded by the number of calls, and by ``MOST_GIVEN_UP``: a GPU with more hanging calls than that waits as a whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from handrail.device_counters.gpu import Pace
from handrail_sidecar.gpu.alarm import Alarm
from handrail_sidecar.gpu.call_batch import Wave
from handrail_sidecar.gpu.failures import HANGS
from handrail_sidecar.gpu.halt import Halt
from handrail_sidecar.gpu.reader import DeviceReader, ReadingJob
from handrail_sidecar.gpu.steps import NvmlStep, SamplerClock
from handrail_sidecar.gpu.worker import Deliver, Lane, LaneStats

log = logging.getLogger(__name__)

MOST_GIVEN_UP: Final = 32  # threads inside calls that do not return
MOST_GIVEN_UP_A_DEVICE: Final = 6
FIRST_CALL_NS: Final = 1_000_000_000  # a driver may have to wake a GPU for the first call of a kind
_IDLE_LOOK_NS: Final = 250_000_000
_LEAST_LOOK_NS: Final = 2_000_000
_SHARE_TOGETHER: Final = 0.4  # of its time that a lane may read after a merge


class GpuWorkers:
    """All lanes of a session.

    ``deliver`` and ``lost`` are called in the lanes' threads.
    """

    def __init__(
        self,
        clock: SamplerClock,
        deliver: Deliver,
        lost: Callable[[DeviceReader, int], None],
        *,
        limit_ns: int,
        alarm: Alarm,
        stats: LaneStats | None = None,
    ) -> None:
        self.clock = clock
        self.deliver = deliver
        self.lost = lost
        self.stopping = Halt()
        self.stats = stats if stats is not None else LaneStats()
        self.limit_ns = limit_ns
        self._lock = threading.Lock()  # guards the list, and the transfer of steps between lanes
        self._lanes: list[Lane] = []
        self._alarm = alarm  # rings when the watch must look

    def start(self, name: str, jobs: Iterable[ReadingJob], *, limit_ns: int | None = None) -> Lane:
        """Start a thread for these jobs, which are due from now on."""
        now = self.clock.mono_ns()
        lane = Lane(self, name, jobs, self.limit_ns if limit_ns is None else limit_ns)
        for job in lane.jobs:
            job.begin_at(now)
        with self._lock:
            self._lanes.append(lane)
            self._alarm.set(now)  # the watch looks, and sees how long it may sleep
        lane.thread.start()
        return lane

    def all(self) -> list[Lane]:
        """Return the present lanes."""
        with self._lock:
            return list(self._lanes)

    def look(self) -> int:
        """Give up calls that take too long; called by the watch.

        Returns in how many ns to look again, unless a lane calls ``well`` earlier.
        """
        now = self.clock.mono_ns()
        next_ns, soonest_ns = now + _IDLE_LOOK_NS, now + 2 * self.limit_ns
        for lane in self.all():
            inside = lane.inside()
            if inside is None:
                next_ns = min(next_ns, max(soonest_ns, (lane.due_ns or now) + lane.limit_ns))  # nothing hangs: look once a period
                continue
            step, _, since = inside
            limit = max(lane.limit_ns, 0 if step.warm or step.calls else FIRST_CALL_NS)
            if lane.alone:
                if now - since > 2 * limit:
                    self._split(lane, step, since)
                else:
                    next_ns = min(next_ns, since + 2 * limit)
            elif not lane.given_up:
                if now - since > limit:
                    self._give_up(lane, since)
                next_ns = min(next_ns, since + limit if now - since <= limit else now + limit)
        return max(_LEAST_LOOK_NS, next_ns - now)

    def hanging(self, now_ns: int, longer_than_ns: int) -> list[tuple[DeviceReader, str, int]]:
        """Return (device, call, ns) for every call that has not returned for so long."""
        calls = [inside for inside in (lane.inside() for lane in self.all()) if inside is not None]
        return [(reader, step.name, now_ns - since) for step, reader, since in calls if now_ns - since > longer_than_ns]

    def stop(self, wait_s: float) -> bool:
        """End every lane; return True when no call is left running.

        Waits for lanes that are not inside a call that hangs.
        """
        self.stopping.set()
        for lane in self.all():
            inside = lane.inside()
            if inside is None or self.clock.mono_ns() - inside[2] <= self.limit_ns:
                lane.thread.join(wait_s)
        return all(lane.inside() is None for lane in self.all())

    # --- for lanes, in their threads ------------------------------------------------------------------------------------------

    def spread(self, lane: Lane) -> None:
        """Split a lane that cannot keep up: it keeps its first GPU.

        Each other GPU gets a lane of its own.
        """
        by_gpu: dict[int | None, list[ReadingJob]] = {}
        for job in lane.jobs:
            by_gpu.setdefault(job.index, []).append(job)
        if len(by_gpu) < 2:
            return
        first, *others = by_gpu
        lane.jobs = by_gpu[first]
        log.info("GPUs: one thread cannot read all of them in time; each has its own now")
        for index in others:
            self.start(f"{lane.name}.{index}", by_gpu[index], limit_ns=lane.limit_ns)

    def rejoin(self, lane: Lane) -> bool:
        """Give a lane's recovered step back to its device's lane.

        Returns False when the device has no such lane.
        """
        with self._lock:
            home = self._home(lane.jobs[0])
            if home is not None:
                home.reader.take_back(home, lane.jobs[0].steps)
            return home is not None

    def merge(self, lane: Lane) -> None:
        """Give a calm lane's jobs to an older one that has time for them, and end it.

        Does nothing when there is no such lane.
        """
        with self._lock:
            for home in self._lanes:
                if home is lane:
                    return
                plain = not (home.alone or home.ending or home.given_up) and home.limit_ns == lane.limit_ns
                if plain and home.jobs and home.share + lane.share < _SHARE_TOGETHER:
                    home.incoming += [lane.jobs, *lane.incoming]
                    lane.incoming, lane.ending = [], True
                    return

    def well(self, lane: Lane, next_ns: int) -> None:
        """Postpone the watch: this lane makes its next call at ``next_ns``.

        When it is the only lane, nothing can hang until then.
        """
        with self._lock:
            if len(self._lanes) == 1 and not self.stopping.is_set():
                self._alarm.set(next_ns + lane.limit_ns)

    def was_given_up(self, lane: Lane) -> bool:
        """Return whether the watch has taken a lane's work.

        Waits until the watch has distributed all of it.
        """
        with self._lock:
            return lane.given_up

    def left_alone(self, lane: Lane) -> ReadingJob | None:
        """Return the call that a given-up lane keeps after it has returned.

        None when another lane reads it.
        """
        with self._lock:
            return lane.jobs[0] if lane.alone else None

    def ended(self, lane: Lane) -> None:
        """Remove a lane whose thread is about to end.

        Jobs that another lane gave it meanwhile start in a new lane.
        """
        with self._lock:
            if lane in self._lanes:
                self._lanes.remove(lane)
            left, lane.incoming = [job for jobs in lane.incoming for job in jobs], []
            self._alarm.set(self.clock.mono_ns())  # the call that hung has ended: the watch reports it
        if left and not self.stopping.is_set():
            self.start(lane.name, left, limit_ns=lane.limit_ns)

    # --- giving up ----------------------------------------------------------------------------------------------------------

    def _give_up(self, lane: Lane, since_ns: int) -> None:
        with self._lock:
            wave, inside = lane.wave, lane.inside()
            if wave is None or inside is None:
                return
            _, reader, _ = inside
            extra = [each for each in self._lanes if each.alone or each.given_up]
            if len(extra) >= MOST_GIVEN_UP or sum(each.reader is reader for each in extra) >= MOST_GIVEN_UP_A_DEVICE:
                self.stats.not_replaced += lane.not_replaced_ns != since_ns
                lane.not_replaced_ns = since_ns
                return
            if not wave.take(since_ns):
                return
            self.stats.given_up += 1
            self.stats.failures[HANGS] = self.stats.failures.get(HANGS, 0) + 1
            started = self._shared_out(lane, wave)
            self._lanes += started
        for each in started:
            each.thread.start()

    def _shared_out(self, lane: Lane, wave: Wave) -> list[Lane]:
        """Return new lanes for a lane's work except the call that hangs.

        One lane takes the rest of that GPU, the other takes the other GPUs.
        """
        place = wave.taken_at
        step, job = wave.steps[place], wave.job_at(place)
        kept = job.remove(step)
        jobs = [*lane.jobs, *(each for incoming in lane.incoming for each in incoming)]
        untold, rest = [*lane.untold, *wave.done(place)], wave.rest(place + 1)
        lane.reader, lane.alone, lane.given_up = job.reader, kept, True
        lane.jobs, lane.incoming, lane.untold = [job.alone(step)] if kept else [], [], []
        lanes = []
        for name, same in ((f"device {job.index}", True), (lane.name, False)):
            mine = [each for each in jobs if (each.index == job.index) is same]
            rounds = [each for each in untold if (each.job.index == job.index) is same]
            left = [(each, steps) for each, steps in rest if (each.index == job.index) is same]
            if mine:
                lanes.append(Lane(self, name, mine, lane.limit_ns, rounds, left))
        return lanes

    def _split(self, lane: Lane, step: NvmlStep, since_ns: int) -> None:
        """Split a batch that hangs into single fields, in its GPU's lane.

        One of the fields is the one that hangs.
        """
        parts = lane.reader.split(step)
        if not parts:
            return
        with self._lock:
            home, wave = self._home(lane.jobs[0]), lane.wave
            if home is None or wave is None or not (lane.given_up or wave.take(since_ns)):
                return
            lane.alone, lane.given_up, lane.jobs = False, True, []
            home.add(parts)

    def _home(self, job: ReadingJob) -> ReadingJob | None:
        """Return the job of the device's own lane that reads at the same pace.

        A job that had no other step is started again.
        """
        plain = [lane for lane in self._lanes if not (lane.alone or lane.ending or lane.given_up)]
        own = [(lane, each) for lane in plain for each in lane.jobs if each.reader is job.reader]
        for _, each in own:
            if each.pace is job.pace:
                return each
        reads = [lane for lane, each in own if each.pace is not Pace.SNAPSHOT]
        home = job.reader.jobs.get(job.pace)
        if not reads or home is None or job.pace is Pace.SNAPSHOT:
            return None
        home.next_ns = self.clock.mono_ns()
        reads[0].incoming.append([home])
        return home
