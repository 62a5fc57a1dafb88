"""Files of sysfs as values, or why there is none. A read may fail in many ways, and each says something else about the device.

Paths are texts: joining them with ``pathlib`` cost more than the reads (a port: 147 µs a reading with it, 32 without).
"""

from __future__ import annotations

import errno
import os
import re
from enum import Enum
from typing import Final

MOST_BYTES: Final = 4096
"""A sysfs attribute is one page at most."""

MOST_COUNT: Final = 2**64 - 1

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
"""Names of devices that are read: they become labels."""

_PCI: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


class Why(str, Enum):
    """Why a file gives no value."""

    ABSENT = "absent"  # this driver or kernel has no such file
    DENIED = "denied"  # we may not read it
    REFUSED = "refused"  # there, and the driver does not answer: EINVAL of a port that is down, EOPNOTSUPP, EIO
    GONE = "gone"  # the device was taken away while we read
    GARBAGE = "garbage"  # what it holds is no such value
    STUCK = "stuck"  # a counter that stands at its highest number and counts no further


_WHY: Final = {
    errno.ENOENT: Why.ABSENT,
    errno.ENOTDIR: Why.ABSENT,
    errno.EISDIR: Why.ABSENT,
    errno.ELOOP: Why.ABSENT,
    errno.EACCES: Why.DENIED,
    errno.EPERM: Why.DENIED,
    errno.ENODEV: Why.GONE,
    errno.ENXIO: Why.GONE,
}


def text(path: str) -> str | Why:
    """What the file holds, without the white space around it. May block for as long as the driver does."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(file, MOST_BYTES + 1)
        finally:
            os.close(file)
    except OSError as error:
        return _WHY.get(error.errno or 0, Why.REFUSED)
    if len(data) > MOST_BYTES:
        return Why.GARBAGE
    return data.decode("ascii", "replace").strip()


def count(path: str) -> int | Why:
    """A counter of at most 64 bits."""
    found = text(path)
    if isinstance(found, Why):
        return found
    # isdigit alone takes the digits of every script, and int() would take signs and underscores
    if not (found.isascii() and found.isdigit()) or len(found) > 20 or (value := int(found)) > MOST_COUNT:
        return Why.GARBAGE
    return value


def target(path: str) -> str:
    """The last part of what a symbolic link names; '' where there is none."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def pci(path: str) -> str:
    """The PCI address that the ``device`` link names; '' where it names none."""
    name = target(path)
    return name if _PCI.fullmatch(name) else ""


def entries(path: str) -> list[str] | Why:
    """Names in a folder, sorted."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        return _WHY.get(error.errno or 0, Why.REFUSED)
