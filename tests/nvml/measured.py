"""Measure the sampler's cost and its timing, in a child that has the double.

The double's sleeps use no processor time.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from typing import Any, Final

from handrail.device_counters.gpu import Pace
from handrail.records.devices import DeviceSample
from handrail_sidecar.gpu.devices import list_gpus, open_nvml
from handrail_sidecar.gpu.reader import DeviceReader
from handrail_sidecar.gpu.sampler import Sampler
from handrail_sidecar.gpu.state import SamplerSettings, SystemClock
from handrail_sidecar.gpu.view import all_tasks
from nvml.scenario import UNSIGNED_INT, Scenario, h100
from nvml.virtual import PROCESS, at_pace, in_loop, read_once

LATENCIES: Final = {
    "field.197": 150e-6,
    "field.198": 150e-6,
    "field.138": 150e-6,
    "field.139": 150e-6,
    "field.83": 2.6e-3,
    "field.82": 1.2e-3,
    "field.94": 100e-6,
    "ComputeRunningProcesses": 200e-6,
    "EnforcedPowerLimit": 100e-6,
    "GpmSampleGet": 1e-3,
}
"""Seconds that a call takes, or adds to its batch.

From public measurements on a PCIe 5 GPU with driver 610: PCIe byte fields 0.2 to 0.4 ms, energy 2.6 ms, memory temperature 1.2
ms, processes 0.2 ms.
Utilisation, clocks, power and throttle reasons take below 4 us, so they do not sleep.
NVLink fields and performance monitoring are assumptions: no measurement was found.
"""

WINDOW_SLEEPS, TICKS_A_WINDOW, OTHER_SLEEPS = 16, 4, 1
"""How often calls sleep, for eight GPUs at 10 Hz.

At every fourth tick each GPU reads a batch of bytes and a sample of performance monitoring; 10 other calls sleep per second.
"""


def realistic(count: int = 8) -> Scenario:
    """Build eight H100s with realistic latencies and values that change at every read.

    Values that do not change cost less to read.
    """
    moving = [
        f"gpu * set field.186 400000 rate 1000 type {UNSIGNED_INT}",
        "gpu * set clock.1 1000 rate 10",
        "gpu * set utilization 1 rate 1",
        *(f"gpu * set gpm.{metric} 1.0 rate 0.5" for metric in (2, 3, 5, 10, 20, 21, 60, 61)),
    ]
    return h100(count).add(*moving, *(f"gpu * latency {call} {seconds}" for call, seconds in LATENCIES.items()))


def cost(interval_ms: float, seconds: float, warm_s: float = 3.0) -> dict[str, Any]:
    """Measure the sampler's processor time, as a fraction of one core.

    The process's time includes the double's. Also returns the time that calls took.
    """
    samples = 0

    def take(_: DeviceSample) -> None:
        nonlocal samples
        samples += 1

    sampler = Sampler(SamplerSettings(period_ns=int(interval_ms * 1e6)), PROCESS, take, lambda event: None, environment={})
    sampler.start()
    time.sleep(warm_s)
    began, cpu, taken, inside, missed = time.monotonic(), time.process_time(), samples, _inside(sampler), sampler.stats.missed
    time.sleep(seconds)
    took = time.monotonic() - began
    found = {
        "core": (time.process_time() - cpu) / took,
        "samples": (samples - taken) / took,
        "inside": (_inside(sampler) - inside) / took,
        "missed": sampler.stats.missed - missed,
        "threads": len(threading.enumerate()),
    }
    sampler.stop()
    return found


def sleeping(seconds: float) -> float:
    """Measure the cost of the double's sleeps alone, as a fraction of one core.

    No sampler in Python costs less on this machine.
    """
    libc = ctypes.CDLL(None)
    began, cpu, tick = time.monotonic(), time.process_time(), 0
    while time.monotonic() - began < seconds:
        for _ in range(OTHER_SLEEPS + (0 if tick % TICKS_A_WINDOW else WINDOW_SLEEPS)):
            libc.usleep(700)
        tick += 1
        time.sleep(max(0.0, began + tick * 0.1 - time.monotonic()))
    return (time.process_time() - cpu) / (time.monotonic() - began)


def bare(seconds: float) -> float:
    """Measure the cost of the sampler's calls alone, as a fraction of one core.

    A loop makes the calls of the ticks and ignores their answers.
    """
    nvml = open_nvml()
    clock = SystemClock()
    readers = [DeviceReader(nvml, gpu, clock, PROCESS, 100_000_000, together=8) for gpu in list_gpus(nvml)[0]]
    for _ in range(8):  # until bytes are read with the windows
        for reader in readers:
            read_once(reader, in_loop(reader), clock)
        time.sleep(0.2)
    ticks, windows = ([task.call for each in readers for task in at_pace(each, pace)] for pace in (Pace.TICK, Pace.WINDOW))
    began, cpu, tick = time.monotonic(), time.process_time(), 0
    while time.monotonic() - began < seconds:
        for call in ticks if tick % TICKS_A_WINDOW else [*ticks, *windows]:
            call()
        tick += 1
        time.sleep(max(0.0, began + tick * 0.1 - time.monotonic()))
    return (time.process_time() - cpu) / (time.monotonic() - began)


def gaps(seconds: float, interval_ms: float = 100.0) -> dict[str, Any]:
    """Measure the longest time between two samples of each counter, in periods.

    Covers the counters that are read at every tick; by counter and GPU.
    """
    last: dict[tuple[str, str, str], int] = {}
    longest: dict[tuple[str, str, str], float] = defaultdict(float)
    began = time.monotonic()

    def take(sample: DeviceSample) -> None:
        if time.monotonic() - began < 3.0:
            return  # the cost of a start is not measured here
        for value in sample.values:
            key = (sample.device.key, value.name, value.label)
            if key in last:
                longest[key] = max(longest[key], (sample.at_unix_ns - last[key]) / (interval_ms * 1e6))
            last[key] = sample.at_unix_ns

    sampler = Sampler(SamplerSettings(period_ns=int(interval_ms * 1e6)), PROCESS, take, lambda event: None, environment={})
    sampler.start()
    time.sleep(seconds)
    sampler.stop()
    names = {"clock_hertz", "power_watts"}  # read at every tick
    return {
        "longest": {
            f"{uuid} {name} {label}".strip(): gap
            for (uuid, name, label), gap in longest.items()
            if name in names and label != "memory"
        },
        "given_up": sampler.stats.given_up,
    }


def _inside(sampler: Sampler) -> float:
    return sum(task.spent_ns for task in all_tasks(sampler)) / 1e9
