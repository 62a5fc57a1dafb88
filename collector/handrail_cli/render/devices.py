"""Render GPUs and links below a waterfall, as strips on its time axis.

The height of a column is the share of what the device can do.
The data is the answer's ``hardware`` (docs/http-api.md).
Unlike in ``sparkline.py``, which draws distributions, time runs to the right.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from rich.text import Text

from handrail import conventions as names
from handrail.durations import format_duration
from handrail_cli import glossary

LEVELS: Final = "▁▂▃▄▅▆▇█"
ZERO: Final = "·"
_STYLES: Final = {"prefill": "cyan", "decode": "green"}
_RATES: Final = (("PB/s", 1e15), ("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
_DIRECTION: Final = {"prefill": (names.TRANSMIT, "out"), "decode": (names.RECEIVE, "in")}
"""KV leaves P and enters D."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis of the waterfall: ``whole_ns`` over ``bar_width`` columns.

    A name, a figure of 8 columns and one of 6 come before it.
    """

    whole_ns: int
    name_width: int
    bar_width: int


@dataclass(frozen=True, slots=True)
class Shown:
    """One line.

    ``values``: (from_ns, to_ns, value) of each device.
    ``most``: the value of a full column: 1 for a share, the sum of the line rates for links; None: not known.
    ``total``: the line shows the sum of the devices (links), else their mean (shares).
    """

    name: str
    values: Sequence[Sequence[tuple[int, int, float]]]
    most: float | None
    total: bool = False


_GAUGES: Final = (
    ("GPU busy", names.GPU_BUSY),
    ("SM active", names.GPU_SM_ACTIVE),
    ("tensor active", names.GPU_TENSOR_ACTIVE),
    ("DRAM active", names.GPU_DRAM_ACTIVE),
)
_LINKS: Final = (
    ("NVLink", "gpu", names.GPU_NVLINK_BYTES, names.GPU_NVLINK_LINE),
    ("PCIe", "gpu", names.GPU_PCIE_BYTES, names.GPU_PCIE_LINE),
    ("RDMA", "rdma", names.LINK_BYTES, ""),
    ("NIC", "nic", names.LINK_BYTES, ""),
)
"""Name, kind of device, counter, and the counter that holds its line rate.

The last is used where the device itself does not report its line rate.
"""


def track_lines(hardware: Mapping[str, Any], axis: Axis, scale: str, width: int) -> Iterator[Text]:
    """Render the section.

    ``scale``: the axis as the waterfall writes it. ``width``: the width to which sentences are wrapped.
    """
    places = hardware["places"]
    silent = [place for place in places if not place["devices"]]
    if len(silent) == len(places):
        if places:
            where = " and ".join(dict.fromkeys(place["host"] for place in places))
            yield from _wrapped(
                f"GPUs and links: no samples from {where} in this time; no sidecar there reads them.", "dim", width
            )
        return
    yield Text("GPUs and links during the request", style="bold")
    yield Text(f"{'':<{axis.name_width}} {'mean':>8} {'peak':>6}  {scale}".rstrip(), style="dim")
    for place in places:
        yield from _wrapped(_heading(place), "dim", width)
        for shown in _shown(place):
            yield from _line(shown, axis, _STYLES.get(place["place"], ""))
        for note, style in _notes(place, axis):
            yield from _wrapped(f"  {note}", style, width)
    height = f"Height: share of the maximum; of a link, share of its line rate or peak. {ZERO} means zero, blank no sample."
    yield from _wrapped(height, "dim", width)


def format_rate(bytes_a_second: float) -> str:
    """Format ``3.2 GB/s``; decimal, as line rates are."""
    for unit, size in _RATES:
        value = bytes_a_second / size
        if value >= 0.9995:  # the unit below would round it to 1000
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    return f"{bytes_a_second:.0f} B/s"


def _wrapped(text: str, style: str, width: int) -> Iterator[Text]:
    """Wrap the text; later lines are indented below the first."""
    for line in textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False):
        yield Text(line, style=style)


def _heading(place: Mapping[str, Any]) -> str:
    letter = glossary.PLACE.get(place["place"], place["place"])
    gpus = [device for device in place["devices"] if device["kind"] == "gpu"]
    lines = []
    if gpus:
        products = dict.fromkeys(device["product"] for device in gpus)
        lines.append(f"{len(gpus)} × {', '.join(filter(None, products)) or 'GPU'}")
    steps = {
        name: format_duration(every)
        for name, kinds in (("GPUs", ("gpu",)), ("links", ("rdma", "nic")))
        if (every := _sampled_every([device for device in place["devices"] if device["kind"] in kinds]))
    }
    if len(set(steps.values())) == 1:
        lines.append(f"sampled every {min(steps.values())}")
    elif steps:
        lines.append(f"sampled: {', '.join(f'{name} every {every}' for name, every in steps.items())}")
    return f"{letter} on {place['host']}{': ' if lines else ''}{'; '.join(lines)}"


def _sampled_every(devices: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the finest sampling interval of any of their series."""
    steps = [
        median(end - begin for begin, end in zip(track["from_ns"], track["to_ns"], strict=True))
        for device in devices
        for track in device["tracks"]
    ]
    return round(int(min(steps)), -6) if steps else None


