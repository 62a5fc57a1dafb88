"""A fleet of processes whose members can restart at their old addresses.

It extends tests/harness/real_fleet.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from handrail_cli.subprocesses import Child
from harness.real_fleet import ANY, Fleet, Shape

_NAMES: Final = {"--otlp-grpc": "otlp_grpc", "--otlp-http": "otlp_http", "--api": "api", "--admin": "admin"}
_SIDECARS: Final = ("edge", "sidecar-")


class Restartable(Fleet):
    """A fleet where ``again`` restarts a member that has ended."""

    def __init__(self, name: str, folder: Path, shape: Shape, *, seed: int = 0) -> None:
        super().__init__(name, folder, shape, seed=seed)
        self._commands: dict[str, tuple[tuple[str, ...], Mapping[str, str] | None]] = {}

    def again(self, name: str) -> Child:
        command, env = self._commands[name]
        bound = self[name].addresses
        words = list(command)
        for at, word in enumerate(words):
            if word == ANY:
                kind = "proxy" if name.startswith(_SIDECARS) else "http"
                words[at] = bound[_NAMES.get(words[at - 1], kind)]
        return self._run(name, *words, env=env)

    def _run(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> Child:
        if name not in self._commands:
            self._commands[name] = (command, env)
        return super()._run(name, *command, env=env)
