"""Functions that tests run in a child with the double, in virtual time.

Each function returns plain data for the test to check.
No threads run: calls are made when they are due, and the reader uses the double's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from handrail.device_counters.gpu import Pace
from handrail.records import Process, Role
from handrail.records.devices import DeviceSample
from handrail_sidecar.gpu.devices import list_gpus, open_nvml, versions
from handrail_sidecar.gpu.gpm import GpmTask
from handrail_sidecar.gpu.nvml_calls import NvmlTask
from handrail_sidecar.gpu.processes import processes_of
from handrail_sidecar.gpu.reader import DeviceReader
from handrail_sidecar.gpu.view import absences
from handrail_sidecar.gpu.visible import Visible
from handrail_sidecar.sampling.worker import Reading
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


def read_once(reader: DeviceReader, tasks: Sequence[NvmlTask], clock: Any) -> DeviceSample | None:
    """Make these calls of a device once, in this thread."""
    readings = []
    for task in tasks:
        missed, began_ns = task.plan(clock.mono_ns()), clock.mono_ns()
        try:
            answer = task.call()
        except Exception as error:
            answer = error
        readings.append(Reading(task, answer, began_ns, clock.mono_ns(), missed))
    return reader.take(readings) if readings else None


def in_loop(reader: DeviceReader) -> list[NvmlTask]:
    """Return the calls that do not block by design."""
    return [task for task in reader.tasks if task.pace is not Pace.SNAPSHOT]


def at_pace(reader: DeviceReader, *paces: Pace) -> list[NvmlTask]:
    return [task for task in reader.tasks if task.pace in paces]


def virtual(
    seconds: float,
    period_ns: int,
    late_ns: Callable[[int], int] = lambda round_: 0,
    of: list[DeviceReader] | None = None,
) -> Iterator[DeviceSample]:
    """Yield every sample of a time span.

    Each device is read ``late_ns`` after a call is due, once for all that is due then. ``of``: readers that the caller made.
    """
    clock = VirtualClock()
    all_readers, rounds = of if of is not None else readers(clock, period_ns), 0
    while True:
        due_ns, reader = min(
            ((task.next_ns, reader) for reader in all_readers for task in in_loop(reader)), key=lambda each: each[0]
        )
        if due_ns >= seconds * 1e9:
            return
        rounds += 1
        clock.control.set(max(clock.control.now_ns, 1, due_ns + late_ns(rounds)))
        sample = read_once(reader, [task for task in in_loop(reader) if task.next_ns <= due_ns], clock)
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

    Performance monitoring hangs at its second read and is read in rounds of its own from then on.
    """
    clock = VirtualClock()
    (reader,) = readers(clock)
    for tick in range(1, int(seconds * 10)):
        clock.control.set(tick * 100_000_000)
        for alone in (False, True):
            due = [task for task in in_loop(reader) if task.next_ns <= clock.mono_ns()]
            if tick < 2:
                read_once(reader, due, clock)
            elif not (alone and tick == 2):
                read_once(reader, [task for task in due if isinstance(task, GpmTask) is alone], clock)
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
    for tick in range(int(seconds * 1e9 / period_ns)):
        clock.control.set(1 + tick * period_ns)
        for reader in all_readers:
            sample = read_once(reader, in_loop(reader), clock)
            for value in sample.values if sample is not None else ():
                label = f"{value.name}{{{value.label}}}" if value.label else value.name
                values.setdefault(reader.gpu.device.key, {})[label] = value.value
    return {
        "values": values,
        "absent": {
            reader.gpu.device.key: {
                f"{name}{{{label}}}" if label else name: code for (name, label), code in reader.absent.items()
            }
            for reader in all_readers
        },
        "parents": {reader.gpu.device.key: reader.gpu.device.parent for reader in all_readers},
        "snapshots": [reader.gpu.device.key for reader in all_readers if at_pace(reader, Pace.SNAPSHOT)],
    }


def page(columns: int) -> str:
    """Return what ``handrail gpus`` shows after 1.2 s of the double's clock.

    ``columns``: width of the terminal.
    """
    import contextlib
    import io
    import os

    from handrail_cli.console import answer_console
    from handrail_cli.render.gpus import GpuListing, GpuWindow, show_gpus

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
        sample = read_once(reader, at_pace(reader, Pace.WINDOW), clock)
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
        sample = read_once(reader, at_pace(reader, Pace.TICK), clock)
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
    (task,) = [each for each in at_pace(reader, Pace.TICK) if each.name.startswith("fields")]
    answers = []
    for now in (1, 100_000_001):
        clock.control.set(now)
        answers.append((task.call(), now, now, now))
    reports = [[value.name for value in task.values(*answer)] for answer in answers]
    return {"reported": reports, "gone": [slot.name for slot, _ in task.gone], "left": [slot.name for slot in task.slots]}
