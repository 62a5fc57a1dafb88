"""Table of GPU counters, one row each.

A row has name, unit, meaning, how NVML gives it, when it is absent, and its replacement then. Exposed as ``handrail_gpu_`` +
name. Source of ids, units and conditions: ``nvml.h`` of nvidia-nvml-dev 13.5. Field ids 251 to 273 are not used: driver 580.82
gave them other meanings, and an older driver would return another quantity.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail import conventions as names
from handrail.records.devices import CounterDef
from handrail.records.quantities import QuantityKind

ALL_LINKS: Final = 0xFFFFFFFF  # as a field's scope: the sum over the device's NVLinks
EACH_LINK: Final = -1  # ours: one entry a link, summed here
MOST_LINKS: Final = 18  # NVML_NVLINK_MAX_LINKS
PCIE_RATE: Final = "pcie_bytes_per_second"
NVLINK_RATE: Final = "nvlink_bytes_per_second"


@dataclass(frozen=True, slots=True)
class NvmlCall:
    """Call of a ``pynvml`` function with the handle and ``arguments``.

    ``attribute`` is the part of the result that is used; ``bit``: whether that bit is set. The number is multiplied by ``times``
    or divided by ``per`` to get the counter's unit; one of the two is 1, so whole counters stay whole.
    """

    function: str
    arguments: tuple[int, ...] = ()
    attribute: str = ""
    bit: int = 0
    times: int = 1
    per: int = 1


@dataclass(frozen=True, slots=True)
class NvmlField:
    """One NVML field value."""

    id: int
    scope: int = 0
    times: int = 1
    per: int = 1


@dataclass(frozen=True, slots=True)
class Gpm:
    """One metric of GPU performance monitoring (Hopper and later).

    Its window is at least 100 ms.
    """

    id: int
    times: int = 1
    per: int = 1


Read = NvmlCall | NvmlField | Gpm


class Pace(Enum):
    """How often a value is read."""

    TICK = "tick"  # at the sampler's rate
    BYTES = "bytes"  # at that rate, or faster where the counter could wrap unnoticed
    WINDOW = "window"  # at every n-th tick (``reader.window_ns``)
    SECOND = "second"  # calls that take milliseconds, and values that change slowly
    RARE = "rare"  # every 10 s
    SNAPSHOT = "snapshot"  # blocks by design: read every second, on a thread of its own, never in the loop


class LineRateOf(Enum):
    """Link whose line rate limits a byte counter's growth; only such counters wrap."""

    PCIE = "pcie"
    NVLINK = "nvlink"


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a counter, with its ways to read it, best first."""

    reads: tuple[Read, ...]
    label: str = ""
    pace: Pace | None = None  # where it is not the counter's


@dataclass(frozen=True, slots=True)
class GpuCounter:
    """One counter of a GPU.

    ``most``: a reading above it is invalid. ``on_mig``: a MIG device has it too. ``only_without``: read only where that counter
    is absent. ``seldom``: mostly 0, so it is reported at a tick only while it is not 0 or has just become 0, and once a second
    in any case.
    """

    counter: CounterDef
    values: tuple[Value, ...]
    pace: Pace = Pace.TICK
    link: LineRateOf | None = None
    most: float | None = None
    on_mig: bool = False
    only_without: str = ""
    seldom: bool = False

    @property
    def name(self) -> str:
        return self.counter.name


_GPM_ABSENT: Final = (
    "before Hopper and in most vGPUs; DCGM's profiling has similar values from Volta on; pcie_bytes and nvlink_bytes count "
    "traffic"
)
_OLD: Final = "if the driver or the product lacks it"
_RX_TX: Final = (names.RECEIVE, names.TRANSMIT)

REASONS: Final = {
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
    "board_limit": 0x200,
    "reliability": 0x400,
    "application_clocks": 0x2,
}
"""Bits of nvmlClocksEventReasons that hold clocks down.

