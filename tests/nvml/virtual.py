"""Functions that tests run in a child with the double, in virtual time.

Each function returns plain data for the test to check.
No threads run: jobs are read when they are due, and the reader uses the double's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from handrail.device_counters.gpu import Pace
from handrail.records import Process, Role
from handrail.records.devices import DeviceSample
from handrail_sidecar.gpu.call_batch import read_round
from handrail_sidecar.gpu.devices import list_gpus, open_nvml, versions
from handrail_sidecar.gpu.processes import processes_of
from handrail_sidecar.gpu.reader import DeviceReader, ReadingJob
from handrail_sidecar.gpu.view import absences
from handrail_sidecar.gpu.visible import Visible
from handrail_sidecar.gpu.window import GpmStep
from nvml.child import control

PROCESS = Process(role=Role.DECODE, instance="10.0.0.7:8200", host="h")
_BEGAN_UNIX_NS = 1_800_000_000 * 10**9


class VirtualClock:
    """The double's clock."""

    def __init__(self) -> None:
        self.control = control()

    def mono_ns(self) -> int:
        return self.control.now_ns

    def unix_ns(self) -> int:
        return _BEGAN_UNIX_NS + self.control.now_ns


def readers(clock: VirtualClock, period_ns: int = 100_000_000) -> list[DeviceReader]:
    nvml = open_nvml()
    gpus, _ = list_gpus(nvml)
    return [DeviceReader(nvml, gpu, clock, PROCESS, period_ns, together=len(gpus)) for gpu in gpus]


def jobs_of(all_readers: list[DeviceReader]) -> list[ReadingJob]:
    return [job for reader in all_readers for job in reader.lane_jobs()]


def virtual(
    seconds: float,
    period_ns: int,
    late_ns: Callable[[int], int] = lambda round_: 0,
    of: list[DeviceReader] | None = None,
) -> Iterator[DeviceSample]:
    """Yield every sample of a time span.

    Each job is read ``late_ns`` after it is due. ``of``: readers that the caller made.
    """
    clock = VirtualClock()
    all_readers = of if of is not None else readers(clock, period_ns)
    jobs, rounds = jobs_of(all_readers), 0
    for job in jobs:
        job.begin_at(1)
    while True:
        job = min(jobs, key=lambda each: each.next_ns)
        if job.next_ns > seconds * 1e9:
            return
        rounds += 1
        clock.control.set(max(clock.control.now_ns, job.next_ns + late_ns(rounds)))
        before = job.reader.lane_jobs()
        sample = read_round(job, clock)
        job.plan_next(clock.mono_ns())
        if job.reader.lane_jobs() != before:
            jobs = jobs_of(all_readers)
        if sample is not None:
            yield sample


def byte_counters(seconds: float, period_ns: int, jitter_ns: int) -> dict[str, Any]:
    """Return the first and the last value of every byte counter.

    Includes their times on the double's clock, and how often each counter was read.
    """
    ends: dict[str, Any] = {}
    falls = 0
    for sample in virtual(seconds, period_ns, lambda round_: (round_ * 7_919_003) % (jitter_ns + 1)):
        for value in sample.values:
            if value.name in ("pcie_bytes", "nvlink_bytes"):
                key = f"{sample.device.index} {value.name} {value.label}"
                known = ends.setdefault(
                    key, {"first": value.value, "first_ns": sample.at_unix_ns - _BEGAN_UNIX_NS, "reads": 0, "starts": []}
                )
                falls += value.value < known.get("last", 0)
                known["last"], known["last_ns"] = value.value, sample.at_unix_ns - _BEGAN_UNIX_NS
                known["reads"] += 1
                if value.start_unix_ns not in known["starts"]:
                    known["starts"].append(value.start_unix_ns)
    return {"ends": ends, "falls": falls}


def reads(seconds: float, name: str) -> dict[int, int]:
    """Count how often a counter was reported at 10 Hz, by GPU."""
    counter = Counter(
        sample.device.index for sample in virtual(seconds, 100_000_000) for value in sample.values if value.name == name
    )
    return {index: count for index, count in counter.items() if index is not None}


def paces(seconds: float) -> dict[str, Any]:
    """Return the pace at which each value of the first GPU is read in the end.

    Also returns which values are absent and how often the byte counters restarted.
    """
    (reader,) = every = readers(VirtualClock())
    for _ in virtual(seconds, 100_000_000, of=every):
        pass
    slots = {f"{slot.name} {slot.label}".strip(): slot for slot in reader.slots if slot.how is not None}
    return {
        "paces": {name: slot.pace.value for name, slot in slots.items()},
        "absent": sorted({name for name, _ in reader.absent}),
        "anew": sum(growth.lost for slot in slots.values() for growth in slot.growths.values()),
    }


