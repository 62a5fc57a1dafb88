"""The drawn list of packages.

Imports point down only, and no two files import each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "handrail",
    "handrail_sidecar",
    "handrail_doctor",
    "handrail_collector",
    "handrail_cli",
    "handrail_alerts",
    "handrail_dashboards",
    "handrail_sim",
)


def cycles(graph: grimp.ImportGraph) -> Iterator[list[str]]:
    """Yield sets of modules that import each other, by Tarjan's algorithm.

    networkx has it too, for one more dependency.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            if imported not in index:
                yield from visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            found = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(found) > 1:
                yield sorted(found)

    for module in sorted(graph.modules):
        if module not in index:
            yield from visit(module)


def test_packages_point_down() -> None:
    """Run the contracts of ``[tool.importlinter]`` in pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_files_import_each_other() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    assert list(cycles(graph)) == []


def test_every_package_of_ours_is_in_the_list() -> None:
    """A new package is first added to the list."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folders = {
        path.parent.name
        for root in ("sidecar", "collector", "alerts", "dashboards", "deploy/fleet")
        for path in (ROOT / root).glob("handrail*/__init__.py")
    }
    assert folders == set(PACKAGES)
    assert [name for name in PACKAGES if f'"{name}"' not in text.partition("[tool.importlinter]")[2]] == []
