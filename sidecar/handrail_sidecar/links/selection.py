"""Choose which devices of a host are read.

Interfaces of hundreds of containers say nothing about a hand-off, and each would be a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from handrail.device_counters.link import Nature
from handrail_sidecar.links import nic, rdma
from handrail_sidecar.links.nic import NicReader
from handrail_sidecar.links.rdma import PortReader
from handrail_sidecar.links.reading import LinkReader
from handrail_sidecar.links.sysfs import Why

MOST_DEVICES: Final = 64
"""Most ports and interfaces that are read; a DGX has 12 and 14."""


@dataclass(frozen=True, slots=True)
class SelectedLinks:
    """Devices that are read, and those that are not.

    ``left_out``: names of the devices that are there and not read, sorted. ``rdma``, ``nics``: why a class could not be listed.
    """

    readers: tuple[LinkReader, ...]
    left_out: tuple[str, ...]
    rdma: Why | None = None
    nics: Why | None = None


def choose(root: Path, wanted: Sequence[str] = ()) -> SelectedLinks:
    """Choose the devices to read.

    ``wanted``: names or patterns (``mlx5_*``, ``bond0``) of the only devices to read.
    Empty means every RDMA port, the loopback, adapters, bonds and VLANs.
    Where there is no adapter (a pod's own network), it includes the virtual interfaces too.
    """
    ports, interfaces = rdma.ports(str(root)), nic.interfaces(str(root))
    there: tuple[list[PortReader], list[NicReader]] = (
        [] if isinstance(ports, Why) else ports,
        [] if isinstance(interfaces, Why) else interfaces,
    )
    every: list[LinkReader] = [*there[0], *there[1]]
    if wanted:
        taken = [reader for reader in every if any(fnmatchcase(reader.key, each) for each in wanted)]
    else:
        taken = [*there[0], *_usual(there[1])]
    kept = taken[:MOST_DEVICES]
    keys = {reader.key for reader in kept}
    return SelectedLinks(
        tuple(kept),
        tuple(sorted(reader.key for reader in every if reader.key not in keys)),
        ports if isinstance(ports, Why) else None,
        interfaces if isinstance(interfaces, Why) else None,
    )


def _usual(interfaces: Sequence[NicReader]) -> list[NicReader]:
    natures = {reader.key: reader.nature() for reader in interfaces}
    real = any(nature in (Nature.ADAPTER, Nature.FUNCTION) for nature in natures.values())
    return [reader for reader in interfaces if not real or natures[reader.key] is not Nature.VIRTUAL]
