"""The checks behind ``run.sh``, on a machine with a GPU.

Each check prints what it saw and whether that is as expected; all results go to report.json.
PyTorch copies a known size while the sampler counts.
PCIe counters include packet headers, so they are a few percent above what was copied.
A copy on the device reads and writes device memory: twice its size.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from handrail.device_counters.gpu import WINDOW
from handrail.records import Process, Role
from handrail.records.devices import DeviceSample
from handrail_cli.commands.gpus import sample_json
from handrail_sidecar.gpu.devices import NvmlUnavailable, open_nvml
from handrail_sidecar.gpu.sampler import Sampler
from handrail_sidecar.gpu.state import SamplerSettings
from handrail_sidecar.gpu.view import absences, all_tasks, supported

NO_GPU: Final = 3
_COPY_BYTES: Final = 1 << 30
_COPY_S: Final = 4.0
_WITHIN: Final = 0.10
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    ``good`` None: reported without a judgement. ``seen`` and ``expected`` are in ``unit``.
    """

    name: str
    seen: float
    unit: str
    expected: float | None = None
    good: bool | None = None
    note: str = ""


@dataclass(slots=True)
class Span:
    """What was sampled while data moved.

    Holds the values before and after the move, and the windows that lie wholly within it.
    """

    uuid: str
    before: dict[tuple[str, str], float]
    moved: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    after: dict[tuple[str, str], float] = field(default_factory=dict)
    samples: list[DeviceSample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9

    def grew(self, name: str, label: str) -> float | None:
        """Return the growth of a counter; None where the counter is absent."""
        before, after = self.before.get((name, label)), self.after.get((name, label))
        return None if before is None or after is None else after - before

    def mean(self, name: str, label: str = "") -> float | None:
        """Return the mean of a performance monitoring value, weighted by the windows."""
        total = weight = 0.0
        for sample in self.samples:
            values = {(each.name, each.label): each.value for each in sample.values}
            window = values.get((WINDOW.name, ""))
            if window is None or (name, label) not in values:
                continue
            if sample.at_unix_ns - window * 1e9 >= self.began_ns and sample.at_unix_ns <= self.ended_ns:
                total += values[name, label] * window
                weight += window
        return total / weight if weight else None


class Recorder:
    """A sampler whose samples are kept and written to a file."""

    def __init__(self, interval_ms: float, file: IO[str] | None = None) -> None:
        self.samples = 0
        self._values: dict[str, dict[tuple[str, str], float]] = {}
        self._span: Span | None = None
        self._file = file
        self._lock = threading.Lock()
        settings = SamplerSettings(period_ns=int(interval_ms * 1e6))
        process = Process(role=Role.UNKNOWN, instance="", host="")
        self.sampler = Sampler(settings, process, self._take, lambda event: print(f"  event: {event.detail}"), environment={})

    def __enter__(self) -> Recorder:
        self.sampler.start()
        deadline = time.monotonic() + 60
        while not (self.samples and all(task.calls for task in all_tasks(self.sampler))) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.5)  # a second time, for what is read once a second
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler.stop(2.0)
        with self._lock:
            self._file = None

    def over(self, uuid: str, seconds: float, work: Callable[[], int]) -> Span:
        """Repeat ``work`` and sample one GPU meanwhile.

        ``work`` returns how many bytes it moved.
        """
        time.sleep(0.5)  # idle, so that the last values are from before
        span = Span(uuid, dict(self._values.get(uuid, {})), began_ns=time.time_ns())
        self._span = span
        while time.time_ns() - span.began_ns < seconds * 1e9:
            span.moved += work()
        span.ended_ns = time.time_ns()
        time.sleep(1.5)  # what is read once a second as well
        self._span = None
        span.after = dict(self._values.get(uuid, {}))
        return span

    def _take(self, sample: DeviceSample) -> None:
        self.samples += 1
        self._values.setdefault(sample.device.key, {}).update({(each.name, each.label): each.value for each in sample.values})
        span = self._span
        if span is not None and sample.device.key == span.uuid:
            span.samples.append(sample)
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(sample_json(sample)) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for report.json and recording.jsonl")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each cost measurement (default: 20)")
    given = parser.parse_args()
    try:
        open_nvml().nvmlShutdown()
    except NvmlUnavailable as problem:
        print(f"no GPU to check: {problem.words}. {problem.remedy}", file=sys.stderr)
        return NO_GPU
    given.out.mkdir(parents=True, exist_ok=True)
    checks: list[Check] = []
    report: dict[str, Any] = {}
    with (given.out / "recording.jsonl").open("w", encoding="utf-8") as file, Recorder(100.0, file) as recorder:
        report.update(_availability(recorder.sampler))
        checks += _copies(recorder)
        report["calls"] = _latencies(recorder.sampler)
    checks += _costs(given.seconds)
    report["checks"] = [asdict(check) for check in checks]
    (given.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _print(report, checks)
    return 0 if all(check.good is not False for check in checks) else 1


def _availability(sampler: Sampler) -> dict[str, Any]:
    return {
        "driver": sampler.state.driver,
        "nvml": sampler.state.nvml,
        "gpus": [
            {"uuid": reader.gpu.device.key, "product": reader.gpu.device.product, "pcie": reader.gpu.pcie_line_bytes}
            for reader in sampler.readers.values()
        ],
        "available": sorted({name for _, name, given in supported(sampler) if given}),
        "absent": [
            {"counter": each.counter, "gpu": each.device.index, "code": each.code, "why": each.why}
            for each in absences(sampler.readers.values(), sampler.xid_watch)
        ],
        "width": {
            f"{reader.gpu.device.index} {slot.name} {slot.label}": [each.bits for each in slot.growths.values()]
            for reader in sampler.readers.values()
            for slot in reader.slots
            if slot.growths
        },
    }


def _latencies(sampler: Sampler) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}
    for task in all_tasks(sampler):
        known = found.setdefault(task.name, [0, 0, 0])
        known[0] += task.calls
        known[1] += task.spent_ns / 1e3
        known[2] = max(known[2], task.longest_ns / 1e3)
    return [
        {"call": name, "calls": calls, "mean_us": round(spent / calls, 1) if calls else 0.0, "longest_us": round(longest, 1)}
        for name, (calls, spent, longest) in sorted(found.items())
    ]


