"""The alerts that may fire together, and those that another alert inhibits.

An inhibited alert only repeats the other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_SLOW: Final = ("TtftBudgetBurning", "TtftP99High")
_GAPS: Final = ("ItlBudgetBurning", "ItlP99High")
_FAILED: Final = ("RequestBudgetBurning",)
_FETCHES: Final = ("KvFetchFailed", "KvFetchBudgetBurning", "KvFetchFailureSpike", "KvTransferFailuresCounted")

COMPANIONS: Final[Mapping[str, tuple[str, ...]]] = {
    # Objectives: the alerts on causes fire with them.
    "TtftBudgetBurning": ("TtftP99High", "KvFetchFailed", "KvLinkSlow", "PrefillDecodeImbalance", "EngineDown", "EngineHung"),
    "TtftP99High": ("TtftBudgetBurning", "KvLinkSlow", "PrefillDecodeImbalance"),
    "ItlBudgetBurning": ("ItlP99High", "StreamsStalling", "PrefillDecodeImbalance", "GpuThrottled"),
    "ItlP99High": ("ItlBudgetBurning", "StreamsStalling", "GpuThrottled"),
    "RequestBudgetBurning": ("KvFetchFailed", "KvFetchBudgetBurning", "EngineDown", "EngineHung", "EdgeSidecarDown"),
    "KvFetchBudgetBurning": ("KvFetchFailed", "KvFetchFailureSpike", *_FAILED, "TtftBudgetBurning"),
    # Hand-offs
    "KvFetchFailed": (
        "KvFetchBudgetBurning",
        "KvFetchFailureSpike",
        *_FAILED,
        *_SLOW,
        "EngineDown",
        "EngineRestarted",
        "KvExpiring",
    ),
    "KvFetchFailureSpike": ("KvFetchFailed", "KvFetchBudgetBurning", *_FAILED),
    "KvTransferFailuresCounted": (*_FAILED, *_SLOW, "KvExpiring"),
    "KvFailuresUnexplained": ("HandrailDropping", "HandOffsUnwatched", *_FAILED),
    "KvFetchHung": ("KvTransfersStuck", *_SLOW, *_FAILED, "EngineHung", "KvExpiring"),
    "KvTransfersStuck": ("KvFetchHung", *_SLOW, *_FAILED, "EngineHung"),
    "KvStaleRead": ("KvExpiring", "KvNearLease", *_SLOW, "PrefillDecodeImbalance"),
    "KvWrongRequest": ("KvStaleRead", "KvMismatch"),
    "KvMismatch": ("KvFetchFailed", "KvWrongRequest"),
    "KvExpiring": ("KvStaleRead", "KvFetchFailed", "KvFetchBudgetBurning", "KvNearLease", *_SLOW),
    "KvNearLease": ("KvExpiring", "KvStaleRead", "PrefillDecodeImbalance", *_SLOW),
    "KvLinkSlow": (*_SLOW, "KvNearLease"),
    # Pools and streams
    "PrefillDecodeImbalance": (*_SLOW, "KvNearLease", "KvExpiring"),
    "StreamsStalling": (*_GAPS, "GpuThrottled", "PrefillDecodeImbalance"),
    # Engines and GPUs
    "EngineDown": (
        "EngineHung",
        "KvTransfersStuck",
        *_FAILED,
        *_SLOW,
        *_FETCHES,
        "EngineRestarted",
        "KvFetchHung",
        "PrefillDecodeImbalance",
    ),
    "EngineHung": (*_FAILED, *_SLOW, *_GAPS, "KvFetchHung", "KvTransfersStuck", "EngineDown", "KvExpiring"),
    "EngineRestarted": ("EngineDown", *_FAILED, *_FETCHES),
    "EngineMetricsRenamed": ("HandOffsUnwatched",),
    "GpuLost": ("GpuErrors", "GpuThrottled", "EngineDown", "EngineHung", "EngineRestarted", *_FAILED),
    "GpuThrottled": (*_GAPS, "StreamsStalling", *_SLOW),
    "GpuErrors": ("GpuLost", "EngineDown", "EngineRestarted"),
    # Handrail itself
    "HandrailAbsent": ("EdgeSidecarDown", "SidecarDown", "CollectorDown"),
    "EdgeSidecarDown": ("HandrailAbsent", "TraceCoverageLost"),
    "SidecarDown": ("HandrailAbsent", "TraceCoverageLost", "EngineDown"),
    "CollectorDown": ("SidecarNotDelivering", "TraceCoverageLost", "HandrailAbsent", "HandrailDropping"),
    "HandrailDropping": ("SidecarNotDelivering", "SpoolDiskFailing", "TraceCoverageLost", "CollectorDown"),
    "SidecarNotDelivering": ("CollectorDown", "HandrailDropping", "TraceCoverageLost"),
    "SpoolDiskFailing": ("HandrailDropping", "SidecarNotDelivering"),
    "CollectorLagging": ("TraceCoverageLost", "SidecarNotDelivering", "HandrailDropping"),
    "TraceCoverageLost": ("SidecarDown", "EdgeSidecarDown", "EngineSendsNoSpans", "HandrailDropping", "SidecarNotDelivering"),
    "HandOffsUnwatched": ("EngineMetricsRenamed",),
    "EngineSendsNoSpans": ("TraceCoverageLost",),
    "ClockBoundTooWide": (),
    "CertificateExpiring": ("SecretStale",),
    "SecretStale": ("CertificateExpiring",),
}
"""Each alert with the alerts that the same fault may raise too.

