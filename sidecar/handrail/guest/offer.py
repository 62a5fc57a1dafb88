"""What the connector parameters of a request say about its hand-off: which way, from whom, how. MEASURED section 4c."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from handrail.guest.events import TRACEPARENT_PARAM

P_TO_D: Final = "p_to_d"
D_TO_P: Final = "d_to_p"


@dataclass(frozen=True, slots=True)
class Offer:
    """What the parameters said when the request came: connectors change them while they work."""

    direction: str | None  # of the load; None: none is asked for
    publishes: str | None  # direction of what this engine will keep for its peer
    peer_engine_id: str | None
    peer_request_id: str | None
    peer_host: str | None
    peer_port: int | None
    mode: str | None
    traceparent: str | None
    remote_blocks: tuple[int, ...]  # by KV-cache group


def read_offer(params: Mapping[str, Any]) -> Offer:
    """An ``Offer`` of whatever a router sent: what is of another type is left out."""
    blocks = group_sizes(params.get("remote_block_ids"))
    loads = bool(params.get("do_remote_prefill"))
    publishes = bool(params.get("do_remote_decode"))
    direction = P_TO_D if loads else D_TO_P if publishes and any(blocks) else None
    return Offer(
        direction=direction,
        publishes=P_TO_D if publishes else D_TO_P if loads else None,
        peer_engine_id=_text(params.get("remote_engine_id")),
        peer_request_id=_text(params.get("remote_request_id") or params.get("transfer_id")),
        peer_host=_text(params.get("remote_host")),
        peer_port=_number(params.get("remote_port")),
        mode=_text(params.get("transfer_mode")),
        traceparent=_text(params.get(TRACEPARENT_PARAM)),
        remote_blocks=blocks,
    )


def group_sizes(block_ids: Any) -> tuple[int, ...]:
    """How many blocks each KV-cache group has; one group where the list is flat; () for anything else."""
    if not isinstance(block_ids, (list, tuple)):
        return ()
    if block_ids and not isinstance(block_ids[0], (list, tuple)):
        return (len(block_ids),)
    return tuple(len(group) for group in block_ids)


def _text(value: Any) -> str | None:
    return value[:256] if isinstance(value, str) and value else None


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 7:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
