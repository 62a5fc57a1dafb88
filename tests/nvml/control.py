"""The double's clock and its release flag, in a small file that both sides map.

The layout is ``Control`` in scenario.c.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_LAYOUT = struct.Struct("<qqq")  # now in ns, whether the clock is virtual, whether hanging calls return


class Control:
    """The double's control file.

    ``virtual``: the double's time stays where ``set`` put it; otherwise it is real time since the library was loaded.
    """

    def __init__(self, path: Path, *, virtual: bool = False) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(_LAYOUT.pack(0, int(virtual), 0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def set(self, now_ns: int) -> None:
        """Move the virtual clock."""
        self._map[0:8] = now_ns.to_bytes(8, "little")

    @property
    def now_ns(self) -> int:
        return int.from_bytes(self._map[0:8], "little")

    def release(self, *, hang_again: bool = False) -> None:
        """Let every hanging call return."""
        self._map[16:24] = int(not hang_again).to_bytes(8, "little")