def _costs(seconds: float) -> list[Check]:
    found = []
    for interval_ms in (100.0, 10.0):
        with Recorder(interval_ms) as recorder:
            cpu, taken, began, missed = time.process_time(), recorder.samples, time.monotonic(), recorder.sampler.stats.missed
            time.sleep(seconds)
            took = time.monotonic() - began
            share = (time.process_time() - cpu) / took
            note = f"{(recorder.samples - taken) / took:.0f} samples/s, {recorder.sampler.stats.missed - missed} missed"
            found.append(Check(name=f"processor at {1000 / interval_ms:.0f} Hz", seen=100 * share, unit="% of a core", note=note))
    return found


def _copies(recorder: Recorder) -> list[Check]:
    try:
        import torch
    except ImportError:
        print("PyTorch is not here: the copies of known size are left out", file=sys.stderr)
        return []
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU: the copies of known size are left out", file=sys.stderr)
        return []
    uuid = _uuid(recorder.sampler, torch)
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(device)

    def copy(to: Any, source: Any) -> Callable[[], int]:
        def once() -> int:
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            return _COPY_BYTES

        return once

    return [
        *_link(recorder, uuid, "receive", copy(device, host)),
        *_link(recorder, uuid, "transmit", copy(host, device)),
        *_memory(recorder, uuid, copy(device, other)),
        *_tensor(recorder, uuid, torch),
    ]


