"""The choice of UCX's variables: transports and devices.

UCX_TLS selects the transports, UCX_NET_DEVICES the devices.
Source: the UCX manual (ucp_context: aliases of transports, ``^`` negates the whole list). NIXL hands over through UCX by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ALIASES: Final[Mapping[str, frozenset[str]]] = {
    "rc": frozenset({"rc_verbs", "rc_mlx5"}),
    "rc_v": frozenset({"rc_verbs"}),
    "rc_x": frozenset({"rc_mlx5"}),
    "ud": frozenset({"ud_verbs", "ud_mlx5"}),
    "ud_v": frozenset({"ud_verbs"}),
    "ud_x": frozenset({"ud_mlx5"}),
    "dc": frozenset({"dc_mlx5"}),
    "dc_x": frozenset({"dc_mlx5"}),
    "ib": frozenset({"rc_verbs", "rc_mlx5", "ud_verbs", "ud_mlx5", "dc_mlx5"}),
    "cuda": frozenset({"cuda_copy", "cuda_ipc", "gdr_copy"}),
    "sm": frozenset({"posix", "sysv", "xpmem", "cma", "knem"}),
    "shm": frozenset({"posix", "sysv", "xpmem", "cma", "knem"}),
}
_ALL: Final = frozenset(name for names in _ALIASES.values() for name in names) | {"tcp", "self"}
RDMA: Final = _ALIASES["ib"] | {"srd"}  # srd: EFA's, which counts only where it is named


def transports(text: str | None) -> frozenset[str]:
    """Return the transports that UCX_TLS leaves; all where it is not set or ``all``."""
    words = [word.strip() for word in (text or "all").split(",") if word.strip()]
    negated = bool(words) and words[0].startswith("^")
    named = frozenset(name for word in words for name in _expanded(word.lstrip("^")))
    return _ALL - named if negated else named


def _expanded(word: str) -> frozenset[str]:
    if word == "all":
        return _ALL
    # An auxiliary transport follows a colon: rc_x:aux.
    plain = word.partition(":")[0]
    return _ALIASES.get(plain, frozenset({plain}))


def devices(text: str | None) -> tuple[str, ...] | None:
    """Return the devices in UCX_NET_DEVICES, as ``mlx5_0:1`` or ``eth0``; None: any."""
    words = tuple(word.strip() for word in (text or "all").split(",") if word.strip())
    return None if not words or "all" in words else words
