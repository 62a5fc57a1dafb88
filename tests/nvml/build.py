"""Build the NVML double with the machine's C compiler.

The headers come from the package ``nvidia-nvml-dev``.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
SOURCES: Final = ("fake_nvml.c", "scenario.c")
NAME: Final = "libnvidia-ml.so.1"


class CannotBuild(Exception):  # noqa: N818 - a reason that tests print, not a fault
    """Why the double cannot be built here, and what to install."""


def build(folder: Path) -> Path:
    """Build the double; return the folder that holds the library.

    Raises ``CannotBuild`` when the compiler or the headers are missing. A compiler that fails on our own source is an error.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CannotBuild("no C compiler: apt-get install gcc libc6-dev (Debian), dnf install gcc, apk add build-base")
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{NAME}"]
    command += [f"-I{headers()}", f"-I{HERE}", "-o", str(folder / NAME), *(str(HERE / name) for name in SOURCES), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{compiler} could not build the double:\n{done.stderr}")
    return folder


def headers() -> Path:
    """Return the folder of ``nvml.h``. Raises ``CannotBuild``."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for header in sorted(Path(root).glob("*/include/nvml.h"), reverse=True):
            return header.parent
    raise CannotBuild("no nvml.h: pip install nvidia-nvml-dev (make setup does)")
