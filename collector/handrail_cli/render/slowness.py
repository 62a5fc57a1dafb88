"""Write sentences on whether a request was slow for its size. Pure.

They also say which phase grew where, and which process paused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from handrail.durations import format_duration
from handrail_collector.rows import RequestRow

PAUSED_NS: Final = 20_000_000
"""Least pause that gets a sentence."""


def standstill(row: RequestRow) -> str | None:
    """Describe the pause of an engine's process before the first token.

    None where no process paused, or where nothing shows it.
    """
    pauses = (("P", row.prefill_paused_ns or 0), ("D", row.decode_paused_ns or 0))
    lines = [f"{name}'s for {format_duration(ns)}" for name, ns in pauses if ns >= PAUSED_NS]
    if not lines:
        return None
    return f"Of the time to first token a process of the engine stood still (host_pause): {' and '.join(lines)}."


def slowness(usual: Mapping[str, Any]) -> str:
    """Describe ``usual``, as docs/http-api.md defines it."""
    if usual["verdict"] == "cannot_tell":
        known = f"{usual['compared']:,} requests like it are known from around that time"
        return f"Whether that is slow for its size cannot be told: {known}, {usual['needed']} are needed."
    late, compared = usual["late_ns"], f"{usual['compared']:,} around it"
    size = _size(usual["uncached_tokens"])
    if usual["verdict"] == "slow":
        return f"{format_duration(late)} longer than usual for {size} ({compared}): {_grown(usual)}."
    than = f"{format_duration(abs(late))} {'longer' if late > 0 else 'shorter'} than usual"
    beside = f", though {_place(usual)} took {format_duration(usual['excess_ns'])} more" if _though(usual) else ""
    return f"Not slow for {size}: {than}, {format_duration(usual['baseline_ttft_ns'])} ({compared}){beside}."


def _though(usual: Mapping[str, Any]) -> bool:
    """Whether a phase grew by more than the whole did.

    Such a phase gets a sentence even where the request was not slow.
    """
    return usual["phase"] is not None and usual["excess_ns"] > max(0, usual["late_ns"])


def _grown(usual: Mapping[str, Any]) -> str:
    if usual["phase"] is not None:
        often = ", as in many others there and then" if usual["significant"] else ""
        return f"{_place(usual)} +{format_duration(usual['excess_ns'])}{often}"
    if len(usual["ambiguous"]) > 1:
        at = f" at {usual['place']}" if usual["place"] else ""
        return f"{' and '.join(usual['ambiguous'])}{at} grew too much alike to say which it was"
    return "no phase grew by more than such phases ordinarily do"


def _place(usual: Mapping[str, Any]) -> str:
    return f"{usual['phase']} at {usual['place']}" if usual["place"] not in ("", "router") else str(usual["phase"])


def _size(tokens: int | None) -> str:
    if tokens is None:
        return "prompts of any size (its own is not known)"
    return f"{tokens / 1000:.1f}k-token prompts" if tokens >= 1000 else f"{tokens}-token prompts"
