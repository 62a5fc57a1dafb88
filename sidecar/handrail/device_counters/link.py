"""Table of counters of RDMA ports and network interfaces.

Exposed as ``handrail_link_`` + name. Names of directions follow OpenTelemetry's ``hw.network.io`` and ``network.io.direction``.
Errors keep the names of the drivers' files, since operators look those up.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from handrail.conventions import LINK_BYTES, RECEIVE, TRANSMIT
from handrail.records.devices import CounterDef
from handrail.records.quantities import QuantityKind

BYTES: Final = LINK_BYTES
PACKETS: Final = "packets"
ERRORS: Final = "errors"
CONGESTION: Final = "congestion_events"
UP: Final = "up"
LINE_RATE: Final = "line_rate_bytes_per_second"
MTU: Final = "mtu_bytes"

COUNTERS: Final = (
    CounterDef(
        BYTES,
        QuantityKind.COUNTER,
        "By",
        "Bytes that the port moved; an RDMA port does not count TCP traffic",
        "a VF or a software adapter may count nothing; a 32-bit counter of an old adapter stops at 16 GiB: "
        "newer firmware counts in 64 bits",
        "direction",
    ),
    CounterDef(
        PACKETS,
        QuantityKind.COUNTER,
        "{packet}",
        "Packets that the port moved",
        "as for bytes",
        "direction",
    ),
    CounterDef(
        ERRORS,
        QuantityKind.COUNTER,
        "{error}",
        "Errors, drops and repeats by the driver's own name; small InfiniBand counters stop at 15, 255 or 65535",
        "each driver has some of them",
        "error",
    ),
    CounterDef(
        CONGESTION,
        QuantityKind.COUNTER,
        "{event}",
        "Signs of congestion by the driver's own name: ECN marks, notification packets, waits for credit",
        "mlx5 and irdma give them for RoCE, InfiniBand ports port_xmit_wait",
        "event",
    ),
    CounterDef(UP, QuantityKind.GAUGE, "1", "1 while the port can carry data", "never"),
    CounterDef(
        LINE_RATE,
        QuantityKind.GAUGE,
        "By/s",
        "Rate that the port can carry in each direction with its present settings",
        "the port is down, or virtual: virtio, veth and bridges have no speed of their own",
    ),
    CounterDef(
        MTU,
        QuantityKind.GAUGE,
        "By",
        "Largest packet of a network interface",
        "an RDMA port's active MTU is not in sysfs: ibv_devinfo shows it",
    ),
)

__all__ = ["BYTES", "BY_NAME", "CONGESTION", "COUNTERS", "ERRORS", "LINE_RATE", "MTU", "PACKETS", "RECEIVE", "TRANSMIT", "UP"]

BY_NAME: Final = {counter.name: counter for counter in COUNTERS}


class Nature(str, Enum):
    """Kind of an interface: hardware or virtual."""

    LOOPBACK = "loopback"
    ADAPTER = "adapter"
    FUNCTION = "virtual function"  # SR-IOV: shares the line of its adapter
    BOND = "bond"
    VLAN = "vlan"
    VIRTUAL = "virtual"  # veth, bridge, tun, macvlan: its speed is a nominal figure