Idleness (0x1) and display clocks (0x100) are not among them.
"""


def _row(
    name: str,
    kind: QuantityKind,
    unit: str,
    help: str,
    absent: str,
    *reads: Read,
    values: tuple[Value, ...] = (),
    label: str = "",
    pace: Pace = Pace.TICK,
    link: LineRateOf | None = None,
    most: float | None = None,
    on_mig: bool = False,
    only_without: str = "",
    seldom: bool = False,
) -> GpuCounter:
    return GpuCounter(
        CounterDef(name, kind, unit, help, absent, label),
        values or (Value(reads),),
        pace,
        link,
        most,
        on_mig,
        only_without,
        seldom,
    )


_G, _C = QuantityKind.GAUGE, QuantityKind.COUNTER
_V2: Final = 0x02000028  # nvmlMemory_v2 reports reserved memory separately


def _memory(what: str) -> tuple[NvmlCall, ...]:
    return (NvmlCall("nvmlDeviceGetMemoryInfo", (_V2,), what), NvmlCall("nvmlDeviceGetMemoryInfo", (), what))


def _clocks(function: str, of_memory: Pace) -> tuple[Value, ...]:
    sm, memory = (NvmlCall(function, (type_,), times=1_000_000) for type_ in (1, 2))
    return (Value((sm,), "sm"), Value((memory,), "memory", of_memory))


def _reason(bit: int) -> tuple[NvmlCall, ...]:
    return (
        NvmlCall("nvmlDeviceGetCurrentClocksEventReasons", bit=bit),
        NvmlCall("nvmlDeviceGetCurrentClocksThrottleReasons", bit=bit),  # its name before 12.2
    )


COUNTERS: Final = (
    # --- what the GPU does
    _row(
        names.GPU_BUSY,
        _G,
        "1",
        "Share of the driver's last sample period (1/6 to 1 s by product) in which any kernel ran; this is not the load",
        "with MIG on, in WSL and on Jetson; sm_active_ratio is more exact if it exists",
        NvmlCall("nvmlDeviceGetUtilizationRates", attribute="gpu", per=100),
        pace=Pace.WINDOW,
        most=1.0,
    ),
    _row(
        "memory_busy_ratio",
        _G,
        "1",
        "Share of that period in which device memory was read or written; this is not a share of its bandwidth",
        "with MIG on, in WSL and on Jetson; dram_active_ratio is more exact if it exists",
        NvmlCall("nvmlDeviceGetUtilizationRates", attribute="memory", per=100),
        pace=Pace.WINDOW,
        most=1.0,
    ),
    _row(
        names.GPU_SM_ACTIVE,
        _G,
        "1",
        "Share of the streaming multiprocessors that were busy, over the window",
        _GPM_ABSENT,
        Gpm(2, per=100),
        pace=Pace.WINDOW,
        most=1.05,
        on_mig=True,
    ),
    _row(
        "sm_occupancy_ratio",
        _G,
        "1",
        "Resident warps, as a share of the maximum, over the window",
        _GPM_ABSENT,
        Gpm(3, per=100),
        pace=Pace.WINDOW,
        most=1.05,
        on_mig=True,
    ),
    _row(
        names.GPU_TENSOR_ACTIVE,
        _G,
        "1",
        "Share of the window in which tensor pipes were busy",
        _GPM_ABSENT,
        Gpm(5, per=100),
        pace=Pace.WINDOW,
        most=1.05,
        on_mig=True,
    ),
    _row(
        names.GPU_DRAM_ACTIVE,
        _G,
        "1",
        "Bandwidth of device memory in use, as a share of the maximum, over the window",
        _GPM_ABSENT,
        Gpm(10, per=100),
        pace=Pace.WINDOW,
        most=1.05,
        on_mig=True,
    ),
    _row(
        PCIE_RATE,
        _G,
        "By/s",
        "PCIe traffic over the window, as performance monitoring counts it",
        _GPM_ABSENT,
        values=tuple(Value((Gpm(id, times=1 << 20),), label) for id, label in zip((21, 20), _RX_TX, strict=True)),
        label="direction",
        pace=Pace.WINDOW,
    ),
    _row(
        NVLINK_RATE,
        _G,
        "By/s",
        "NVLink traffic of all links over the window, as performance monitoring counts it",
        _GPM_ABSENT,
        values=tuple(Value((Gpm(id, times=1 << 20),), label) for id, label in zip((60, 61), _RX_TX, strict=True)),
        label="direction",
        pace=Pace.WINDOW,
    ),
    # --- memory
    _row(
        "memory_total_bytes",
        _G,
        "By",
        "Device memory",
        "if memory is shared with the host (GB10, Jetson); use the host's own counters there",
        *_memory("total"),
        pace=Pace.SECOND,
        on_mig=True,
    ),
    _row(
        "memory_used_bytes",
        _G,
        "By",
        "Device memory in use; with drivers before 510 this includes reserved memory",
        "if memory is shared with the host (GB10, Jetson); use the host's own counters there",
        *_memory("used"),
        pace=Pace.SECOND,
        on_mig=True,
    ),
    _row(
        "memory_reserved_bytes",
        _G,
        "By",
        "Device memory that the driver keeps for itself",
        "with drivers before 510, and if memory is shared with the host",
        _memory("reserved")[0],
        pace=Pace.SECOND,
        on_mig=True,
    ),
    _row(
        "processes",
        _G,
        "{process}",
        "Processes with a compute context, without their pids, which are the host's",
        "on MIG parents without privilege; the MIG device has the list",
        NvmlCall("nvmlDeviceGetComputeRunningProcesses"),
        pace=Pace.RARE,
        on_mig=True,
    ),
    # --- power, heat, clocks
    _row(
        "power_watts",
        _G,
        "W",
        "Power drawn now",
        _OLD + "; power_average_watts gives the mean of a second",
        NvmlField(186, per=1000),
        most=100_000,
    ),
    _row(
        "power_average_watts",
        _G,
        "W",
        "Power drawn, mean of the last second on Ampere and later (on GA100 and before: now)",
        "on Jetson",
        NvmlCall("nvmlDeviceGetPowerUsage", per=1000),
        pace=Pace.SECOND,
        most=100_000,
    ),
    _row(
        "power_limit_watts",
        _G,
        "W",
        "Power limit in force",
        "if power is not managed",
        NvmlCall("nvmlDeviceGetEnforcedPowerLimit", per=1000),
        pace=Pace.RARE,
        most=100_000,
    ),
    _row(
        "energy_joules",
        _C,
        "J",
        "Energy used since the driver was loaded",
        "before Volta; power_watts over time gives it",
        NvmlField(83, per=1000),
        pace=Pace.SECOND,
    ),
    _row(
        "temperature_celsius",
        _G,
        "Cel",
        "Temperature by sensor",
        "memory: if the board has no sensor for it",
        values=(
            Value((NvmlCall("nvmlDeviceGetTemperature", (0,)),), "gpu"),
            Value((NvmlField(82),), "memory"),
        ),
        label="sensor",
        pace=Pace.SECOND,
        most=200,
    ),
    _row(
        names.GPU_CLOCK,
        _G,
        "Hz",
        "Clock of the streaming multiprocessors and of the memory",
        "on Jetson",
        values=_clocks("nvmlDeviceGetClockInfo", Pace.SECOND),
        label="domain",
        most=1e11,
    ),
    _row(
        "clock_max_hertz",
        _G,
        "Hz",
        "Highest clock of the product",
        "on Jetson",
        values=_clocks("nvmlDeviceGetMaxClockInfo", Pace.RARE),
        label="domain",
        pace=Pace.RARE,
        most=1e11,
    ),
    _row(
        names.GPU_THROTTLED,
        _G,
        "1",
        "1 while this reason holds the clocks down; sampled at every tick then and when it ends, otherwise once a second",
        "on Jetson; reasons that the product does not know",
        values=tuple(Value(_reason(bit), reason) for reason, bit in REASONS.items()),
        label="reason",
        seldom=True,
    ),
    _row(
        "throttled_seconds",
        _C,
        "s",
        "Time in which this policy held the clocks down, including times between two samples of `throttled`",
        _OLD + "; throttled samples it",
        values=tuple(
            Value((NvmlField(id, per=1_000_000_000),), policy)
            for id, policy in ((74, "power"), (75, "thermal"), (76, "sync_boost"), (77, "board_limit"), (79, "reliability"))
        ),
        label="policy",
        pace=Pace.SECOND,
    ),
    # --- links
    _row(
        names.GPU_PCIE_BYTES,
        _C,
        "By",
        "Bytes over PCIe as the GPU counts them, including packet headers, since this sidecar's first read; wraps are undone",
        "with old drivers and in vGPUs; pcie_snapshot_bytes_per_second or a NIC's counters give an indication",
        values=tuple(Value((NvmlField(id),), label) for id, label in zip((198, 197), _RX_TX, strict=True)),
        label="direction",
        pace=Pace.BYTES,
        link=LineRateOf.PCIE,
    ),
    _row(
        "pcie_snapshot_bytes_per_second",
        _G,
        "By/s",
        "Mean over the 20 ms of the read, once a second; neither the mean of the second nor a total",
        "if pcie_bytes exists, since this call blocks for 20 ms",
        # nvml.h says KB/s; taken as 1000 bytes: if it means 1024, this is 2.4 % low
        values=tuple(
            Value((NvmlCall("nvmlDeviceGetPcieThroughput", (which,), times=1000),), label)
            for which, label in ((1, "receive"), (0, "transmit"))
        ),
        label="direction",
        pace=Pace.SNAPSHOT,
        only_without=names.GPU_PCIE_BYTES,
    ),
    _row(
        "pcie_replays",
        _C,
        "{replay}",
        "Packets repeated over PCIe, because of a bad lane or riser",
        _OLD,
        NvmlField(94),
        pace=Pace.RARE,
    ),
    _row(
        names.GPU_NVLINK_BYTES,
        _C,
        "By",
        "Data over all NVLinks without protocol overhead, since this sidecar's first read; wraps are undone",
        "if there is no NVLink",
        values=tuple(
            Value(
                (NvmlField(data, ALL_LINKS, times=1024), NvmlField(data, EACH_LINK, times=1024), NvmlField(five, EACH_LINK)),
                label,
            )
            for data, five, label in ((139, 204, "receive"), (138, 202, "transmit"))
        ),
        label="direction",
        link=LineRateOf.NVLINK,
    ),
    _row(
        "nvlink_errors",
        _C,
        "{error}",
        "Errors over all NVLinks by kind",
        "if there is no NVLink, and from Blackwell on, which counts other errors",
        values=tuple(
            Value((NvmlField(id),), kind) for id, kind in ((38, "crc_flit"), (45, "crc_data"), (52, "replay"), (59, "recovery"))
        ),
        label="kind",
        pace=Pace.RARE,
    ),
    # --- health
    _row(
        "ecc_errors",
        _C,
        "{error}",
        "Memory errors since the driver was loaded",
        "if ECC is off or missing",
        values=(Value((NvmlField(3),), "corrected"), Value((NvmlField(4),), "uncorrected")),
        label="kind",
        pace=Pace.RARE,
    ),
    _row(
        "remapped_rows",
        _C,
        "{row}",
        "Rows of memory that the GPU replaced permanently",
        "before Ampere",
        values=(Value((NvmlField(142),), "corrected"), Value((NvmlField(143),), "uncorrected")),
        label="kind",
        pace=Pace.RARE,
    ),
    _row(
        "remap_pending",
        _G,
        "1",
        "1 while a replaced row waits for a reset of the GPU; failed: 1 if the GPU could not replace a row",
        "before Ampere",
        values=(Value((NvmlField(144),), "pending"), Value((NvmlField(145),), "failed")),
        label="state",
        pace=Pace.RARE,
    ),
)

XID: Final = CounterDef(
    "xid_errors",
    QuantityKind.COUNTER,
    "{error}",
    "Xid errors since this sidecar's first read, by code; an old error never counts as a new one",
    "without access to events (WSL, some containers); the kernel's log has them",
    "xid",
)
"""Counters made from events, not from readings: ``handrail_sidecar/gpu/xids.py``."""

KNOWN_XIDS: Final = (13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140)
"""Xid codes exposed as 0 from the start, so that the first one is an increase.

Any other code is counted as well when it comes.
"""

BY_NAME: Final = {row.name: row for row in COUNTERS}
NAMES: Final = (*BY_NAME, XID.name)

WINDOW: Final = CounterDef(
    "activity_window_seconds",
    QuantityKind.GAUGE,
    "s",
    "Length of the window of the activity ratios and bytes per second",
    _GPM_ABSENT,
)
PCIE_LINE: Final = CounterDef(
    names.GPU_PCIE_LINE,
    QuantityKind.GAUGE,
    "By/s",
    "Upper bound of the PCIe rate each way, by lanes and generation, before packet headers; the link may be slower now",
    "in vGPUs",
)
NVLINK_LINE: Final = CounterDef(
    names.GPU_NVLINK_LINE,
    QuantityKind.GAUGE,
    "By/s",
    "Rate that all NVLinks can carry each way",
    "if there is no NVLink, or its speed is unknown",
)
DERIVED: Final = (WINDOW, PCIE_LINE, NVLINK_LINE)
"""Figures known without a reading."""

ALL: Final = (*(row.counter for row in COUNTERS), *DERIVED, XID)
