"""Samples of GPUs, RDMA ports and NICs: one record a device and instant, whatever read it.

Base units as in ``families/schema.py``: bytes, seconds, watts, joules, hertz, degrees Celsius, ratios from 0 to 1. Counters are
whole numbers that only grow: wraps and the driver's own units are undone by whoever reads the device. What a device does not
give is absent, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from handrail.families.schema import Kind
from handrail.records import Process, Source


class DeviceKind(str, Enum):
    """What kind of hardware a sample is of."""

    GPU = "gpu"
    RDMA = "rdma"  # one port of one adapter
    NIC = "nic"


@dataclass(frozen=True, slots=True)
class Counter:
    """One row of the table of counters. Exposed as ``handrail_gpu_`` or ``handrail_link_`` + name, counters with ``_total``.

    ``label``: the one label its values have besides the device's (a direction, a throttle reason, a port), '' for none.
    ``absent``: when and why a device lacks it, and what would provide it, in words for a person.
    """

    name: str
    kind: Kind
    unit: str  # UCUM, as OTLP has it
    help: str
    absent: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """``key``: GPU or MIG UUID, ``mlx5_0/1`` (adapter and port), ``eth0``; unique on its host."""

    kind: DeviceKind
    key: str
    index: int | None = None  # NVML's, which need not be CUDA's
    product: str = ""
    pci: str = ""  # domain:bus:device.function
    line_rate_bytes: int | None = None  # a second and direction, as the device says it is set now
    parent: str = ""  # MIG: the UUID of its GPU
    engine: str = ""  # instance of the engine that uses it, '' where nothing says so


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceValue:
    """``start_unix_ns``: of a counter, since when it counts as far as we know; 0 for gauges."""

    name: str
    value: float  # int for counters, which stays exact
    label: str = ""
    start_unix_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One device at one instant. ``took_ns``: from before the first call to after the last one that gave ``values``."""

    process: Process
    source: Source
    device: Device
    at_unix_ns: int
    values: tuple[DeviceValue, ...]
    took_ns: int = 0
