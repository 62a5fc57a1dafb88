"""Functions that tests run in a child with the double and the sampler's threads.

Each function returns plain data for the test to check.
Time is real, but an event "at" a time happens once ``control().set`` has reached it. For virtual time see ``virtual.py``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from handrail.device_counters.gpu import Pace
from handrail.records import ProcessEvent
from handrail.records.devices import DeviceSample
from handrail_sidecar.gpu import view as view_module
from handrail_sidecar.gpu.devices import NvmlUnavailable, open_nvml
from handrail_sidecar.gpu.nvml_calls import CallTask
from handrail_sidecar.gpu.sampler import Sampler
from handrail_sidecar.gpu.state import SamplerSettings
from handrail_sidecar.gpu.view import absences, fresh_values
from handrail_sidecar.sampling import worker as worker_module
from nvml.child import control
from nvml.virtual import PROCESS, at_pace

_S = 10**9


class Running:
    """A running sampler with its samples and events.

    Every wait is for an event, with a deadline that only a fault can reach.
    """

    def __init__(self, **settings: Any) -> None:
        self.samples: list[DeviceSample] = []
        self.events: list[ProcessEvent] = []
        self.problems: list[int] = []  # why NVML could not be opened
        self._some = threading.Condition()
        chosen = SamplerSettings(**{"first_retry_s": 0.02, **settings})
        self.sampler = Sampler(chosen, PROCESS, self._take, self._event, environment={}, open_session=self._open)
        self.sampler.start()

    def _open(self) -> Any:
        try:
            return open_nvml()
        except NvmlUnavailable as problem:
            self.problems.append(problem.code)
            raise

    def _take(self, sample: DeviceSample) -> None:
        with self._some:
            self.samples.append(sample)
            self._some.notify_all()

    def _event(self, event: ProcessEvent) -> None:
        with self._some:
            self.events.append(event)
            self._some.notify_all()

    def until(self, what: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        with self._some:
            while not what():
                left = deadline - time.monotonic()
                assert left > 0, f"not within {within_s} s; state {self.sampler.state}, stats {self.sampler.stats}"
                self._some.wait(min(left, 0.05))

    def count(self, name: str, index: int = 0, label: str | None = None) -> int:
        """Return how many samples of a GPU hold this value."""
        return sum(
            sample.device.index == index and any(each.name == name and label in (None, each.label) for each in sample.values)
            for sample in list(self.samples)
        )

    def more(self, name: str, index: int, by: int = 3) -> None:
        """Wait for ``by`` more samples of the value."""
        goal = self.count(name, index) + by
        self.until(lambda: self.count(name, index) >= goal)

    def kinds(self) -> list[str]:
        return [event.kind.value for event in self.events]


def hang(hung: str, others: list[str], period_ms: int = 50) -> dict[str, Any]:
    """A call of GPU 1 hangs from the start while the other GPUs go on.

    When released, the call returns and one thread reads all values again.
    """
    worker_module.WELL_NS = 250_000_000  # type: ignore[misc]
    running = Running(period_ns=period_ms * 1_000_000)
    sampler = running.sampler
    running.until(lambda: sampler.stats.given_up > 0)
    for name in others:
        running.more(name, 1)
        running.more(name, 0)
    during = running.count(hung, 1)
    hanging = [task.name for task, _ in sampler.hanging()]
    page = {value.name for device, value in fresh_values(sampler) if device.index == 1}
    control().release()
    running.until(lambda: running.count(hung, 1) > during)
    running.until(lambda: sampler.pool is not None and len(sampler.pool.workers()) == 1)  # all have rejoined
    for index in (0, 1):
        running.more("power_watts", index)
        running.more(hung, index)
    after = {
        "during": during,
        "hanging": hanging,
        "given_up": sampler.stats.given_up,
        "fresh": sorted(page),
        "after": running.count(hung, 1),
        "not_replaced": sampler.stats.not_replaced,
        "steps": sorted(task.name for task in at_pace(sampler.readers["GPU-fake-1"], Pace.TICK)),
    }
    sampler.stop()
    return after


def goes_stale() -> dict[str, Any]:
    """A value is no longer shown when its call hangs; the other values are."""
    view_module._STALE_NS = 100_000_000  # type: ignore[misc]
    running = Running(period_ns=50_000_000)

    def shown() -> set[str]:
        return {value.name for device, value in fresh_values(running.sampler) if device.index == 1}

    running.until(lambda: "utilization_ratio" in shown())
    control().set(3 * _S)
    running.until(lambda: bool(running.sampler.stats.given_up))
    running.until(lambda: "utilization_ratio" not in shown() and {"power_watts", "pcie_bytes"} <= shown())
    control().release()
    running.until(lambda: "utilization_ratio" in shown())
    running.sampler.stop()
    return {"others": True}


def everything_of_one_gpu_hangs() -> dict[str, Any]:
    """Every call of GPU 1 hangs; GPU 0 goes on and stopping does not wait.

    Threads stay bounded.
    """
    running = Running(period_ns=20_000_000)
    sampler = running.sampler
    running.more("utilization_ratio", 1)
    control().set(1 * _S)
    running.until(lambda: sampler.stats.not_replaced > 0)
    running.more("utilization_ratio", 0, by=20)
    workers = sampler.pool.workers() if sampler.pool else []
    given_up = [each for each in workers if each.alone is not None and each.alone.device == "1"]
    sampler.stop(0.2)
    return {"threads": len(workers), "given_up": len(given_up), "faults": sampler.stats.faults}


def hangs_from_the_start() -> dict[str, Any]:
    """GPU 1 answers nothing when the sampler starts; GPU 0 is still read.

    When released, GPU 1 is read too.
    """
    running = Running(period_ns=20_000_000, answer_within_s=0.2)
    running.more("utilization_ratio", 0)
    lost = dict(running.sampler.state.lost)
    control().release()
    running.more("utilization_ratio", 1)
    running.sampler.stop()
    return {"lost": lost, "kinds": running.kinds()}


def init_until_ready() -> dict[str, Any]:
    running = Running(period_ns=20_000_000)
    running.until(lambda: running.count("utilization_ratio") > 3)
    running.sampler.stop()
    return {"problems": running.problems, "sessions": running.sampler.state.sessions, "faults": running.sampler.stats.faults}


def no_library() -> dict[str, Any]:
    running = Running()
    running.until(lambda: running.sampler.state.problem is not None)
    problem = running.sampler.state.problem
    assert problem is not None
    running.sampler.stop()
    return {"code": problem.code, "words": problem.words, "remedy": problem.remedy, "events": running.kinds()}


def lost_and_back() -> dict[str, Any]:
    """GPU 1 is lost at 1 s and back at 2 s of the double's time; GPU 0 never stops."""
    running = Running(period_ns=20_000_000)
    running.more("pcie_bytes", 1)
    control().set(1 * _S)
    running.until(lambda: "gpu_lost" in running.kinds())
    lost_lines = [event.detail for event in running.events if event.kind.value == "gpu_lost"]
    running.more("utilization_ratio", 0)
    page = sorted({device.index or 0 for device, _ in fresh_values(running.sampler)})
    control().set(2 * _S)
    running.until(lambda: "gpu_back" in running.kinds())
    running.more("pcie_bytes", 1)
    of_one = [sample for sample in running.samples if sample.device.index == 1]
    starts = {each.start_unix_ns for sample in of_one for each in sample.values if each.name == "pcie_bytes"}
    running.sampler.stop()
    return {
        "lost": lost_lines,
        "page": page,
        "kinds": running.kinds(),
        "starts": len(starts),
        "sessions": running.sampler.state.sessions,
    }


