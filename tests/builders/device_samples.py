"""Device samples of a host with eight GPUs, RDMA ports and a NIC.

Tests use them for size, for speed, and for tracks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from handrail import conventions as names
from handrail.records import Process, Role, Source
from handrail.records.devices import CounterDef, Device, DeviceKind, DeviceSample, DeviceValue
from handrail.records.quantities import QuantityKind

S = 10**9
START_UNIX_NS = 1_796_000_000 * S
COUNTING_SINCE = START_UNIX_NS - 86_400 * S + 123_456_789

GPU_TABLE = (
    CounterDef(names.GPU_BUSY, QuantityKind.GAUGE, "1", "Share of the time in which a kernel ran", ""),
    CounterDef(names.GPU_TENSOR_ACTIVE, QuantityKind.GAUGE, "1", "Share of cycles in which the tensor pipes were active", ""),
    CounterDef(names.GPU_DRAM_ACTIVE, QuantityKind.GAUGE, "1", "Share of cycles in which the memory interface was active", ""),
    CounterDef(names.GPU_NVLINK_BYTES, QuantityKind.COUNTER, "By", "Bytes over all NVLinks", "", "direction"),
)
"""The GPU counters as far as the texts of metrics need them."""


def process(host: str = "p0", role: Role = Role.PREFILL, instance: str = "") -> Process:
    """Build the process record of a sidecar on that host."""
    return Process(
        role=role,
        instance=instance or f"{host}:8000",
        host=f"id-of-{host}",
        service=f"handrail-{role.value}",
        sender="5e" * 16,
        host_name=host,
    )


def gpu(index: int = 0, host: str = "p0", **more: object) -> Device:
    """Build one H100 of eight."""
    made = Device(
        kind=DeviceKind.GPU,
        key=f"GPU-{host}-{index:02d}00-4a1b-9c2d-0123456789ab",
        index=index,
        product="NVIDIA H100 80GB HBM3",
        pci=f"00000000:{index:02x}:00.0",
    )
    return replace(made, **more)  # type: ignore[arg-type]  # by name


def port(number: int = 0, **more: object) -> Device:
    """Build one 400 Gb/s port."""
    made = Device(kind=DeviceKind.RDMA, key=f"mlx5_{number}/1", product="MT4129", line_rate_bytes=50_000_000_000)
    return replace(made, **more)  # type: ignore[arg-type]  # by name


def gauge(name: str, value: float, label: str = "") -> DeviceValue:
    """Build a gauge value."""
    return DeviceValue(name=name, value=value, label=label)


def counter(name: str, value: int, label: str = "", since: int = COUNTING_SINCE) -> DeviceValue:
    """Build a counter value."""
    return DeviceValue(name=name, value=value, label=label, start_unix_ns=since)


def sample(
    device: Device, at_unix_ns: int, *values: DeviceValue, of: Process | None = None, took_ns: int = 900_000
) -> DeviceSample:
    """Build a sample with values by name and label, as they are read back."""
    return DeviceSample(
        process=of or process(),
        source={DeviceKind.GPU: Source.NVML, DeviceKind.RDMA: Source.RDMA, DeviceKind.NIC: Source.NIC}[device.kind],
        device=device,
        at_unix_ns=at_unix_ns,
        values=tuple(sorted(values, key=lambda value: (value.name, value.label))),
        took_ns=took_ns,
    )


_THROTTLES = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sync_boost")


@dataclass(slots=True)
class Busy:
    """One GPU with 29 counters that move as an H100's do under load.

    NVML's percentages come in hundredths, GPM values in finer steps.
    """

    device: Device
    rng: random.Random
    totals: dict[tuple[str, str], int] = field(default_factory=dict)

    def values(self, step_s: float) -> tuple[DeviceValue, ...]:
        """Return the values after another ``step_s``."""
        rng = self.rng
        load = rng.betavariate(4, 2)
        found = [
            gauge(names.GPU_BUSY, round(load, 2)),
            gauge("memory_utilization_ratio", round(load * 0.6, 2)),
            gauge(names.GPU_SM_ACTIVE, round(load * 0.9, 4)),
            gauge(names.GPU_TENSOR_ACTIVE, round(load * rng.uniform(0.3, 0.6), 4)),
            gauge(names.GPU_DRAM_ACTIVE, round(load * rng.uniform(0.2, 0.7), 4)),
            gauge("memory_used_bytes", 72_350_040_064 + rng.choice((0, 0, 0, 2_097_152))),
            gauge("memory_total_bytes", 85_520_809_984),
            gauge("power_watts", round(150 + 500 * load + rng.uniform(-5, 5), 3)),
            gauge("power_limit_watts", 700.0),
            gauge("temperature_celsius", 40 + round(20 * load), "gpu"),
            gauge("temperature_celsius", 48 + round(22 * load), "memory"),
            gauge("clock_hertz", 1_980_000_000 if rng.random() < 0.9 else 1_755_000_000, "sm"),
            gauge("clock_hertz", 2_619_000_000, "memory"),
            *(gauge("throttled", int(name == "sw_power_cap" and load > 0.8), name) for name in _THROTTLES),
            self._more("energy_joules", "", 400 * load * step_s),
            self._more("ecc_errors", "corrected", 0),
            self._more("ecc_errors", "uncorrected", 0),
            self._more("xid_errors", "", 0),
            self._more("throttle_nanoseconds", "power", 1e9 * step_s * max(0.0, load - 0.8)),
            *(self._more(names.GPU_PCIE_BYTES, way, 2e9 * load * step_s) for way in (names.RECEIVE, names.TRANSMIT)),
            *(self._more(names.GPU_NVLINK_BYTES, way, 9e10 * load * step_s) for way in (names.RECEIVE, names.TRANSMIT)),
        ]
        return tuple(found)

    def _more(self, name: str, label: str, grows: float) -> DeviceValue:
        total = self.totals.get((name, label), 10**14) + round(grows * self.rng.uniform(0.8, 1.2))
        self.totals[name, label] = total
        return counter(name, total, label)


def busy_host(seconds: float, rate_hz: int = 10, gpus: int = 8, host: str = "p0", seed: int = 1) -> Iterator[list[DeviceSample]]:
    """Yield the samples of each instant of a host.

    Instants jitter by some 100 us, as a sampler's do.
    """
    rng = random.Random(seed)
    devices = [Busy(gpu(index, host), random.Random(f"{seed}-{host}-{index}")) for index in range(gpus)]
    of = process(host)
    for tick in range(round(seconds * rate_hz)):
        at = START_UNIX_NS + tick * S // rate_hz
        yield [
            sample(
                each.device,
                at + rng.randrange(200_000),
                *each.values(1 / rate_hz),
                of=of,
                took_ns=rng.randrange(600_000, 2_000_000),
            )
            for each in devices
        ]


def flattened(instants: Sequence[list[DeviceSample]]) -> list[DeviceSample]:
    """Return all samples, oldest first."""
    return sorted((one for each in instants for one in each), key=lambda one: (one.at_unix_ns, one.device.key))
