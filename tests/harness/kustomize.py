"""Run kustomize's own code: the Go library inside the package pykustomize.

The package's Python part is not used, because it requires Python 3.14.
``python tests/harness/kustomize.py FOLDER`` prints the built objects as a JSON list.
It runs as its own process, because Helm's library is another Go runtime in the tests' process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

_BUILT_FOR: Final = {("Linux", "x86_64"): "linux-amd64/libpykustomize.so"}


def library() -> Path | None:
    """Return the shared library; None where there is none for this machine."""
    found = importlib.util.find_spec("pykustomize")
    name = _BUILT_FOR.get((platform.system(), platform.machine()))
    if found is None or found.origin is None or name is None:
        return None
    path = Path(found.origin).parent / "_lib" / name
    return path if path.exists() else None


def build(folder: Path) -> list[dict[str, Any]]:
    """Build the objects of a kustomization.

    Raises ``ValueError`` with kustomize's message.
    """
    done = subprocess.run((sys.executable, __file__, str(folder)), capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    built: list[dict[str, Any]] = json.loads(done.stdout)
    return built


def main() -> int:
    path = library()
    if path is None:
        print("no Kustomize library for this machine: make setup installs it on Linux x86_64", file=sys.stderr)
        return 3
    kustomize = ctypes.CDLL(str(path))
    kustomize.pykustomize_last_error.restype = ctypes.c_char_p
    result = ctypes.c_char_p()
    options = json.dumps({"load_restrictions": 0, "reorder": "none"}).encode()
    if kustomize.pykustomize_build_to_json(sys.argv[1].encode(), options, ctypes.byref(result)) != 0:
        print((kustomize.pykustomize_last_error() or b"").decode(errors="replace"), file=sys.stderr)
        return 1
    print(json.dumps(json.loads(result.value or b"{}")["resources"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
