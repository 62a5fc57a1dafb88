"""Find the GPUs that a process may use, from its environment variables.

NVML shows every GPU of the container whatever these variables say.
``NVIDIA_VISIBLE_DEVICES`` is read by the container runtime, which gives the container those GPUs only. Inside it, indices start
again at 0, so only UUIDs are taken from it.
``CUDA_VISIBLE_DEVICES`` is CUDA's: indices or (shortened) UUIDs in order; a wrong entry hides itself and all after it.
Its indices are NVML's only in PCI order (``CUDA_DEVICE_ORDER=PCI_BUS_ID``) or when all GPUs are of one product: CUDA's default
puts the fastest first.
Source: CUDA C programming guide, "CUDA environment variables"; NVIDIA Container Toolkit, "environment variables".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from handrail.records.devices import Device

CUDA: Final = "CUDA_VISIBLE_DEVICES"
NVIDIA: Final = "NVIDIA_VISIBLE_DEVICES"
_ORDER: Final = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """GPUs that a process may use.

    ``keys``: UUIDs, None when nothing names them. ``variable``: the variable or setting that names them.
    ``notes``: what is odd about it.
    """

    keys: tuple[str, ...] | None
    variable: str = ""
    notes: tuple[str, ...] = ()


def visible(devices: Sequence[Device], environment: Mapping[str, str], chosen: Sequence[str] = ()) -> Visible:
    """Return the GPUs that a setting or the environment names.

    ``chosen``: the setting ``gpu.devices``. When it is empty, the environment decides, CUDA's variable first.
    """
    if chosen:
        return _entries(devices, list(chosen), "gpu.devices", indices=True)
    if CUDA in environment:
        named = [each.strip() for each in environment[CUDA].split(",")]
        found = _entries(devices, named if named != [""] else [], CUDA, indices=True)
        whole = [each for each in devices if not each.parent]
        if (
            any(each.isdigit() for each in named)
            and environment.get(_ORDER) != "PCI_BUS_ID"
            and len({each.product for each in whole}) > 1
        ):
            note = f"{CUDA} counts in CUDA's order, the fastest first: with different GPUs set {_ORDER}=PCI_BUS_ID or give UUIDs"
            return Visible(keys=None, variable=CUDA, notes=(*found.notes, note))
        return found
    text = environment.get(NVIDIA, "")
    named = [each.strip() for each in text.split(",") if each.strip().startswith(("GPU-", "MIG-"))]
    if named:
        return _entries(devices, named, NVIDIA, indices=False)
    return Visible(keys=None)


def _entries(devices: Sequence[Device], named: Sequence[str], reported_by: str, *, indices: bool) -> Visible:
    keys: list[str] = []
    notes: list[str] = []
    for entry in named:
        if entry.startswith("MIG-GPU-"):
            return Visible(
                keys=None, variable=reported_by, notes=(f"{reported_by}: {entry!r} is an old form; use the MIG device's UUID",)
            )
        fits = _fitting(devices, entry, indices=indices)
        if len(fits) == 1 and fits[0] not in keys:
            keys += fits
            continue
        why = "is listed twice" if len(fits) == 1 else "matches several GPUs" if fits else "matches no GPU here"
        if reported_by == CUDA:
            notes.append(f"{CUDA}: {entry!r} {why}: CUDA hides it and all after it")
            break
        notes.append(f"{reported_by}: {entry!r} {why}")
    return Visible(keys=tuple(keys), variable=reported_by, notes=tuple(notes))


def _fitting(devices: Sequence[Device], entry: str, *, indices: bool) -> list[str]:
    if entry.isdigit():
        return [each.key for each in devices if indices and each.index == int(entry) and not each.parent]
    if not entry.startswith(("GPU-", "MIG-")) or len(entry) <= 4:
        return []
    exact = [each.key for each in devices if each.key == entry]
    return exact or [each.key for each in devices if each.key.startswith(entry)]
