"""Render the GPUs of a host as a table, and below it what they do not report.

The table fits its width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from handrail.device_counters.gpu import ALL, REASONS
from handrail.records.devices import Device
from handrail_cli.formatting import format_gib
from handrail_sidecar.gpu.failures import failure

if TYPE_CHECKING:
    from handrail_cli.gpus_view import GpuListing

_GAP: Final = 2
_TABLE_WIDTH: Final = 140  # least width of the table of counters at which no word is broken
_NONE: Final = Text("–", style="dim")


@dataclass(frozen=True, slots=True)
class _GpuColumn:
    title: str
    keep: int  # columns with the highest value get space first; 9 is always shown
    cell: Callable[[Device, GpuListing], Text]
    right: bool = False


def show_gpus(console: Console, found: GpuListing) -> None:
    """Print the table, the processes, the notes and the absences."""
    console.print(Text(f"driver {found.driver or 'not told'}, NVML {found.nvml or 'not told'}", style="bold"))
    console.print()
    console.print(_table(found, console.width))
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
        text = f"{call} has not returned for {seconds:.1f} s: the driver hangs; look for Xid errors in the kernel's log"
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
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for title in ("counter", "unit", "label", "what it is", "absent"):
        table.add_column(title, no_wrap=title in ("counter", "unit", "label"), overflow="fold")
    for each in ALL:
        table.add_row(each.name, _unit(each.unit), each.label, each.help, each.absent)
    console.print(table)


def _unit(unit: str) -> str:
    return {"1": "ratio", "By": "bytes", "By/s": "bytes/s", "Cel": "°C"}.get(unit, unit.strip("{}"))


def _table(found: GpuListing, width: int) -> Table:
    columns = list(_COLUMNS)
    cells = {column.title: [column.cell(device, found) for device in found.devices] for column in columns}
    columns = [each for each in columns if each.keep == 9 or any(cell.plain not in ("", "–") for cell in cells[each.title])]
    left = width
    for column in sorted(columns, key=lambda each: -each.keep):
        taken = max(len(column.title), *(cell.cell_len for cell in cells[column.title]), 0) + _GAP
        if column.keep < 9 and taken > left + _GAP:
            columns.remove(column)
        else:
            left -= taken
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", collapse_padding=True)
    for column in columns:
        table.add_column(column.title, no_wrap=True, overflow="ellipsis", justify="right" if column.right else "left")
    for place in range(len(found.devices)):
        table.add_row(*(cells[column.title][place] for column in columns))
    return table


def _show_processes(console: Console, found: GpuListing) -> None:
    if not found.processes:
        return
    console.print()
    console.print(Text("processes", style="bold"))
    for each in found.processes:
        held = f"{format_gib(each.memory_bytes)} GiB" if each.memory_bytes is not None else "memory not told"
        console.print(Text(f"  {_which(found, each.gpu)}: pid {each.pid} {each.name or '?'}, {held}"))
    if not all(each.seen_here for each in found.processes):
        console.print(
            Text("  ? holds no GPU as far as can be seen here: pids are the host's, so whose it is cannot be told", style="dim")
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
        console.print(Text(f"not available from GPU {', '.join(where[product])} ({product})", style="bold"))
        for (why, instead), names in reasons.items():
            line = Text.assemble((", ".join(names), "yellow"), f": {why}. Absent {instead}.")
            for part in line.wrap(console, console.width - _GAP):
                part.rstrip()
                console.print(Text(" " * _GAP).append_text(part))


def _which(found: GpuListing, uuid: str) -> str:
    device = next((each for each in found.devices if each.key == uuid), None)
    return f"GPU {_number(device, found)}" if device is not None else uuid


def _number(device: Device, found: GpuListing) -> str:
    """Format the number: ``0``, and ``0.0``, ``0.1`` for its MIG devices."""
    if not device.parent:
        return str(device.index)
    alike = [each.key for each in found.devices if each.parent == device.parent]
    return f"{device.index}.{alike.index(device.key)}"


def _share(name: str) -> Callable[[Device, GpuListing], Text]:
    def cell(device: Device, found: GpuListing) -> Text:
        value = found.seen.value(device.key, name)
        return Text(f"{value:.0%}") if value is not None else _NONE

    return cell


def _of_two(name: str, label: str, of: str, scale: float, unit: str, digits: int) -> Callable[[Device, GpuListing], Text]:
    def cell(device: Device, found: GpuListing) -> Text:
        now, most = found.seen.value(device.key, name, label), found.seen.value(device.key, of, label)
        if now is None:
            return _NONE
        whole = f" of {most / scale:.{digits}f}" if most is not None else ""
        return Text(f"{now / scale:.{digits}f}{whole} {unit}")

    return cell


def _power(device: Device, found: GpuListing) -> Text:
    now = _of_two("power_watts", "", "power_limit_watts", 1, "W", 0)(device, found)
    return now if now is not _NONE else _of_two("power_average_watts", "", "power_limit_watts", 1, "W", 0)(device, found)


def _traffic(name: str, line: str) -> Callable[[Device, GpuListing], Text]:
    def cell(device: Device, found: GpuListing) -> Text:
        rates = [found.seen.rate(device.key, name, label) for label in ("receive", "transmit")]
        if all(rate is None for rate in rates):
            return _NONE
        most = found.seen.value(device.key, line)
        text = " / ".join("–" if rate is None else f"{rate / 1e9:.2f}" for rate in rates)
        return Text(f"{text}{f' of {most / 1e9:.0f}' if most else ''} GB/s")

    return cell


def _throttled(device: Device, found: GpuListing) -> Text:
    values = {reason: found.seen.value(device.key, "throttled", reason) for reason in REASONS}
    if all(value is None for value in values.values()):
        return _NONE
    return Text(
        ", ".join(reason for reason, value in values.items() if value) or "no", style="yellow" if any(values.values()) else ""
    )


def _temperature(device: Device, found: GpuListing) -> Text:
    value = found.seen.value(device.key, "temperature_celsius", "gpu")
    return Text(f"{value:.0f} °C") if value is not None else _NONE


def _used(device: Device, found: GpuListing) -> Text:
    keys = found.visible.keys
    if keys is None:
        return Text("")
    return Text("yes" if device.key in keys else "no", style="" if device.key in keys else "dim")


_COLUMNS: Final = (
    _GpuColumn("GPU", 9, lambda device, found: Text(_number(device, found))),
    _GpuColumn("product", 7, lambda device, found: Text(device.product.removeprefix("NVIDIA "))),
    _GpuColumn("visible", 4, _used),
    _GpuColumn("busy", 9, _share("utilization_ratio"), right=True),
    _GpuColumn("SM", 8, _share("sm_active_ratio"), right=True),
    _GpuColumn("tensor", 6, _share("tensor_active_ratio"), right=True),
    _GpuColumn("DRAM", 8, _share("dram_active_ratio"), right=True),
    _GpuColumn("memory", 8, _of_two("memory_used_bytes", "", "memory_total_bytes", 2**30, "GiB", 1), right=True),
    _GpuColumn("power", 8, _power, right=True),
    _GpuColumn("SM clock", 6, _of_two("clock_hertz", "sm", "clock_max_hertz", 1e6, "MHz", 0), right=True),
    _GpuColumn("throttled", 8, _throttled),
    _GpuColumn("temp", 5, _temperature, right=True),
    _GpuColumn("PCIe in / out", 7, _traffic("pcie_bytes", "pcie_line_bytes_per_second"), right=True),
    _GpuColumn("NVLink in / out", 6, _traffic("nvlink_bytes", "nvlink_line_bytes_per_second"), right=True),
    _GpuColumn("UUID", 3, lambda device, found: Text(device.key, style="dim")),
)
