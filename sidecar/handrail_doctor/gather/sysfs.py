"""RDMA ports, network interfaces and kernel modules, from sysfs and procfs.

All paths are below a root. The readers are those of the link sampler (``handrail_sidecar.links``).
A file that cannot be read makes only its own value unknown: ports without a cable answer EINVAL, and GID tables have a thousand
empty rows. Source: Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from handrail.device_counters.link import Nature
from handrail_doctor.facts import Gid, Nic, RdmaPort
from handrail_sidecar.links import nic, rdma, sysfs
from handrail_sidecar.links.nic import NicReader
from handrail_sidecar.links.rdma import PortReader
from handrail_sidecar.links.sysfs import Why

_MOST_GIDS: Final = 256
_EMPTY_GID: Final = re.compile(r"[0:]*|fe80:[0:]*")
_KERNEL: Final = re.compile(r"(\d+)\.(\d+)")


def rdma_ports(root: Path) -> tuple[RdmaPort, ...] | None:
    """Read every RDMA port.

    () on a host without RDMA; None where the folder exists and cannot be read.
    """
    found = rdma.ports(str(root / "sys"))
    if isinstance(found, Why):
        return () if found is Why.ABSENT and not (root / "sys" / rdma.CLASS).exists() else None
    return tuple(map(_port, found))


def nics(root: Path) -> tuple[Nic, ...]:
    """Read every interface but the loopback."""
    found = nic.interfaces(str(root / "sys"))
    reported_nics = [_nic(reader, reader.nature()) for reader in (() if isinstance(found, Why) else found) if reader.key != "lo"]
    return tuple(reported_nics)


def modules(root: Path) -> frozenset[str] | None:
    """Return the names of the loaded kernel modules.

    None where sysfs does not list them.
    """
    names = sysfs.entries(str(root / "sys/module"))
    return None if isinstance(names, Why) else frozenset(names)


def open_driver(root: Path) -> bool | None:
    """Test whether NVIDIA's open kernel modules run; None without that driver."""
    text = _readable(root / "proc/driver/nvidia/version")
    return "Open Kernel Module" in text if text else None


def kernel(root: Path) -> tuple[int, int] | None:
    """Return the kernel's major and minor version."""
    found = _KERNEL.match(_readable(root / "proc/sys/kernel/osrelease"))
    return (int(found[1]), int(found[2])) if found else None


def _port(reader: PortReader) -> RdmaPort:
    rate = reader.line_rate_bytes()
    return RdmaPort(
        adapter=reader.adapter,
        port=int(reader.port),
        state=reader.state(),
        physical=reader.physical_state(),
        bits_per_s=rate * 8 if rate is not None else None,
        lanes=reader.lanes(),
        link_layer=reader.describe("link_layer"),
        netdev=reader.describe("gid_attrs/ndevs/0"),
        gids=tuple(_gids(reader)),
    )


def _nic(reader: NicReader, nature: Nature) -> Nic:
    rate, mtu = reader.line_rate_bytes(), reader.mtu()
    return Nic(
        name=reader.key,
        up=reader.up(),
        bits_per_s=rate * 8 if rate is not None else None,
        mtu=mtu,
        physical=nature in (Nature.ADAPTER, Nature.FUNCTION),
    )


def _gids(reader: PortReader) -> Iterator[Gid]:
    """Yield the GIDs with an address; the default link-local one of zeros is left out."""
    rows = sysfs.entries(f"{reader.folder_of_port}/gids")
    numbers = sorted(int(name) for name in (() if isinstance(rows, Why) else rows) if name.isdecimal())
    for index in numbers[:_MOST_GIDS]:
        address = reader.describe(f"gids/{index}")
        if address and not _EMPTY_GID.fullmatch(address):
            yield Gid(index=index, address=address, kind=reader.describe(f"gid_attrs/types/{index}"))


def _readable(path: Path) -> str:
    """Read a file; '' where there is nothing to read."""
    text = sysfs.text(str(path))
    return "" if isinstance(text, Why) else text