def _shown(place: Mapping[str, Any]) -> Iterator[Shown]:
    devices = place["devices"]
    for name, counter in _GAUGES:
        found = _series(devices, "gpu", counter, "", "")
        if found:
            yield Shown(name, [values for values, _ in found], 1.0)
    direction, way = _DIRECTION.get(place["place"], _DIRECTION["decode"])
    for name, kind, counter, line in _LINKS:
        found = _series(devices, kind, counter, direction, line)
        moving = [(values, most) for values, most in found if any(v for *_, v in values)]
        if moving:
            rates = [most for _, most in moving]
            known = None if None in rates else sum(most for most in rates if most is not None)
            yield Shown(f"{name} {way}", [values for values, _ in moving], known, total=True)


def _series(
    devices: Sequence[Mapping[str, Any]], kind: str, counter: str, label: str, line: str
) -> list[tuple[list[tuple[int, int, float]], float | None]]:
    """Return the series of each device with the counter, and its line rate."""
    return [
        (list(zip(track["from_ns"], track["to_ns"], track["values"], strict=True)), _line_rate(device, line))
        for device in devices
        if device["kind"] == kind
        for track in device["tracks"]
        if (track["name"], track["label"]) == (counter, label)
    ]


def _line_rate(device: Mapping[str, Any], counter: str) -> float | None:
    """Return what the link can carry in bytes a second and direction.

    It is the last value; None where it is not known, or where a counter reports 0.
    """
    reports = (track["values"][-1] for track in device["tracks"] if counter and track["name"] == counter and track["values"])
    return next(reports, device["line_rate_bytes"]) or None


def _line(shown: Shown, axis: Axis, style: str) -> Iterator[Text]:
    columns = [
        _at(shown, axis.whole_ns * place // axis.bar_width, axis.whole_ns * (place + 1) // axis.bar_width)
        for place in range(axis.bar_width)
    ]
    whole = _at(shown, 0, axis.whole_ns)
    if whole is None:
        return
    seen = [value for value in columns if value is not None]
    within = [v for values in shown.values for begin, end, v in values if end > 0 and begin < axis.whole_ns]
    peak = max(seen, default=whole) if shown.total else max(within)
    full = shown.most or peak or 1.0
    figure = format_rate(whole) if shown.total else _share(whole)
    line = Text(f"  {shown.name:<{axis.name_width - 2}} {figure:>8} ")
    line.append(f"{_share(peak / full) if shown.most else '':>6}  ")
    line.append("".join(_glyph(value, full) for value in columns).rstrip(), style=style)
    yield line


def _at(shown: Shown, begin_ns: int, end_ns: int) -> float | None:
    """Return the value in [begin, end), over the devices and the time.

    Each value is weighted by how long it holds. None where nothing was sampled.
    """
    means = []
    for values in shown.values:
        held = [(min(end, end_ns) - max(begin, begin_ns), value) for begin, end, value in values]
        held = [(length, value) for length, value in held if length > 0]
        if held:
            means.append(sum(length * value for length, value in held) / sum(length for length, _ in held))
    if not means:
        return None
    return sum(means) if shown.total else sum(means) / len(means)


def _glyph(value: float | None, full: float) -> str:
    if value is None:
        return " "
    if value <= 0:
        return ZERO
    return LEVELS[min(len(LEVELS) - 1, int(value / full * len(LEVELS)))]


def _share(value: float) -> str:
    share = 100 * value
    if share >= 999.5:  # it is no share
        return ">999 %"
    return f"{share:.0f} %" if share >= 1 or not share else "<1 %"


def _notes(place: Mapping[str, Any], axis: Axis) -> Iterator[tuple[str, str]]:
    gpus = [device for device in place["devices"] if device["kind"] == "gpu"]
    if not place["devices"]:
        yield "no samples from this host in this time: no sidecar there reads its GPUs and links", "dim"
    elif not gpus:
        yield "no GPU samples: its sidecar reads only links (no NVML there, or GPU sampling is off)", "dim"
    elif place["chosen"] != "engine" and len(gpus) > 1:
        yield f"the host's {len(gpus)} GPUs: no evidence shows which of them this engine uses", "dim"
    yield from _throttled(gpus)
    if place["devices"]:
        yield from _clock(place, axis)


def _throttled(gpus: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    reasons: dict[str, int] = {}
    for device in gpus:
        for track in device["tracks"]:
            if track["name"] == "throttled" and any(value > 0 for value in track["values"]):
                reasons[track["label"]] = reasons.get(track["label"], 0) + 1
    if reasons:
        text = ", ".join(f"{reason} on {count} of {len(gpus)}" for reason, count in sorted(reasons.items()))
        yield f"throttled around this time: {text}", "yellow"


def _clock(place: Mapping[str, Any], axis: Axis) -> Iterator[tuple[str, str]]:
    """Return how far the strips may be shifted against the phases."""
    offset = place["offset"]
    if offset["same"]:
        return
    host, shift, bound = place["host"], offset["shift_ns"], offset["bound_ns"]
    if bound is None:
        yield f"drawn on {host}'s own clock; its offset from the clock of 0 is unknown", "yellow"
        return
    moved = f"shifted by {format_duration(abs(shift))}, since its clock is {'ahead' if shift > 0 else 'behind'}; "
    text = f"{moved if abs(shift) > bound else ''}placed within ±{format_duration(bound)} ({host}'s clock)"
    yield text, "yellow" if bound * 10 > axis.whole_ns else "dim"