def samples_to_the_end(lost: bool) -> dict[str, Any]:
    """Count how often the clock of GPU 1 was read and how often it was reported.

    Counted once the GPU is lost or the sampler has stopped.
    """
    running = Running(period_ns=20_000_000)
    running.until(lambda: "GPU-fake-1" in running.sampler.readers)
    reader = running.sampler.readers["GPU-fake-1"]
    running.more("clock_hertz", 1, by=12)
    (task,) = [each for each in reader.tasks if each.name == "nvmlDeviceGetClockInfo 1"]
    assert isinstance(task, CallTask)
    query, stops_within_it = task.calls, False  # calls whose answers were reported
    call = task._ask

    def counted() -> Any:
        nonlocal query
        answer = call()
        query += 1
        if stops_within_it and running.sampler.pool is not None:
            running.sampler.pool.stopped = True
        return answer

    stops_within_it = False
    task._ask = counted
    if lost:
        control().set(3 * _S)
        running.until(lambda: "gpu_lost" in running.kinds())
    else:
        stops_within_it = True
        running.until(lambda: running.sampler.pool is None or running.sampler.pool.stopped)
        running.sampler.stop(30.0)
    found = {"queried": query, "delivered": running.count("clock_hertz", 1, "sm")}
    running.sampler.stop()
    return found


def driver_restart() -> dict[str, Any]:
    """The driver goes at 1 s and another one is there 1 s later.

    The sampler opens a new session, and counters have a new start.
    """
    running = Running(period_ns=20_000_000)
    running.more("pcie_bytes", 0)
    control().set(round(1.5 * _S))
    running.until(lambda: "gpu_lost" in running.kinds())
    control().set(3 * _S)
    running.until(lambda: running.sampler.state.sessions >= 2)
    running.more("pcie_bytes", 0)
    running.sampler.stop()
    starts = {each.start_unix_ns for sample in running.samples for each in sample.values if each.name == "pcie_bytes"}
    return {"kinds": running.kinds(), "sessions": running.sampler.state.sessions, "starts": len(starts)}


