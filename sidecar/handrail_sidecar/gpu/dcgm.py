"""Read GPU samples from a dcgm-exporter page, for hosts where NVML is unavailable.

The samples use the names and units of ``device_counters/gpu.py``.
Source: names and units of DCGM's fields (dcgm_fields.h) and dcgm-exporter's default counters; cases F13, F16, F17 and F19.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from handrail.device_counters.gpu import XID
from handrail.records import Process, Source
from handrail.records.devices import Device, DeviceKind, DeviceSample, DeviceValue
from handrail_sidecar.engine_metrics.exposition import BLANKS, Scanner
from handrail_sidecar.gpu.monotonic import Standing

_UUID_LABELS: Final = ("UUID", "gpu_uuid", "uuid")  # one exporter uses several (case F16)
_LINK_LABELS: Final = ("nvlink", "link")  # a part of the traffic that the series without this label counts
_INSTANCE: Final = "GPU_I_ID"  # a MIG device; the UUID label holds the UUID of its GPU
_MOST_SERIES: Final = 20_000
_PROFILING: Final = "DCGM_FI_PROF_"
_XID_FIELD: Final = "DCGM_FI_DEV_XID_ERRORS"
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class DcgmField:
    """Map one family to a counter and its unit.

    The value is multiplied by ``times`` or divided by ``per``; one of them is 1.
    """

    name: str
    label: str = ""
    times: int = 1
    per: int = 1
    counts: bool = False


FIELDS: Final[Mapping[str, DcgmField]] = {
    "DCGM_FI_DEV_GPU_UTIL": DcgmField("utilization_ratio", per=100),
    "DCGM_FI_DEV_MEM_COPY_UTIL": DcgmField("memory_busy_ratio", per=100),
    "DCGM_FI_DEV_POWER_USAGE": DcgmField("power_average_watts"),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": DcgmField("energy_joules", per=1000, counts=True),
    "DCGM_FI_DEV_SM_CLOCK": DcgmField("clock_hertz", "sm", times=1_000_000),
    "DCGM_FI_DEV_MEM_CLOCK": DcgmField("clock_hertz", "memory", times=1_000_000),
    "DCGM_FI_DEV_GPU_TEMP": DcgmField("temperature_celsius", "gpu"),
    "DCGM_FI_DEV_MEMORY_TEMP": DcgmField("temperature_celsius", "memory"),
    "DCGM_FI_DEV_FB_USED": DcgmField("memory_used_bytes", times=_MIB),
    "DCGM_FI_DEV_FB_RESERVED": DcgmField("memory_reserved_bytes", times=_MIB),
    "DCGM_FI_DEV_FB_TOTAL": DcgmField("memory_total_bytes", times=_MIB),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": DcgmField("pcie_replays", counts=True),
    "DCGM_FI_PROF_SM_ACTIVE": DcgmField("sm_active_ratio"),
    "DCGM_FI_PROF_SM_OCCUPANCY": DcgmField("sm_occupancy_ratio"),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": DcgmField("tensor_active_ratio"),
    "DCGM_FI_PROF_DRAM_ACTIVE": DcgmField("dram_active_ratio"),
    "DCGM_FI_PROF_PCIE_RX_BYTES": DcgmField(
        "pcie_bytes_per_second", "receive"
    ),  # gauges, although their help text says otherwise
    "DCGM_FI_PROF_PCIE_TX_BYTES": DcgmField("pcie_bytes_per_second", "transmit"),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": DcgmField("nvlink_bytes_per_second", "receive"),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": DcgmField("nvlink_bytes_per_second", "transmit"),
}


@dataclass(frozen=True, slots=True)
class _Line:
    """Family and device of one series of the page."""

    family: str
    device: Device


@dataclass(slots=True)
class Paused:
    """Profiling values of a GPU have stopped while its other values go on (case F17).

    ``xid``: the last error before that; None when there was none.
    """

    since_unix_ns: int
    xid: int | None


@dataclass(slots=True)
class _Known:
    """State of one GPU that is kept between pages."""

    device: Device
    standing: dict[tuple[str, str], Standing] = field(default_factory=dict)
    xid: int = 0  # as on the page now; it stays there until the exporter restarts (case F13)
    xids: dict[int, int] = field(default_factory=dict)
    xid_seen: bool = False
    profiled: bool = False  # it has had a profiling value


class DcgmPage:
    """Reads the pages of one exporter.

    ``paused`` is by UUID. ``news``: the Xid errors that are new on this page, as device and code.
    """

    def __init__(self, process: Process, began_unix_ns: int) -> None:
        self.paused: dict[str, Paused] = {}
        self.news: list[tuple[Device, int]] = []
        self.invalid = 0
        self.scanner: Scanner[_Line] = Scanner(self._resolve, most_known=_MOST_SERIES)
        self._process = process
        self._began = began_unix_ns
        self._known: dict[str, _Known] = {}

    def read(self, page: bytes, at_unix_ns: int) -> list[DeviceSample]:
        """Return one sample for each GPU on the page, in the order of their UUIDs."""
        self.news = []
        raw: dict[str, dict[str, float]] = {}
        for line, value in self.scanner.scan(page):
            found = raw.setdefault(line.device.key, {})
            if line.device.key not in self._known:
                self._known[line.device.key] = _Known(line.device)
            if value in BLANKS or not math.isfinite(value) or value < 0:
                self.invalid += 1
            else:
                found[line.family] = value
        return [self._sample(self._known[key], families, at_unix_ns) for key, families in sorted(raw.items())]

    def _resolve(self, name: str, labels: Mapping[str, str]) -> _Line | None:
        uuid = next((labels[each] for each in _UUID_LABELS if labels.get(each)), "")
        known = name in FIELDS or name in (_XID_FIELD, "DCGM_FI_DEV_FB_FREE")
        if not known or not uuid or any(each in labels for each in _LINK_LABELS):
            return None
        instance, index = labels.get(_INSTANCE, ""), labels.get("gpu", "")
        device = Device(
            kind=DeviceKind.GPU,
            key=f"{uuid}/{instance}" if instance else uuid,
            index=int(index) if index.isascii() and index.isdigit() else None,
            product=labels.get("modelName", ""),
            pci=labels.get("pci_bus_id", "").lower(),
            parent=uuid if instance else "",
        )
        before = self._known.get(device.key)  # pod and driver labels come and go; the GPU stays the same (cases F16, F19)
        return _Line(name, before.device if before is not None else device)

    def _sample(self, known: _Known, families: Mapping[str, float], at_unix_ns: int) -> DeviceSample:
        values = [self._value(known, FIELDS[family], raw, at_unix_ns) for family, raw in families.items() if family in FIELDS]
        parts = [families.get(f"DCGM_FI_DEV_FB_{each}") for each in ("USED", "FREE")]
        if "DCGM_FI_DEV_FB_TOTAL" not in families and None not in parts:
            total = sum(each for each in parts if each is not None) + families.get("DCGM_FI_DEV_FB_RESERVED", 0)
            values.append(DeviceValue(name="memory_total_bytes", value=total * _MIB))
        values += self._xids(known, families)
        self._profiling(known, families, at_unix_ns)
        return DeviceSample(
            process=self._process, source=Source.DCGM, device=known.device, at_unix_ns=at_unix_ns, values=tuple(values)
        )

    def _value(self, known: _Known, field_: DcgmField, raw: float, at_unix_ns: int) -> DeviceValue:
        whole = int(raw) if raw.is_integer() else raw
        value = whole * field_.times if field_.per == 1 else whole / field_.per
        if not field_.counts:
            return DeviceValue(name=field_.name, value=value, label=field_.label)
        standing = known.standing.setdefault((field_.name, field_.label), Standing())
        standing.follow(value, at_unix_ns)
        return DeviceValue(name=field_.name, value=value, label=field_.label, start_unix_ns=standing.since_unix_ns)

    def _xids(self, known: _Known, families: Mapping[str, float]) -> list[DeviceValue]:
        """Count Xid errors by changes of the last code, which the page shows for ever.

        A code that is there at the first scrape is old; a change is a new error.
        The same code twice in a row looks like one that stays. Without the family nothing is known, which is not 0.
        """
        if _XID_FIELD not in families:
            return []
        code = int(families[_XID_FIELD])
        if known.xid_seen and code and code != known.xid:
            known.xids[code] = known.xids.get(code, 0) + 1
            self.news.append((known.device, code))
        known.xid, known.xid_seen = code, True
        return [
            DeviceValue(name=XID.name, value=count, label=str(each), start_unix_ns=self._began)
            for each, count in sorted(known.xids.items())
        ]

    def _profiling(self, known: _Known, families: Mapping[str, float], at_unix_ns: int) -> None:
        profiled = any(name.startswith(_PROFILING) for name in families)
        if profiled:
            known.profiled = True
            self.paused.pop(known.device.key, None)
        elif known.profiled and families and known.device.key not in self.paused:
            self.paused[known.device.key] = Paused(at_unix_ns, known.xid or None)
