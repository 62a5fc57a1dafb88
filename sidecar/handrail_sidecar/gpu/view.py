"""Show the GPUs' present values and absent counters, for /metrics and for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from handrail.device_counters.gpu import BY_NAME, KNOWN_XIDS, XID
from handrail.records.devices import Device, DeviceValue
from handrail_sidecar.gpu.failures import failure
from handrail_sidecar.gpu.gpm import GpmTask
from handrail_sidecar.gpu.nvml_calls import NvmlTask
from handrail_sidecar.gpu.reader import DeviceReader
from handrail_sidecar.gpu.sampler import Sampler
from handrail_sidecar.gpu.xids import XidWatch

_STALE_NS: Final = 5_000_000_000
_STALE_PERIODS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A counter that a device does not provide at all.

    ``why``: the driver's answer. ``instead``: what would provide it.
    """

    device: Device
    counter: str
    code: int
    why: str
    instead: str


def fresh_values(sampler: Sampler) -> list[tuple[Device, DeviceValue]]:
    """Return the last value of each counter that is still being read.

    A counter that hangs or is lost is absent; an old value is never shown.
    """
    found: list[tuple[Device, DeviceValue]] = []
    now = sampler.now_ns()
    for task in all_tasks(sampler):
        if not task.read_ns or now - task.read_ns > max(_STALE_NS, _STALE_PERIODS * task.period_ns):
            continue
        device = task.gpu.device
        found += [(device, slot.last) for slot in list(task.slots) if slot.last is not None]
        if isinstance(task, GpmTask) and task.window is not None:
            found.append((device, task.window))
    for reader in list(sampler.readers.values()):
        found += [(reader.gpu.device, value) for value in reader.lines()]
        found += [(reader.gpu.device, value) for value in _xids(sampler, reader)]
    return found


def absences(readers: Iterable[DeviceReader], watch: XidWatch | None) -> list[Absent]:
    """Return the counters for which a device has no value, in the table's order.

    Counters that the settings leave out are not listed. ``readers``, ``watch``: of a sampler.
    """
    found = []
    for reader in list(readers):
        absent = dict(reader.absent)
        for name in (name for name in BY_NAME if name in reader.wanted):
            codes = {absent.get((name, value.label)) for value in BY_NAME[name].values}
            if None not in codes:
                found.append(_absent(reader, name, next(iter(codes)) or 0, BY_NAME[name].counter.absent))
        if watch is not None and reader.gpu.device.key in watch.absent:
            found.append(_absent(reader, XID.name, watch.absent[reader.gpu.device.key], XID.absent))
    return found


def supported(sampler: Sampler) -> Iterator[tuple[Device, str, bool]]:
    """Yield (device, counter, supported) for every counter that is looked for.

    ``supported`` is False once the device has refused it.
    """
    none = {(each.device.key, each.counter) for each in absences(sampler.readers.values(), sampler.xid_watch)}
    for reader in list(sampler.readers.values()):
        names = [name for name in BY_NAME if name in reader.wanted] + ([] if reader.gpu.is_mig else [XID.name])
        for name in names:
            yield reader.gpu.device, name, (reader.gpu.device.key, name) not in none


def all_tasks(sampler: Sampler) -> list[NvmlTask]:
    """Return every call that is made."""
    return [task for reader in list(sampler.readers.values()) for task in list(reader.tasks)]


def _absent(reader: DeviceReader, name: str, code: int, instead: str) -> Absent:
    return Absent(device=reader.gpu.device, counter=name, code=code, why=failure(code).words, instead=instead)


def _xids(sampler: Sampler, reader: DeviceReader) -> list[DeviceValue]:
    """Return the Xid counts, with zeros for well-known codes.

    A zero makes the first error an increase. Returns nothing where Xid events are unavailable.
    """
    watch, key = sampler.xid_watch, reader.gpu.device.key
    if watch is None or key in watch.absent or reader.gpu.is_mig:
        return []
    counted = {int(value.label): value for value in reader.counted()}
    zeros = [DeviceValue(name=XID.name, value=0, label=str(code)) for code in KNOWN_XIDS if code not in counted]
    return [*counted.values(), *zeros]
