"""Name, order and colour the phases of a request, for every view that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from handrail.phases import ORDER, Phase
from handrail_cli import glossary
from handrail_collector.rows import PhaseRow, RequestRow

_NAMES: Final = {phase.value: phase for phase in Phase}
_PLACE_ORDER: Final = {"prefill": 0, "path": 1, "decode": 2}
_LONG_ID: Final = 48


@dataclass(frozen=True, slots=True)
class Look:
    """Glyph and colour of one place."""

    glyph: str
    style: str
    label: str


LOOKS: Final[Mapping[str, Look]] = {
    "prefill": Look("█", "cyan", "prefill"),
    "path": Look("▒", "yellow", "router and network"),
    "decode": Look("▓", "green", "decode"),
    "unattributed": Look("░", "magenta", "unattributed"),
}


def main_id(row: RequestRow) -> str:
    """Return the id by which a person knows the request.

    A router's response id that fills a line gives way to Handrail's own id.
    """
    if row.client_request_id:
        return row.client_request_id
    return row.response_id if row.response_id and len(row.response_id) <= _LONG_ID else row.request_id


def slowest(row: RequestRow) -> PhaseRow | None:
    """Return the phase that took longest; None without phases."""
    return max(row.phases, key=lambda phase: phase.duration_ns, default=None)


def phase_label(phase: PhaseRow) -> str:
    """Return ``kv_transfer``; an unattributed part also names its place.

    Example: ``unattributed (D)``.
    """
    if phase.phase != Phase.UNATTRIBUTED.value:
        return phase.phase
    return f"{phase.phase} ({glossary.PLACE.get(phase.process, phase.process)})"


def instance_of(row: RequestRow, place: str) -> str:
    """Return the address of the engine at a place; empty where unknown."""
    return {"prefill": row.prefill_instance, "decode": row.decode_instance}.get(place) or ""


def in_path_order(phases: Sequence[PhaseRow]) -> list[PhaseRow]:
    """Return the phases in the order in which they happen.

    An unattributed part takes the place of the first phase that it may hide.
    """

    def position(phase: PhaseRow) -> tuple[int, float]:
        hidden = [ORDER[_NAMES[name]] for name in phase.may_be if name in _NAMES]
        if phase.phase == Phase.UNATTRIBUTED.value and hidden:
            return _PLACE_ORDER.get(phase.process, 1), min(hidden) - 0.5
        known = _NAMES.get(phase.phase)
        return _PLACE_ORDER.get(phase.process, 1), ORDER[known] if known else len(ORDER)

    return sorted(phases, key=position)


def percent(part_ns: int, whole_ns: int) -> str:
    """Format ``62 %``, ``4.1 %``, ``<0.1 %``."""
    share = 100 * part_ns / whole_ns if whole_ns > 0 else 0.0
    if part_ns and share < 0.1:
        return "<0.1 %"
    return f"{share:.0f} %" if share >= 9.95 or not part_ns else f"{share:.1f} %"


def whole_ns(row: RequestRow) -> int:
    """Return the sum of the phases."""
    if row.phase_of == "ttft" and row.ttft_token_ns is not None:
        return row.ttft_token_ns
    return row.duration_ns if row.phase_of == "total" else sum(phase.duration_ns for phase in row.phases)
