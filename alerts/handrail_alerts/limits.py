"""Limits of the alerts that have no objective: section ``limits`` of ``slo.yaml``."""

# ruff: noqa: RUF009 - setting() returns dataclasses.field(), which is what a default should be
from __future__ import annotations

from dataclasses import dataclass

from handrail.config.schema import setting
from handrail.config.types import Duration

_MS = 10**6
_DAY = 86400 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLimits:
    """The limits; every one has a default that a healthy fleet keeps."""

    queued_requests: float = setting(
        5.0,
        help="requests that wait at each engine of a pool, on average, while the other pool is idle",
        example="10",
        at_least=1.0,
    )
    stalls_per_request: float = setting(
        0.1, help="stalls of one cause per request, in a quarter of an hour", example="0.05", at_least=0.001
    )
    expired_percent: float = setting(
        1.0, help="share of the KV kept for a peer that may expire unread", example="5", at_least=0.0, at_most=100.0
    )
    trace_coverage_percent: float = setting(
        90.0, help="share of requests that must be joined with evidence from every process", example="80", at_most=100.0
    )
    clock_bound: Duration = setting(
        Duration(100 * _MS), help="widest allowed bound of two hosts' clock offset", example="20ms", at_least=_MS
    )
    throttled_percent: float = setting(
        2.0, help="share of five minutes for which a GPU may be throttled", example="5", at_least=0.1, at_most=100.0
    )
    certificate_left: Duration = setting(
        Duration(14 * _DAY), help="least remaining validity of a certificate", example="7d", at_least=_DAY
    )
