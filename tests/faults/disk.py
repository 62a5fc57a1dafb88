"""Make disks that fill, fail, wait or cannot be written.

It uses a small file system, or a library that intercepts the calls of the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from faults.trial import NotRunError

SOURCE: Final = Path(__file__).parent / "faulty_disk.c"
READ_ONLY: Final = {"open": errno.EROFS, "write": errno.EROFS, "name": errno.EROFS}


class FaultyDisk:
    """Intercept the calls of processes with ``environment`` on files below ``folder``.

    The newest ``rule`` decides what the calls do.
    """

    def __init__(self, folder: Path, below: Path) -> None:
        if sys.platform != "linux":
            raise NotRunError("LD_PRELOAD is of Linux")
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise NotRunError("no C compiler for the layer under the disk's calls: apt-get install gcc libc6-dev")
        library = folder / "faulty_disk.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(f"{compiler} could not build {SOURCE.name}:\n{done.stderr}")
        self._rules = folder / "disk.rules"
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "FAULTY_DISK_FOLDER": str(below),
            "FAULTY_DISK_RULES": str(self._rules),
        }

    def fail(self, faults: Mapping[str, int], wait_ms: int = 0) -> None:
        """From now on, fail each kind of call with its errno after ``wait_ms``."""
        new = self._rules.with_suffix(".new")
        new.write_text("".join(f"{kind} {number} {wait_ms}\n" for kind, number in faults.items()), encoding="ascii")
        new.replace(self._rules)

    def mend(self) -> None:
        self._rules.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of ``size`` (``24m``).

    Raises ``NotRunError`` when none can be mounted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "handrail-faults", str(folder)], capture_output=True)
    if done.returncode:
        raise NotRunError(f"no file system can be mounted: {done.stderr.decode(errors='replace').strip()}")
    try:
        yield folder
    finally:
        if subprocess.run(["umount", str(folder)], capture_output=True).returncode:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """Write a file that leaves only so much room on the disk."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            free = room(folder) - leave_bytes
            if free <= 0:
                break
            file.write(bytes(min(free, 1 << 20)))
    return ballast


def room(folder: Path) -> int:
    """Return the free bytes."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_bsize


def remount(folder: Path, options: str) -> None:
    """Remount the disk. Raises ``NotRunError``."""
    done = subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], capture_output=True)
    if done.returncode:
        raise NotRunError(done.stderr.decode(errors="replace").strip())