These are causes, and effects on users. A runbook page lists them.
"""


@dataclass(frozen=True, slots=True)
class Inhibition:
    """A rule that suppresses ``target`` while something of ``source`` fires.

    It holds where the labels ``equal`` have the same values.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    equal: tuple[str, ...]
    why: str


_TARGET: Final = ("cluster", "job", "instance")
_OBJECTIVE: Final = ("cluster", "slo", "model_name", "role")


def _one(source: str, targets: tuple[str, ...], equal: tuple[str, ...], why: str) -> Inhibition:
    return Inhibition((f'alertname="{source}"',), (f'alertname=~"{"|".join(targets)}"',), equal, why)


INHIBITIONS: Final = (
    Inhibition(
        ('severity="page"', 'slo=~".+"'),
        ('severity="ticket"', 'slo=~".+"'),
        _OBJECTIVE,
        "a page of an objective says what its ticket says",
    ),
    Inhibition(('window="1h"',), ('window="6h"',), _OBJECTIVE, "the faster burn says what the slower one says"),
    Inhibition(
        ('role="edge"', 'slo=~".+"', 'severity="page"'),
        ('role="decode"', 'slo=~".+"'),
        ("cluster", "alertname", "model_name"),
        "what the decode pool lets go late, the client gets late",
    ),
    _one("EngineDown", ("EngineHung", "KvTransfersStuck"), _TARGET, "an engine that is down makes no progress"),
    _one("EngineHung", ("KvTransfersStuck",), _TARGET, "nor does anything in an engine that hangs"),
    _one("KvFetchHung", ("KvTransfersStuck",), _TARGET, "the same, told by the plugin and by the engine's counters"),
    _one("KvStaleRead", ("KvExpiring",), _TARGET, "what was read late had expired before"),
    _one("GpuLost", ("GpuErrors", "GpuThrottled"), _TARGET, "a GPU that is lost reports errors first"),
    _one("HandrailAbsent", ("SidecarDown", "CollectorDown"), ("cluster",), "nothing of Handrail is scraped at all"),
    _one("CollectorDown", ("SidecarNotDelivering", "TraceCoverageLost"), ("cluster",), "nobody is there to deliver to"),
)
"""The inhibitions, only of alerts that repeat another one.

An alert that says more (who suffers, how much) fires beside its cause.
"""
