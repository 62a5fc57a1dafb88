"""Build a network of two hosts in namespaces.

This process is on one side, a process of Handrail's on the other.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from typing import Final

from faults.trial import NotRunError

HERE: Final = "10.211.0.1"
THERE: Final = "10.211.0.2"
_CLONE_NEWNET: Final = 0x40000000


class TwoHosts:
    """Two hosts in network namespaces; ends with ``close``.

    ``there``: words before a command that runs on the other host.
    This process enters a network namespace of its own and stays there. Nothing outlives this process.
    Raises ``NotRunError`` when the process may not do this.
    """

    def __init__(self) -> None:
        for program in ("ip", "nsenter", "unshare"):
            if shutil.which(program) is None:
                raise NotRunError(f"no {program}: apt-get install iproute2 util-linux")
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise NotRunError(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "100000"])
        self.there = ("nsenter", "-t", str(self._holder.pid), "-n")
        here, there = os.readlink("/proc/self/ns/net"), f"/proc/{self._holder.pid}/ns/net"
        while os.readlink(there) == here:  # wait until unshare has done it
            if self._holder.poll() is not None:
                raise NotRunError("no network namespace beside this one")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1", "netns", str(self._holder.pid))
        _run("ip", "addr", "add", f"{HERE}/24", "dev", "veth0")
        _run("ip", "link", "set", "veth0", "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{THERE}/24", "dev", "veth1"),
            ("link", "set", "veth1", "up"),
        ):
            _run(*self.there, "ip", *words)

    def cut(self) -> None:
        """Drop the packets in both directions, without any notice to the ends."""
        _run("ip", "link", "set", "veth0", "down")

    def join(self) -> None:
        _run("ip", "link", "set", "veth0", "up")

    def close(self) -> None:
        self._holder.send_signal(signal.SIGKILL)
        self._holder.wait()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NotRunError(f"{' '.join(words)}: {done.stderr.strip()}")
