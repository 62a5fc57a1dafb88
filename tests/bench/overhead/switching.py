"""Switch the plugin of every process of both engines, and check that it did.

This is the benchmark's end of ``engine_site/overhead_switch.py``.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

SITE = Path(__file__).with_name("engine_site")
FOLDER_ENV = "OVERHEAD_SWITCHES"
_ANSWER_S = 30.0


class Switches:
    """The switches of all processes, one socket each in ``folder``.

    Sockets of processes that have ended are skipped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[int, int] = {}  # pid -> datagrams
        self._on = True

    def turn(self, on: bool) -> None:
        """Switch every process on or off, after some load.

        Raises ``RuntimeError`` when a process did not switch, or was in the wrong state before.
        """
        reports = [answer for path in sorted(self._folder.glob("*.sock")) if (answer := _ask(path, b"on" if on else b"off"))]
        wrong = [answer for answer in reports if answer.get("on") is not on]
        if wrong:
            raise RuntimeError(f"a process did not switch: {wrong[0]}")
        cores = [answer for answer in reports if answer["connectors"]]
        if len(cores) < 2 or not all(answer["methods"] >= 4 for answer in cores):
            raise RuntimeError(f"the plugin is not in both engines: {reports}")
        for answer in cores:
            spoke = answer["datagrams"] > self._sent.get(answer["pid"], 0)
            if self._sent and spoke is not self._on:
                raise RuntimeError(f"process {answer['pid']} {'spoke while off' if spoke else 'said nothing while on'}")
        self._sent = {answer["pid"]: answer["datagrams"] for answer in cores}
        self._on = on


def _ask(path: Path, word: bytes) -> dict[str, Any] | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_ANSWER_S)
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return None  # its process has ended
        asking.sendall(word)
        answer: dict[str, Any] = json.loads(asking.recv(4096))
        return answer
