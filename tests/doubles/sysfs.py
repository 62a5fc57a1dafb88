"""A fake sysfs tree for RDMA ports and network interfaces.

Its counters move, refuse, hang and vanish.
A file whose read fails with EIO stands for what a driver refuses (EINVAL of ``speed`` on an interface that is down).
A named pipe without a writer stands for a read that hangs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

STUCK_32 = 2**32 - 1


class FakeSysfs:
    """A fake sysfs; ``root`` is where sysfs would be mounted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pipes: list[Path] = []
        self._held: dict[Path, int] = {}  # our ends of the pipes on which a reader waits
        self._freed: list[int] = []  # pipes that stay open for a reader who comes late

    # --- RDMA ------------------------------------------------------------------------------------------------------------

    def port(self, adapter: str = "mlx5_0", port: int = 1) -> Path:
        return self.root / "class/infiniband" / adapter / "ports" / str(port)

    def add_port(
        self,
        adapter: str = "mlx5_0",
        port: int = 1,
        *,
        sent: int = 0,
        received: int = 0,
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        layer: str = "InfiniBand",
        counters: Mapping[str, object] | None = None,
        hw_counters: Mapping[str, object] | None = None,
        pci: str = "0000:18:00.0",
    ) -> Path:
        """Add one RDMA port.

        ``sent`` and ``received`` are in bytes, multiples of 4.
        ``counters``: further files, or replacements for the default ones.
        """
        folder = self.port(adapter, port)
        above = folder.parents[1]
        _write(above / "node_guid", "b83f:d203:0013:56a2")
        _write(above / "hca_type", "MT4129")
        _link(above / "device", self.root / "devices" / pci)
        _write(folder / "rate", rate)
        _write(folder / "state", state)
        _write(folder / "phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled")
        _write(folder / "link_layer", layer)
        given = {"port_xmit_data": sent // 4, "port_rcv_data": received // 4, "port_xmit_packets": 7, "port_rcv_packets": 9}
        for name, value in {**given, "symbol_error": 0, **(counters or {})}.items():
            _write(folder / "counters" / name, value)
        for name, value in (hw_counters or {}).items():
            _write(folder / "hw_counters" / name, value)
        return folder

    def move_port(self, sent: int, received: int, adapter: str = "mlx5_0", port: int = 1) -> None:
        """Set the bytes that the port has moved."""
        _write(self.port(adapter, port) / "counters/port_xmit_data", sent // 4)
        _write(self.port(adapter, port) / "counters/port_rcv_data", received // 4)

    # --- network interfaces ----------------------------------------------------------------------------------------------

    def nic(self, name: str = "eth0") -> Path:
        return self.root / "class/net" / name

    def add_nic(
        self,
        name: str = "eth0",
        *,
        sent: int = 0,
        received: int = 0,
        speed: object = 25_000,
        state: str = "up",
        real: bool = True,
        function: bool = False,
        master: str = "",
        bond: bool = False,
        uevent: str = "",
        kind: int = 1,
        index: int = 2,
        mtu: object = 9000,
    ) -> Path:
        """Add one network interface.

        ``real``: an adapter stands behind it. ``function``: that adapter is an SR-IOV function. ``master``: the bond that it
        belongs to.
        """
        folder = self.nic(name)
        device = self.root / "devices" / f"net-{name}" / "0000:5e:00.1"
        given = {"speed": speed, "operstate": state, "type": kind, "ifindex": index, "mtu": mtu, "uevent": uevent}
        for file, value in {**given, "carrier": int(state != "down")}.items():
            _write(folder / file, value)
        if real:
            _link(folder / "device", device)
            _link(folder / "device/driver", self.root / "bus/pci/drivers/mlx5_core")
        if function:
            _link(folder / "device/physfn", self.root / "devices/0000:5e:00.0")
        if bond:
            (folder / "bonding").mkdir(exist_ok=True)
        if master:
            _link(folder / "master", self.nic(master))
        for file in ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_missed_errors", "rx_packets", "tx_packets"):
            _write(folder / "statistics" / file, 0)
        self.move_nic(sent, received, name)
        return folder

    def add_loopback(self, moved: int = 0) -> Path:
        return self.add_nic("lo", sent=moved, received=moved, speed=Refuses(), state="unknown", real=False, kind=772, index=1)

    def move_nic(self, sent: int, received: int, name: str = "eth0") -> None:
        """Set the bytes that the interface has moved."""
        _write(self.nic(name) / "statistics/tx_bytes", sent)
        _write(self.nic(name) / "statistics/rx_bytes", received)

    # --- what goes wrong -------------------------------------------------------------------------------------------------

    def hang(self, path: Path) -> None:
        """Make every reader that opens ``path`` from now on wait until ``let_go``."""
        pipe = path.with_name(f".{path.name}.pipe")
        os.mkfifo(pipe)
        pipe.replace(path)
        self.pipes.append(path)

    def caught(self, path: Path) -> bool:
        """Return whether a reader waits there now."""
        if path not in self._held:
            with contextlib.suppress(OSError):  # no reader has the pipe open
                self._held[path] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # a reader has it open and waits in its read
        return path in self._held

    def let_go(self, path: Path, value: object) -> None:
        """Give ``value`` to waiting readers and to all later ones."""
        self.pipes.remove(path)
        waiting = self._held.pop(path, None)
        if waiting is None:
            waiting = os.open(path, os.O_WRONLY)  # returns once a reader reads
        os.write(waiting, f"{value}\n".encode())
        _write(path, value)
        os.close(waiting)

    def take_away(self, folder: Path) -> None:
        """Remove the device, as when it is unplugged."""
        shutil.rmtree(folder)

    def free(self) -> None:
        """Release every hanging reader, so that a test leaves no thread behind.

        A reader may have looked the pipe up and open it only after this: the number waits for it in the pipe, which stays open.
        """
        for path in self.pipes:
            if path.exists():
                pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                _write(path, 0)
                os.write(pipe, b"0\n")
                self._freed.append(pipe)
        self.pipes.clear()
        for held in self._held.values():
            os.close(held)
        self._held.clear()


class Refuses:
    """A file content whose read fails, as with EINVAL."""


def _write(path: Path, value: object) -> None:
    """Write a file atomically: sysfs never shows half a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.new")
    if isinstance(value, Refuses):
        made.symlink_to("/proc/self/mem")  # opens, and a read at 0 fails with EIO
    else:
        made.write_bytes(value if isinstance(value, bytes) else f"{value}\n".encode())
    made.replace(path)


def _link(path: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(to)
