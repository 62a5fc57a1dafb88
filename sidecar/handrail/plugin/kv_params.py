"""Read a request's connector parameters: direction, peer and mode of its hand-off.

Source: MEASURED section 4c.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from handrail.plugin.events import TRACEPARENT_PARAM

P_TO_D: Final = "p_to_d"
D_TO_P: Final = "d_to_p"


class Offer(NamedTuple):
    """Connector parameters of a request at its arrival.

    A copy, since connectors change the parameters while they work. A tuple, since it is made for every request inside the
    engine: read and made in 1.3 us, as a frozen dataclass in 3.1.
    """

    direction: str | None  # of the load; None: no load
    publishes: str | None  # direction of the KV that this engine will keep for its peer
    peer_engine_id: str | None
    peer_request_id: str | None
    peer_host: str | None
    peer_port: int | None
    mode: str | None
    traceparent: str | None
    remote_blocks: tuple[int, ...]  # by KV-cache group


def read_offer(params: Mapping[str, Any]) -> Offer:
    """Read an ``Offer`` from a router's parameters, without values of a wrong type."""
    get = params.get
    blocks = group_sizes(get("remote_block_ids"))
    loads = bool(get("do_remote_prefill"))
    publishes = bool(get("do_remote_decode"))
    return Offer(
        P_TO_D if loads else D_TO_P if publishes and any(blocks) else None,
        P_TO_D if publishes else D_TO_P if loads else None,
        _text(get("remote_engine_id")),
        _text(get("remote_request_id") or get("transfer_id")),
        _text(get("remote_host")),
        _number(get("remote_port")),
        _text(get("transfer_mode")),
        _text(get(TRACEPARENT_PARAM)),
        blocks,
    )


def group_sizes(block_ids: Any) -> tuple[int, ...]:
    """Number of blocks by KV-cache group.

    One group where the list is flat; () for anything else.
    """
    if not isinstance(block_ids, (list, tuple)):
        return ()
    if not block_ids:
        return ()
    if not isinstance(block_ids[0], (list, tuple)):
        return (len(block_ids),)
    if len(block_ids) == 1:
        return (len(block_ids[0]),)
    return tuple(len(group) for group in block_ids)


def _text(value: Any) -> str | None:
    return value[:256] if isinstance(value, str) and value else None


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 7:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
