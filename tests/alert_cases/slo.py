"""Cases of the objectives' burn rates and of the 99th percentiles.

The rules are in ``burn.py`` and ``latency.py``; the objectives are those of ``slo.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from alert_cases.case import CLUSTER, LONG, Case, at_decode, at_edge

_MODEL: Final = {"model_name": "llama"}
_TTFT: Final = {**CLUSTER, **_MODEL, "role": "edge", "slo": "ttft-edge"}
_GAPS: Final = {**CLUSTER, **_MODEL, "role": "edge", "slo": "stream_gap-edge"}
_GAPS_AT_D: Final = {**CLUSTER, **_MODEL, "role": "decode", "slo": "stream_gap-decode"}
_SUCCESS: Final = {**CLUSTER, **_MODEL, "role": "edge", "slo": "success-edge"}
_FETCHES: Final = {**CLUSTER, "slo": "kv_fetch"}
_PAGE_1H: Final = {"severity": "page", "window": "1h"}
_PAGE_6H: Final = {"severity": "page", "window": "6h"}
_TICKET_3D: Final = {"severity": "ticket", "window": "3d"}


def _ttft(le: str, good: str, every: str) -> Mapping[str, str]:
    labels = {**_MODEL, "role": "edge", "scope": "edge"}
    return {
        at_edge("handrail_ttft_seconds_bucket", le=le, **labels): good,
        at_edge("handrail_ttft_seconds_count", **labels): every,
    }


def _gaps(role: str, le: str, good: str, every: str) -> Mapping[str, str]:
    of = at_edge if role == "edge" else at_decode
    return {
        of("handrail_stream_gap_seconds_bucket", le=le, role=role, **_MODEL): good,
        of("handrail_stream_gap_seconds_count", role=role, **_MODEL): every,
    }


def _judged(met: str, values: str) -> Mapping[str, str]:
    return {at_edge("handrail_slo_requests_total", slo="success", met=met, role="edge", **_MODEL): values}


CASES: Final = (
    # --- TtftBudgetBurning
    Case(
        alert="TtftBudgetBurning",
        name="a quarter is too slow, in every window",
        every="1m",
        given=_ttft("2.0", "0+45x80", "0+60x80"),
        at="1h10m",
        fires=({**_TTFT, **_PAGE_1H}, {**_TTFT, **_PAGE_6H}, {**_TTFT, **_TICKET_3D}),
    ),
    Case(
        alert="TtftBudgetBurning",
        name="it is over: the pages end, the ticket stays",
        every="1m",
        given=_ttft("2.0", "0+45x50 2250+60x60", "0+60x120"),
        at="1h45m",
        fires=({**_TTFT, **_TICKET_3D},),
    ),
    Case(
        alert="TtftBudgetBurning",
        name="one in twelve for eight hours: too slow for the first window's page",
        suite=LONG,
        every="1m",
        given=_ttft("2.0", "0+55x480", "0+60x480"),
        at="8h",
        fires=({**_TTFT, **_PAGE_6H}, {**_TTFT, **_TICKET_3D}),
    ),
    Case(
        alert="TtftBudgetBurning",
        name="two in a hundred for three days: a ticket",
        suite=LONG,
        every="5m",
        given=_ttft("2.0", "0+294x864", "0+300x864"),
        at="3d",
        fires=({**_TTFT, **_TICKET_3D},),
    ),
    Case(
        alert="TtftBudgetBurning",
        name="one in two hundred for three days is what the objective allows",
        suite=LONG,
        every="5m",
        given=_ttft("2.0", "0+597x864", "0+600x864"),
        at="3d",
    ),
    Case(
        alert="TtftBudgetBurning",
        name="low traffic does not flap: four of nine requests in an hour",
        every="1m",
        given=_ttft("2.0", "0x10 1x20 4x20 5x60", "0x10 2x20 6x20 9x60"),
        at="1h10m",
    ),
    Case(
        alert="TtftBudgetBurning",
        name="nor does one slow request of many",
        every="1m",
        given=_ttft("2.0", "0+1x30 30x80", "0+1x30 31x80"),
        at="32m",
    ),
    Case(
        alert="TtftBudgetBurning",
        name="H10 an idle night: no requests are not slow requests, and not fast ones",
        every="1m",
        given=_ttft("2.0", "5000x600", "5000x600"),
        at="9h",
        suite=LONG,
    ),
    Case(
        alert="TtftBudgetBurning",
        name="H08 no data at all is not zero",
        every="1m",
        given={at_edge("up"): "1x80"},
        at="1h10m",
    ),
    # --- ItlBudgetBurning
    Case(
        alert="ItlBudgetBurning",
        name="a fifth of the gaps, at the edge and at decode",
        every="1m",
        given={**_gaps("edge", "0.1", "0+4800x80", "0+6000x80"), **_gaps("decode", "0.1", "0+4800x80", "0+6000x80")},
        at="1h10m",
        fires=tuple({**slo, **burn} for slo in (_GAPS, _GAPS_AT_D) for burn in (_PAGE_1H, _PAGE_6H, _TICKET_3D)),
    ),
    Case(
        alert="ItlBudgetBurning",
        name="D13 a prefill engine makes one token: its histogram stays empty, and 0/0 is no alert",
        every="1m",
        given=_gaps("prefill", "0.1", "0x80", "0x80"),
        at="1h10m",
    ),
    # --- RequestBudgetBurning
    Case(
        alert="RequestBudgetBurning",
        name="one in ten fails",
        every="1m",
        given={**_judged("true", "0+54x80"), **_judged("false", "0+6x80")},
        at="1h10m",
        fires=tuple({**_SUCCESS, **burn} for burn in (_PAGE_1H, _PAGE_6H, _TICKET_3D)),
    ),
    Case(
        alert="RequestBudgetBurning",
        name="one in a thousand fails",
        every="1m",
        given={**_judged("true", "0+999x80"), **_judged("false", "0+1x80")},
        at="1h10m",
    ),
    # --- KvFetchBudgetBurning
    Case(
        alert="KvFetchBudgetBurning",
        name="one in twenty fails",
        every="1m",
        given={
            at_decode("handrail_kv_fetches_total", outcome="ok", reason=""): "0+57x80",
            at_decode("handrail_kv_fetches_total", outcome="failed", reason=""): "0+2x80",
            at_decode("handrail_kv_fetches_total", outcome="recomputed", reason=""): "0+1x80",
        },
        at="1h10m",
        fires=tuple({**_FETCHES, **burn} for burn in (_PAGE_1H, _PAGE_6H, _TICKET_3D)),
    ),
    Case(
        alert="KvFetchBudgetBurning",
        name="who leaves is not judged, nor who needed no fetch",
        every="1m",
        given={
            at_decode("handrail_kv_fetches_total", outcome="ok", reason=""): "0+57x80",
            at_decode("handrail_kv_fetches_total", outcome="failed", reason=""): "0x80",
            at_decode("handrail_kv_fetches_total", outcome="aborted", reason=""): "0+9x80",
            at_decode("handrail_kv_fetches_total", outcome="unknown", reason=""): "0+9x80",
        },
        at="1h10m",
    ),
    # --- TtftP99High, ItlP99High
    Case(
        alert="TtftP99High",
        name="three in a hundred take longer than five seconds",
        every="1m",
        given=_ttft("5.0", "0+97x30", "0+100x30"),
        at="15m",
        fires=(_TTFT,),
    ),
    Case(
        alert="TtftP99High",
        name="B08 the first hand-off between two engines is cold: one of fifty, and too few for a 99th percentile",
        every="1m",
        given=_ttft("5.0", "0x5 9x5 49x20", "0x5 10x5 50x20"),
        at="12m",
    ),
    Case(
        alert="TtftP99High",
        name="H13 one in two hundred is under the 99th percentile",
        every="1m",
        given=_ttft("5.0", "0+199x30", "0+200x30"),
        at="15m",
    ),
    Case(
        alert="ItlP99High",
        name="three gaps in a hundred are longer than a quarter of a second, at decode",
        every="1m",
        given=_gaps("decode", "0.25", "0+970x30", "0+1000x30"),
        at="15m",
        fires=(_GAPS_AT_D,),
    ),
    Case(
        alert="ItlP99High",
        name="one in a thousand",
        every="1m",
        given=_gaps("decode", "0.25", "0+999x30", "0+1000x30"),
        at="15m",
    ),
)
