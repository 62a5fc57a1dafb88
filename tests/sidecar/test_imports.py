"""What importing Handrail loads: in the engine's process every import counts."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

GUEST: tuple[str, ...] = (
    "handrail",
    "handrail.records",
    "handrail.conventions",
    "handrail.identity",
    "handrail.trace_context",
    "handrail.phases",
)
GUEST += (
    "handrail.clock_offset",
    "handrail.metrics.exponential_histogram",
    "handrail.durations",
    "handrail.wal.log",
    "handrail_cli.main",
)

LOADED = """
import importlib, json, sys
before = set(sys.modules)
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps({{m: getattr(sys.modules[m], '__file__', None) for m in set(sys.modules) - before}}))
"""


def loaded(*names: str) -> dict[str, str | None]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOADED.format(names=names)], capture_output=True, text=True, check=True, timeout=300
    )
    modules: dict[str, str | None] = json.loads(done.stdout)
    return modules


def test_the_package_alone_loads_nothing_else() -> None:
    assert set(loaded("handrail")) == {"handrail"}


def test_what_the_engine_may_import_is_the_standard_library_alone() -> None:
    third_party = Path(sysconfig.get_paths()["purelib"]).resolve()
    foreign = {
        name
        for name, file in loaded(*GUEST).items()
        if file and third_party in Path(file).resolve().parents and "handrail" not in name
    }
    assert foreign == set()


@pytest.mark.parametrize("forbidden", ["asyncio", "prometheus_client", "opentelemetry", "grpc", "aiohttp"])
def test_what_must_never_reach_the_engine_early(forbidden: str) -> None:
    """An early import of prometheus_client empties the engine's own /metrics.

    It must not happen before the engine sets PROMETHEUS_MULTIPROC_DIR.
    """
    assert forbidden not in loaded(*(n for n in GUEST if n != "handrail_cli.main"))


def test_the_base_install_has_no_dependencies() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "\ndependencies = []\n" in text
