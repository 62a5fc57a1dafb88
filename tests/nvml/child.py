"""Run one test function in a process whose NVML is the double.

The process finds the double under the name by which pynvml looks for NVML.

python -m nvml.child MODULE:FUNCTION ARGUMENTS_AS_JSON       (from the tests folder; prints the return value as JSON)
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvml.control import Control
from nvml.scenario import Scenario

TESTS = Path(__file__).parents[1]


class Double:
    """A built library and the folder for one test's scenario and control file."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library = library
        self.folder = folder
        self._control = folder / "control"

    def environment(self, scenario: Scenario | None, *, virtual: bool = False) -> dict[str, str]:
        """Return the environment of a child that has these GPUs.

        None: the child finds no library.
        """
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "NVIDIA_", "FAKE_NVML_"))}
        paths = os.pathsep.join([str(TESTS), *filter(None, [clean.get("PYTHONPATH")])])
        if scenario is None:
            return {**clean, "PYTHONPATH": paths}
        self._control.unlink(missing_ok=True)
        Control(self._control, virtual=virtual)
        return {
            **clean,
            "PYTHONPATH": paths,
            "LD_LIBRARY_PATH": os.pathsep.join([str(self.library), *filter(None, [clean.get("LD_LIBRARY_PATH")])]),
            "FAKE_NVML_SCENARIO": str(scenario.write(self.folder / "scenario.txt")),
            "FAKE_NVML_CONTROL": str(self._control),
        }

    def control(self) -> Control:
        """Return the control file of the last environment made."""
        return Control(self._control)

    def call(
        self,
        function: str,
        scenario: Scenario | None,
        *arguments: Any,
        virtual: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        """Return what ``function`` returns in the child process.

        ``function``: "module:name", of a module in tests. An error in the child is raised here.
        """
        done = subprocess.run(
            [sys.executable, "-m", "nvml.child", function, json.dumps(arguments)],
            env={**self.environment(scenario, virtual=virtual), **(env or {})},
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, f"{function} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])


def control() -> Control:
    """Return the control file, from inside the child."""
    return Control(Path(os.environ["FAKE_NVML_CONTROL"]))


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    answer = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    sys.stdout.flush()
    print(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # a thread in a hanging call must not keep a test waiting


if __name__ == "__main__":
    main()