def _link(recorder: Recorder, uuid: str, direction: str, work: Callable[[], int]) -> list[Check]:
    """Compare PCIe figures with what was copied.

    The figures are the counter's growth and the rate that performance monitoring reports.
    """
    span = recorder.over(uuid, _COPY_S, work)
    counted, rate = span.grew("pcie_bytes", direction), span.mean("pcie_bytes_per_second", direction)
    found = []
    if counted is not None:
        found.append(_compared(f"pcie_bytes {direction}", counted / _GIB, span.moved / _GIB, "GiB"))
    if rate is not None:
        found.append(_compared(f"pcie_bytes_per_second {direction}", rate / 1e9, span.moved / span.seconds / 1e9, "GB/s"))
    return found or [Check(name=f"pcie {direction}", seen=0, unit="", note="not given here")]


def _memory(recorder: Recorder, uuid: str, work: Callable[[], int]) -> list[Check]:
    """Compare device memory activity times bandwidth with twice what was copied."""
    span = recorder.over(uuid, _COPY_S, work)
    active = span.mean("dram_active_ratio")
    if active is None:
        return [Check(name="dram_active_ratio", seen=0, unit="", note="not given here")]
    return [
        _compared("device memory traffic", active * _memory_bandwidth(uuid) / 1e9, 2 * span.moved / span.seconds / 1e9, "GB/s")
    ]


def _memory_bandwidth(uuid: str) -> float:
    """Return the memory bandwidth in bytes per second.

    It is the highest memory clock, both edges, times the bus width.
    This is right for HBM; GDDR6 and later move more per clock.
    """
    nvml = open_nvml()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    clock: float = nvml.nvmlDeviceGetMaxClockInfo(handle, 2) * 1e6
    width: int = nvml.nvmlDeviceGetMemoryBusWidth(handle)
    return clock * 2 * width / 8


def _tensor(recorder: Recorder, uuid: str, torch: Any) -> list[Check]:
    """Keep the tensor pipes busy with large matrix products."""
    one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work() -> int:
        for _ in range(8):
            one @ one
        torch.cuda.synchronize()
        return 0

    active = recorder.over(uuid, _COPY_S, work).mean("tensor_active_ratio")
    if active is None:
        return []
    return [
        Check(
            name="tensor_active_ratio in products",
            seen=active,
            unit="ratio",
            expected=0.5,
            good=active > 0.5,
            note="above a half",
        )
    ]


def _uuid(sampler: Sampler, torch: Any) -> str:
    """Return NVML's UUID of PyTorch's first GPU."""
    output = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return next((key for key in sampler.readers if output and output in key), next(iter(sampler.readers)))


def _compared(name: str, seen: float, expected: float, unit: str) -> Check:
    off = seen / expected - 1 if expected else 1.0
    return Check(name=name, seen=seen, unit=unit, expected=expected, good=abs(off) <= _WITHIN, note=f"{off:+.1%}")


def _print(report: dict[str, Any], checks: list[Check]) -> None:
    products = ", ".join(sorted({gpu["product"] for gpu in report["gpus"]}))
    print(f"{len(report['gpus'])} GPUs ({products}), driver {report['driver']}")
    print(f"given: {', '.join(report['available'])}")
    for name in sorted({each["counter"] for each in report["absent"]}):
        which = [each for each in report["absent"] if each["counter"] == name]
        print(f"not given: {name} by GPU {', '.join(str(each['gpu']) for each in which)}: {which[0]['why']}")
    for call in report["calls"]:
        print(f"call {call['call']}: {call['calls']} calls, mean {call['mean_us']} us, longest {call['longest_us']} us")
    for check in checks:
        verdict = {True: "good", False: "WRONG", None: "reported"}[check.good]
        expected = "" if check.expected is None else f", expected {check.expected:.3g}"
        print(f"{verdict}: {check.name}: {check.seen:.3g} {check.unit}{expected} {check.note}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
