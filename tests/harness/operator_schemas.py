"""Check objects of the Prometheus operator and cert-manager against their schemas.

The schemas and types come from those projects.
The validators are npm packages. They are installed once, from the lock file beside ``validate.mjs``, into ~/.cache/handrail.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from harness.skips import skip_missing

SOURCES: Final = Path(__file__).parents[1] / "deploy/operator"
KINDS: Final = ("monitoring.coreos.com/v1", "cert-manager.io/v1")


def operator_problems(objects: Sequence[dict[str, Any]]) -> list[str]:
    """Return the problems of these objects, one line each.

    Skips without Node.js, and when npm cannot install the packages.
    """
    place = _installed()
    ours = [each for each in objects if each["apiVersion"] in KINDS]
    command = ("node", "--no-warnings", "validate.mjs")
    done = subprocess.run(command, cwd=place, input=json.dumps(ours), capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    problems: list[str] = json.loads(done.stdout)
    return problems


def _installed() -> Path:
    if shutil.which("node") is None or shutil.which("npm") is None:
        skip_missing("node and npm: the operators' objects are not checked")
    files = sorted(path for path in SOURCES.iterdir() if path.is_file())
    recipe = hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=8).hexdigest()
    base = Path(os.environ.get("HANDRAIL_CACHE") or Path.home() / ".cache/handrail")
    place = base / f"operator-schemas-{recipe}"
    if not (place / "installed").exists():
        place.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy(path, place)
        command = ("npm", "ci", "--silent", "--ignore-scripts")
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=500)
        if done.returncode != 0:
            skip_missing(f"npm could not install the operators' schemas: {done.stderr.strip()[-300:]}")
        (place / "installed").touch()
    return place