def windows_apart(seconds: float) -> dict[str, Any]:
    """Return the age (ms) of the last byte reading after performance monitoring hangs.

    Performance monitoring hangs at its second read and then goes on alone.
    """
    clock = VirtualClock()
    (reader,) = readers(clock)
    alone: list[ReadingJob] = []
    lane: list[ReadingJob] = []
    for tick in range(1, int(seconds * 10)):
        clock.control.set(tick * 100_000_000)
        lane = lane or reader.lane_jobs()
        for job in [*lane, *alone]:
            job.begin_at(clock.mono_ns())
            if job.next_ns <= clock.mono_ns():
                before = reader.lane_jobs()
                read_round(job, clock)
                job.plan_next(clock.mono_ns())
                if job not in alone and reader.lane_jobs() != before:
                    lane = reader.lane_jobs()  # as a lane does, and only after its own rounds
        windows = reader.jobs[Pace.WINDOW]
        if tick == 2:
            (step,) = [each for each in windows.steps if isinstance(each, GpmStep)]
            windows.remove(step)
            alone.append(windows.alone(step))
    now = clock.mono_ns()
    return {
        f"{slot.name} {slot.label}": (now - max(growth._began_ns for growth in slot.growths.values())) / 1e6
        for slot in reader.slots
        if slot.growths
    }


def values_at(seconds: float, period_ns: int) -> dict[str, Any]:
    """Return the last value of everything by device, and the absent values by device."""
    clock = VirtualClock()
    values: dict[str, dict[str, Any]] = {}
    all_readers = readers(clock, period_ns)
    jobs = jobs_of(all_readers)
    for tick in range(int(seconds * 1e9 / period_ns)):
        clock.control.set(1 + tick * period_ns)
        for job in jobs:
            sample = read_round(job, clock)
            for value in sample.values if sample is not None else ():
                label = f"{value.name}{{{value.label}}}" if value.label else value.name
                values.setdefault(job.reader.gpu.device.key, {})[label] = value.value
        jobs = jobs_of(all_readers)
    return {
        "values": values,
        "absent": {
            reader.gpu.device.key: {
                f"{name}{{{label}}}" if label else name: code for (name, label), code in reader.absent.items()
            }
            for reader in all_readers
        },
        "parents": {reader.gpu.device.key: reader.gpu.device.parent for reader in all_readers},
        "snapshots": [reader.gpu.device.key for reader in all_readers if Pace.SNAPSHOT in reader.jobs],
    }


def page(columns: int) -> str:
    """Return what ``handrail gpus`` shows after 1.2 s of the double's clock.

    ``columns``: width of the terminal.
    """
    import contextlib
    import io
    import os

    from handrail_cli.console import answer_console
    from handrail_cli.gpus_view import GpuListing, GpuWindow
    from handrail_cli.render.gpus import show_gpus

    nvml, clock, seen = open_nvml(), VirtualClock(), GpuWindow()
    gpus, lost = list_gpus(nvml)
    all_readers = [DeviceReader(nvml, gpu, clock, PROCESS, 100_000_000) for gpu in gpus]
    for sample in virtual(1.2, 100_000_000, of=all_readers):
        seen.take(sample)
    driver, version = versions(nvml)
    found = GpuListing(
        driver=driver,
        nvml=version,
        devices=tuple(gpu.device for gpu in gpus),
        seen=seen,
        absent=tuple(absences(all_readers, None)),
        lost=lost,
        stuck=(),
        processes=tuple(each for gpu in gpus if not gpu.is_mig for each in processes_of(nvml, gpu)),
        visible=Visible(keys=None),
        failures={},
    )
    os.environ.update(COLUMNS=str(columns), NO_COLOR="1")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_gpus(answer_console(in_pipe=columns), found)
    return out.getvalue()


def windows(gaps_ms: list[int]) -> list[dict[str, float]]:
    """Return what performance monitoring reports when read after each of these gaps."""
    clock = VirtualClock()
    (reader,) = readers(clock)
    found, now = [], 1
    for gap in gaps_ms:
        now += gap * 1_000_000
        clock.control.set(now)
        sample = read_round(reader.jobs[Pace.WINDOW], clock)
        found.append({value.name + value.label: value.value for value in sample.values} if sample is not None else {})
    return found


def field_rates(gap_s: float) -> dict[str, Any]:
    """F08: return the growth per second of NVLink bytes between two reads.

    Also returns what the first read alone gives.
    """
    clock = VirtualClock()
    (reader,) = readers(clock)
    read: list[dict[str, int]] = []
    for at in (0.0, 0.1, 0.1 + gap_s):
        clock.control.set(1 + int(at * 1e9))
        sample = read_round(reader.jobs[Pace.TICK], clock)
        values = sample.values if sample is not None else ()
        read.append({value.label: int(value.value) for value in values if value.name == "nvlink_bytes"})
    return {"reads": read, "rates": {label: (read[2][label] - read[1][label]) / gap_s for label in read[2]}}


def processes(proc: str) -> list[dict[str, Any]]:
    from dataclasses import asdict
    from pathlib import Path

    nvml = open_nvml()
    gpus, _ = list_gpus(nvml)
    return [asdict(each) for gpu in gpus for each in processes_of(nvml, gpu, Path(proc))]


def called_twice() -> dict[str, Any]:
    """Report two answers of one batch after both calls were made.

    Some fields of the batch are refused.
    """
    clock = VirtualClock()
    (reader,) = readers(clock)
    (step,) = [each for each in reader.jobs[Pace.TICK].steps if each.name.startswith("fields")]
    answers = []
    for now in (1, 100_000_001):
        clock.control.set(now)
        answers.append((step.asking()(), now, now, now))
    reports = [[value.name for value in step.values(*answer)] for answer in answers]
    return {"told": reports, "gone": [slot.name for slot, _ in step.gone], "left": [slot.name for slot in step.slots]}
