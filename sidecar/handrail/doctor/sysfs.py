"""RDMA ports, network interfaces and kernel modules of this host, from sysfs and procfs below a root.

Every file may be absent, unreadable, empty or garbage (ports without a cable answer EINVAL, GID tables have a thousand empty
rows): what cannot be read is not known, and the rest is. Source: Documentation/ABI/stable/sysfs-class-infiniband,
sysfs-class-net."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from handrail.doctor.hostfacts import Gid, Nic, RdmaPort

_MOST_BYTES: Final = 4096
_MOST_GIDS: Final = 256
_EMPTY_GID: Final = re.compile(r"[0:]*|fe80:[0:]*")
_RATE: Final = re.compile(r"([\d.]+)\s*Gb/sec(?:\s*\((\d+)X)?")
_NUMBERED: Final = re.compile(r"\d+:\s*(.*)")
_KERNEL: Final = re.compile(r"(\d+)\.(\d+)")


def rdma_ports(root: Path) -> tuple[RdmaPort, ...] | None:
    """Every port; () on a host without RDMA; None where the folder is there and cannot be read."""
    folder = root / "sys/class/infiniband"
    adapters = _names(folder)
    if adapters is None:
        return None if folder.exists() else ()
    return tuple(
        _port(folder / adapter / "ports" / port, adapter, int(port))
        for adapter in adapters
        for port in _names(folder / adapter / "ports") or ()
        if port.isdigit()
    )


def nics(root: Path) -> tuple[Nic, ...]:
    """Every interface but the loopback."""
    folder = root / "sys/class/net"
    found = []
    for name in _names(folder) or ():
        speed = _integer(folder / name / "speed")  # Mb/s; -1 or EINVAL where there is no link
        if name == "lo" or not (folder / name).is_dir():
            continue
        found.append(
            Nic(
                name=name,
                up=_text(folder / name / "operstate") == "up",
                bits_per_s=speed * 1e6 if speed is not None and speed > 0 else None,
                mtu=_integer(folder / name / "mtu"),
                physical=(folder / name / "device").exists(),
            )
        )
    return tuple(found)


def modules(root: Path) -> frozenset[str] | None:
    """Names of the loaded kernel modules; None where sysfs does not say."""
    names = _names(root / "sys/module")
    return None if names is None else frozenset(names)


def open_driver(root: Path) -> bool | None:
    """Whether NVIDIA's open kernel modules run; None without that driver."""
    text = _text(root / "proc/driver/nvidia/version")
    return "Open Kernel Module" in text if text else None


def kernel(root: Path) -> tuple[int, int] | None:
    """Major and minor version."""
    found = _KERNEL.match(_text(root / "proc/sys/kernel/osrelease"))
    return (int(found[1]), int(found[2])) if found else None


def _port(folder: Path, adapter: str, port: int) -> RdmaPort:
    rate = _RATE.search(_text(folder / "rate"))
    return RdmaPort(
        adapter=adapter,
        port=port,
        state=_word(folder / "state"),
        physical=_word(folder / "phys_state"),
        bits_per_s=float(rate[1]) * 1e9 if rate and float(rate[1]) > 0 else None,
        lanes=int(rate[2]) if rate and rate[2] else None,
        link_layer=_text(folder / "link_layer"),
        netdev=_text(folder / "gid_attrs/ndevs/0"),
        gids=tuple(_gids(folder)),
    )


def _gids(folder: Path) -> Iterator[Gid]:
    """The rows that hold an address other than the default link-local one of nothing."""
    numbers = sorted(int(name) for name in _names(folder / "gids") or () if name.isdigit())
    for index in numbers[:_MOST_GIDS]:
        address = _text(folder / "gids" / str(index))
        if address and not _EMPTY_GID.fullmatch(address):
            yield Gid(index=index, address=address, kind=_text(folder / "gid_attrs/types" / str(index)))


def _word(path: Path) -> str:
    """``4: ACTIVE`` as ``ACTIVE``."""
    text = _text(path)
    numbered = _NUMBERED.fullmatch(text)
    return numbered[1] if numbered else text


def _names(folder: Path) -> list[str] | None:
    try:
        return sorted(each.name for each in folder.iterdir())
    except OSError:
        return None


def _text(path: Path) -> str:
    """'' where there is nothing to read."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        return stream.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    return ""


def _integer(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None