def xids(expected: int) -> dict[str, Any]:
    """Count Xid errors that come once the sampler waits for them."""
    import pynvml

    waits, wait = threading.Event(), pynvml.nvmlEventSetWait_v2

    def counted(*arguments: Any) -> Any:
        waits.set()
        return wait(*arguments)

    pynvml.nvmlEventSetWait_v2 = counted
    running = Running(period_ns=20_000_000)
    running.until(waits.is_set)
    control().set(1 * _S)
    running.until(lambda: sum(running.sampler.xids.values()) >= expected)
    counts = {f"{uuid} {code}": count for (uuid, code), count in running.sampler.xids.items()}
    page = {
        f"{device.index} {value.label}": value.value
        for device, value in fresh_values(running.sampler)
        if value.name == "xid_errors" and (value.value or value.label == "79")
    }
    running.until(lambda: running.count("xid_errors", 1) > 0)
    running.until(lambda: len(running.events) >= len(running.sampler.xids))  # each code of each GPU is reported
    running.sampler.stop()
    return {"counts": counts, "page": page, "details": [event.detail for event in running.events]}


def unknown_then_refused() -> dict[str, Any]:
    """F18: read two GPUs of which most calls fail."""
    running = Running(period_ns=20_000_000)
    sampler = running.sampler
    running.until(lambda: sampler.stats.failures.get(999, 0) > 0)
    control().set(1 * _S)
    running.until(lambda: ("utilization_ratio", "") in sampler.readers["GPU-fake-0"].absent if sampler.readers else False)
    running.more("memory_used_bytes", 0, by=6)
    found = {
        "listed": sorted(sampler.readers),
        "memory": running.count("memory_used_bytes", 0),
        "utilization": running.count("utilization_ratio", 0),
        "retried": sampler.stats.failures.get(999, 0),
        "absent": {
            f"{uuid} {name}": code for uuid, reader in sampler.readers.items() for (name, _), code in reader.absent.items()
        },
        "orin_values": sorted({each.name for sample in running.samples if sample.device.index == 1 for each in sample.values}),
        "alive": bool(sampler.pool and sampler.pool.workers()),
        "faults": sampler.stats.faults,
    }
    sampler.stop()
    return found


def garbage() -> dict[str, Any]:
    """Read a driver that returns nonsense about itself."""
    running = Running(period_ns=20_000_000)
    running.more("utilization_ratio", 1)
    found = {
        "read": sorted(running.sampler.readers),
        "lost": dict(running.sampler.state.lost),
        "faults": running.sampler.stats.faults,
        "products": [reader.gpu.device.product for reader in running.sampler.readers.values()],
    }
    running.sampler.stop()
    return found


def snapshots() -> dict[str, Any]:
    """Without byte counters, the call that blocks for 20 ms runs beside the loop."""
    running = Running(period_ns=20_000_000)
    running.until(lambda: running.count("pcie_snapshot_bytes_per_second") > 0)
    running.more("utilization_ratio", 0, by=10)
    values = {
        each.label: each.value
        for sample in running.samples
        for each in sample.values
        if each.name == "pcie_snapshot_bytes_per_second"
    }
    readers = list(running.sampler.readers.values())
    apart = [task.worker.group for reader in readers for task in at_pace(reader, Pace.SNAPSHOT) if task.worker is not None]
    in_loop = any(
        {"utilization_ratio", "pcie_snapshot_bytes_per_second"} <= {each.name for each in sample.values}
        for sample in running.samples
    )
    absent = [each.counter for each in absences(running.sampler.readers.values(), None)]
    running.sampler.stop()
    return {"values": values, "lanes": apart, "in_loop": in_loop, "absent": absent}


def reported(samples: int) -> dict[str, Any]:
    """Return what the source logs about absent counters, and what its page holds."""
    import logging

    from handrail.metrics.registry import Registry
    from handrail_sidecar.live_metrics.gpu_metrics import gpu_rows
    from handrail_sidecar.sources import gpu as source_module
    from handrail_sidecar.sources.gpu import NvmlSource

    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("handrail_sidecar").addHandler(Kept())
    logging.getLogger("handrail_sidecar").setLevel(logging.INFO)
    source_module.LOOK_S = 0.05  # type: ignore[misc]

    async def main() -> str:
        reported_lines: list[str] = []
        source = NvmlSource(SamplerSettings(period_ns=20_000_000), PROCESS, lambda event: reported_lines.append(event.kind.value))
        await source.start()
        while source.sampler.stats.samples < samples:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # samples are taken in other threads
        page, _ = Registry(gpu_rows(source.sampler)).expose("text/plain")
        await source.shutdown(1.0)
        await source.shutdown(1.0)
        return page.decode()

    return {"page": asyncio.run(main()), "lines": lines}


def open_and_close(times: int) -> dict[str, int]:
    """Return the number of threads after opening and closing many samplers."""
    from handrail_sidecar.gpu import xids as xids_module

    xids_module.WAIT_MS = 10  # type: ignore[misc]
    for _ in range(times):
        running = Running(period_ns=20_000_000)
        running.until(lambda running=running: running.count("utilization_ratio") > 0)  # type: ignore[misc]
        running.sampler.stop(5.0)
    deadline = time.monotonic() + 30
    while len(threading.enumerate()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"threads": len(threading.enumerate())}
