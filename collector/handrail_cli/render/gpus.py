"""Render the GPUs of a host as a table, and below it what they do not report.

The table fits its width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.text import Text

from handrail.device_counters.gpu import ALL, REASONS
from handrail.records.devices import CounterDef, Device, DeviceSample, DeviceValue
from handrail_cli.formatting import format_gib
from handrail_cli.tables import NONE, Column, table
from handrail_sidecar.gpu.failures import failure
from handrail_sidecar.gpu.processes import GpuProcess
from handrail_sidecar.gpu.view import Absent
from handrail_sidecar.gpu.visible import Visible

_INDENT: Final = 2
_TABLE_WIDTH: Final = 140  # least width of the table of counters at which no word is broken


@dataclass(slots=True)
class GpuWindow:
    """First and last value of every counter, with their times."""

    first: dict[tuple[str, str, str], tuple[int, DeviceValue]] = field(default_factory=dict)
    last: dict[tuple[str, str, str], tuple[int, DeviceValue]] = field(default_factory=dict)

    def take(self, sample: DeviceSample) -> None:
        for value in sample.values:
            key = (sample.device.key, value.name, value.label)
            self.last[key] = (sample.at_unix_ns, value)
            self.first.setdefault(key, self.last[key])

    def value(self, uuid: str, name: str, label: str = "") -> float | None:
        """Return the last value; None without any."""
        found = self.last.get((uuid, name, label))
        return found[1].value if found is not None else None

    def rate(self, uuid: str, name: str, label: str) -> float | None:
        """Return a counter's growth per second.

        None where it was read once or was reset.
        """
        first, last = self.first.get((uuid, name, label)), self.last.get((uuid, name, label))
        if first is None or last is None or last[0] <= first[0] or first[1].start_unix_ns != last[1].start_unix_ns:
            return None
        return (last[1].value - first[1].value) / (last[0] - first[0]) * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuListing:
    """Everything that the command shows."""

    driver: str
    nvml: str
    devices: tuple[Device, ...]
    seen: GpuWindow
    absent: tuple[Absent, ...]
    lost: Mapping[int, int]
    stuck: tuple[tuple[str, str, float], ...]  # UUID, call, seconds
    processes: tuple[GpuProcess, ...]
    visible: Visible
    failures: Mapping[int, int]


def show_gpus(console: Console, found: GpuListing) -> None:
    """Print the table, the processes, the notes and the absences."""
    console.print(Text(f"driver {found.driver or 'unknown'}, NVML {found.nvml or 'unknown'}", style="bold"))
    console.print()
    console.print(table(_columns(found), found.devices, console.width))
    for index, code in sorted(found.lost.items()):
        reported_failure = failure(code)
        console.print(
            Text.assemble(
                (f"GPU {index}: ", "bold red"),
                reported_failure.words,
                f" (NVML code {code}){f': {reported_failure.remedy}' if reported_failure.remedy else ''}",
            )
        )
    for uuid, call, seconds in found.stuck:
        text = f"{call} has not returned for {seconds:.1f} s: the driver hangs; look for Xid errors in the kernel log"
        console.print(Text.assemble((f"{_which(found, uuid)}: ", "bold red"), text))
    _show_processes(console, found)
    for note in found.visible.notes:
        console.print(Text.assemble(("note: ", "yellow"), note))
    _show_absences(console, found)


def show_counters(console: Console) -> None:
    """Print every counter that can be read.

    Where a table would break words, each counter has its own lines.
    """
    if console.width < _TABLE_WIDTH:
        for each in ALL:
            by = f" by {each.label}" if each.label else ""
            console.print(Text.assemble((each.name, "bold"), f"  {_unit(each.unit)}{by}"))
            for line in textwrap.wrap(f"{each.help}. Absent {each.absent}", console.width - 4, break_on_hyphens=False):
                console.print(Text(f"    {line}"))
        return
    columns = [
        Column[CounterDef]("counter", lambda each: each.name),
        Column("unit", lambda each: _unit(each.unit)),
        Column("label", lambda each: each.label),
        Column("what it is", lambda each: each.help),
        Column("absent", lambda each: each.absent),
    ]
    console.print(table(columns, ALL, console.width))


def _unit(unit: str) -> str:
    return {"1": "ratio", "By": "bytes", "By/s": "bytes/s", "Cel": "°C"}.get(unit, unit.strip("{}"))


def _show_processes(console: Console, found: GpuListing) -> None:
    if not found.processes:
        return
    console.print()
    console.print(Text("processes", style="bold"))
    for each in found.processes:
        held = f"{format_gib(each.memory_bytes)} GiB" if each.memory_bytes is not None else "memory unknown"
        console.print(Text(f"  {_which(found, each.gpu)}: pid {each.pid} {each.name or '?'}, {held}"))
    if not all(each.seen_here for each in found.processes):
        console.print(
            Text(
                "  ?: from here, no process with this pid holds a GPU: NVML reports pids of the host, so its name is unknown",
                style="dim",
            )
        )


def _show_absences(console: Console, found: GpuListing) -> None:
    """Print the absent counters by kind of GPU.

    Counters with the same answer and the same remedy are listed together.
    """
    kinds: dict[str, dict[tuple[str, str], list[str]]] = {}
    where: dict[str, dict[str, None]] = {}
    for each in found.absent:
        product = each.device.product
        names = kinds.setdefault(product, {}).setdefault((each.why, each.instead), [])
        if each.counter not in names:
            names.append(each.counter)
        where.setdefault(product, {})[_number(each.device, found)] = None
    for product, reasons in kinds.items():
        console.print()
        console.print(Text(f"not available on GPU {', '.join(where[product])} ({product})", style="bold"))
        for (why, instead), names in reasons.items():
            line = Text.assemble((", ".join(names), "yellow"), f": {why}. Absent {instead}.")
            for part in line.wrap(console, console.width - _INDENT):
                part.rstrip()
                console.print(Text(" " * _INDENT).append_text(part))


def _which(found: GpuListing, uuid: str) -> str:
    device = next((each for each in found.devices if each.key == uuid), None)
    return f"GPU {_number(device, found)}" if device is not None else uuid


def _number(device: Device, found: GpuListing) -> str:
    """Format the number: ``0``, and ``0.0``, ``0.1`` for its MIG devices."""
    if not device.parent:
        return str(device.index)
    alike = [each.key for each in found.devices if each.parent == device.parent]
    return f"{device.index}.{alike.index(device.key)}"


def _share(device: Device, found: GpuListing, name: str) -> Text:
    value = found.seen.value(device.key, name)
    return Text(f"{value:.0%}") if value is not None else NONE


def _of(now: float | None, most: float | None, scale: float, unit: str, digits: int = 0) -> Text:
    """Format ``12.0 of 80.0 GiB``; ``most`` None: its limit is not known."""
    if now is None:
        return NONE
    whole = f" of {most / scale:.{digits}f}" if most is not None else ""
    return Text(f"{now / scale:.{digits}f}{whole} {unit}")


def _memory(device: Device, found: GpuListing) -> Text:
    used, whole = (found.seen.value(device.key, name) for name in ("memory_used_bytes", "memory_total_bytes"))
    return _of(used, whole, 2**30, "GiB", 1)


def _power(device: Device, found: GpuListing) -> Text:
    now = found.seen.value(device.key, "power_watts")
    now = now if now is not None else found.seen.value(device.key, "power_average_watts")
    return _of(now, found.seen.value(device.key, "power_limit_watts"), 1, "W")


def _clock(device: Device, found: GpuListing) -> Text:
    now, most = (found.seen.value(device.key, name, "sm") for name in ("clock_hertz", "clock_max_hertz"))
    return _of(now, most, 1e6, "MHz")


def _traffic(device: Device, found: GpuListing, bus: str) -> Text:
    rates = [found.seen.rate(device.key, f"{bus}_bytes", label) for label in ("receive", "transmit")]
    if all(rate is None for rate in rates):
        return NONE
    most = found.seen.value(device.key, f"{bus}_line_bytes_per_second")
    text = " / ".join("–" if rate is None else f"{rate / 1e9:.2f}" for rate in rates)
    return Text(f"{text}{f' of {most / 1e9:.0f}' if most else ''} GB/s")


def _throttled(device: Device, found: GpuListing) -> Text:
    values = {reason: found.seen.value(device.key, "throttled", reason) for reason in REASONS}
    if all(value is None for value in values.values()):
        return NONE
    return Text(
        ", ".join(reason for reason, value in values.items() if value) or "no", style="yellow" if any(values.values()) else ""
    )


def _temperature(device: Device, found: GpuListing) -> Text:
    value = found.seen.value(device.key, "temperature_celsius", "gpu")
    return Text(f"{value:.0f} °C") if value is not None else NONE


def _used(device: Device, found: GpuListing) -> Text:
    keys = found.visible.keys
    if keys is None:
        return Text("")
    return Text("yes" if device.key in keys else "no", style="" if device.key in keys else "dim")


def _columns(found: GpuListing) -> list[Column[Device]]:
    return [
        Column("GPU", lambda device: _number(device, found)),
        Column("product", lambda device: device.product.removeprefix("NVIDIA "), 7),
        Column("visible", lambda device: _used(device, found), 4),
        Column("busy", lambda device: _share(device, found, "utilization_ratio"), right=True),
        Column("SM", lambda device: _share(device, found, "sm_active_ratio"), 8, right=True),
        Column("tensor", lambda device: _share(device, found, "tensor_active_ratio"), 6, right=True),
        Column("DRAM", lambda device: _share(device, found, "dram_active_ratio"), 8, right=True),
        Column("memory", lambda device: _memory(device, found), 8, right=True),
        Column("power", lambda device: _power(device, found), 8, right=True),
        Column("SM clock", lambda device: _clock(device, found), 6, right=True),
        Column("throttled", lambda device: _throttled(device, found), 8),
        Column("temp", lambda device: _temperature(device, found), 5, right=True),
        Column("PCIe in / out", lambda device: _traffic(device, found, "pcie"), 7, right=True),
        Column("NVLink in / out", lambda device: _traffic(device, found, "nvlink"), 6, right=True),
        Column("UUID", lambda device: Text(device.key, style="dim"), 3),
    ]
