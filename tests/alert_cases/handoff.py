"""Cases of the rules in ``handoff.py``."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Final

from alert_cases.case import CLUSTER, COLLECTOR, D0, LONG, P0, Case, at_collector, at_decode, at_prefill

_H01: Final = Path(__file__).parents[1] / "data/replay/alerts/H01_first_failure_series.json"
_FAILED: Final = at_decode("handrail_kv_fetches_total", outcome="failed", reason="")
_OK: Final = at_decode("handrail_kv_fetches_total", outcome="ok", reason="")
_LABELS: Final = ({**D0, **CLUSTER, "outcome": "failed", "reason": ""},)


def _replayed() -> str:
    """Return the recorded series in promtool's notation."""
    values = json.loads(_H01.read_text("utf-8"))["values"]
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return " ".join(f"{'_' if value is None else value}x{count if value is None else count - 1}" for value, count in runs)


CASES: Final = (
    # --- KvFetchFailed
    Case(
        alert="KvFetchFailed",
        name="the very first one fires",
        given={_FAILED: "0x40 1x20", _OK: "0+4x60"},
        at="10m15s",
        fires=_LABELS,
    ),
    Case(
        alert="KvFetchFailed",
        name="H01 the very first one fires in a series that is born with it",
        given={_FAILED: _replayed()},
        at="1h15s",
        fires=_LABELS,
    ),
    Case(
        alert="KvFetchFailed",
        name="a reason that was never seen before is a new series, beside the old ones",
        given={
            _FAILED: "0x80",
            at_decode("handrail_kv_fetches_total", outcome="failed", reason="handshake_failed"): "_x48 1x40",
        },
        at="13m",
        fires=({**D0, **CLUSTER, "outcome": "failed", "reason": "handshake_failed"},),
    ),
    Case(
        alert="KvFetchFailed",
        name="a failed fetch inside a stream of ten minutes that has not finished",
        given={
            _FAILED: "0x8 1x32",
            at_decode("handrail_requests_open", model_name="llama", role="decode"): "1x40",
            at_decode("handrail_requests_total", model_name="llama", role="decode", outcome="ok"): "0x40",
        },
        at="3m",
        fires=_LABELS,
    ),
    Case(
        alert="KvFetchFailed",
        name="A05 every fetch fails, and nothing is too little traffic for that",
        given={_FAILED: "0+3x60", _OK: "0x60"},
        at="1m",
        fires=_LABELS,
    ),
    Case(
        alert="KvFetchFailed",
        name="the first one after a restart, fewer than before it",
        given={_FAILED: "3x80 0x10 1x20"},
        at="23m",
        fires=_LABELS,
    ),
    Case(
        alert="KvFetchFailed",
        name="A10 recomputed is failed, whatever the client got",
        given={at_decode("handrail_kv_fetches_total", outcome="recomputed", reason="transfer_failed"): "0x20 1x20"},
        at="6m",
        fires=({**D0, **CLUSTER, "outcome": "recomputed", "reason": "transfer_failed"},),
    ),
    Case(
        alert="KvFetchFailed",
        name="told by the log alone",
        given={at_decode("handrail_sidecar_log_failed_fetches_total"): "0x20 1x20"},
        at="6m",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="KvFetchFailed",
        name="told by plugin and log is told once",
        given={_FAILED: "0x20 1x20", at_decode("handrail_sidecar_log_failed_fetches_total"): "0x20 1x20"},
        at="6m",
        fires=_LABELS,
    ),
    Case(alert="KvFetchFailed", name="none failed", given={_FAILED: "0x80", _OK: "0+9x80"}, at="15m"),
    Case(alert="KvFetchFailed", name="a restart does not tell of old ones again", given={_FAILED: "3x80 0x40"}, at="25m"),
    Case(alert="KvFetchFailed", name="it ends ten minutes after the last", given={_FAILED: "0x20 1x100"}, at="16m"),
    Case(
        alert="KvFetchFailed",
        name="who left, or needed none, did not fail",
        given={
            at_decode("handrail_kv_fetches_total", outcome="aborted", reason=""): "0+1x80",
            at_decode("handrail_kv_fetches_total", outcome="fallback_local", reason=""): "0+1x80",
            at_decode("handrail_kv_fetches_total", outcome="unknown", reason=""): "0+1x80",
        },
        at="15m",
    ),
    # --- KvTransferFailuresCounted
    Case(
        alert="KvTransferFailuresCounted",
        name="A04 A16 the engine's counter is all there is",
        given={at_decode("handrail_engine_kv_transfer_failures_total", engine="0", transport="nixl"): "0x20 7x20"},
        at="6m",
        fires=({**D0, **CLUSTER, "engine": "0", "transport": "nixl", "failure": "transfer"},),
    ),
    Case(
        alert="KvTransferFailuresCounted",
        name="the plugin tells of each fetch, so the counter adds nothing: clean-up after a request that left counts too",
        given={
            at_decode("handrail_engine_kv_transfer_failures_total", engine="0", transport="nixl"): "0x20 7x20",
            _FAILED: "0x40",
        },
        at="6m",
    ),
    Case(
        alert="KvTransferFailuresCounted",
        name="the sidecar went away after the plugin had told of each: its last series count, though they have ended",
        given={
            at_decode("handrail_engine_kv_transfer_failures_total", engine="0", transport="nixl"): "0x20 7x4 stale",
            _FAILED: "0x20 7x4 stale",
        },
        at="7m30s",
    ),
    # --- KvFetchFailureSpike
    Case(
        alert="KvFetchFailureSpike",
        name="H14 from 20 a second to 80",
        suite=LONG,
        every="1m",
        given={_FAILED: "0+1200x90 112800+4800x30"},
        at="1h50m",
        fires=(CLUSTER,),
    ),
    Case(
        alert="KvFetchFailureSpike",
        name="H14 five times as many, but few: 0.1 a second to 0.5",
        suite=LONG,
        every="1m",
        given={_FAILED: "0+6x90 570+30x30"},
        at="1h50m",
    ),
    Case(
        alert="KvFetchFailureSpike",
        name="H14 ten minutes after a fresh start there is nothing to compare with",
        suite=LONG,
        every="1m",
        given={_FAILED: "0+4800x10"},
        at="10m",
    ),
    # --- KvFetchHung
    Case(
        alert="KvFetchHung",
        name="open for longer than the limit",
        given={at_decode("handrail_kv_fetches_hung"): "0x8 1x8", at_decode("handrail_kv_fetch_oldest_age_seconds"): "0+15x16"},
        at="2m30s",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="KvFetchHung",
        name="open, and not for long",
        given={at_decode("handrail_kv_fetches_hung"): "0x16", at_decode("handrail_kv_fetch_oldest_age_seconds"): "0+1x16"},
        at="2m30s",
    ),
    # --- KvTransfersStuck
    Case(
        alert="KvTransfersStuck",
        name="A14 the transfer queue stands still while requests wait, and no error counter moves",
        given={
            at_decode("handrail_engine_process_events_total", kind="transfers_stuck"): "0x40 1x20",
            at_decode("handrail_engine_kv_transfer_failures_total", engine="0", transport="nixl"): "0x60",
        },
        at="11m",
        fires=({**D0, **CLUSTER, "kind": "transfers_stuck"},),
    ),
    Case(
        alert="KvTransfersStuck",
        name="an engine that recovered is not one whose transfers stick",
        given={
            at_decode("handrail_engine_process_events_total", kind="transfers_stuck"): "0x60",
            at_decode("handrail_engine_process_events_total", kind="recovered"): "0x40 1x20",
        },
        at="11m",
    ),
    # --- KvStaleRead
    Case(
        alert="KvStaleRead",
        name="A01 eight requests read late, though all clients got 200",
        given={at_prefill("handrail_kv_publishes_total", end="stale_read"): "0x20 8x20"},
        at="6m",
        fires=({**P0, **CLUSTER, "end": "stale_read"},),
    ),
    Case(
        alert="KvStaleRead",
        name="concluded by the collector, without a plugin at prefill",
        given={at_collector("handrail_findings_total", kind="stale_read"): "0x20 1x20"},
        at="6m",
        fires=({**COLLECTOR, **CLUSTER, "kind": "stale_read"},),
    ),
    Case(
        alert="KvStaleRead",
        name="expired, and never read",
        given={
            at_prefill("handrail_kv_publishes_total", end="stale_read"): "0x40",
            at_prefill("handrail_kv_publishes_total", end="expired"): "0+1x40",
        },
        at="6m",
    ),
    # --- KvFailuresUnexplained, KvWrongRequest, KvMismatch
    Case(
        alert="KvFailuresUnexplained",
        name="counted, and told by nobody",
        given={at_collector("handrail_findings_total", kind="unexplained_failures"): "0x20 1x20"},
        at="6m",
        fires=({**COLLECTOR, **CLUSTER, "kind": "unexplained_failures"},),
    ),
    Case(
        alert="KvFailuresUnexplained",
        name="every failure is some request's",
        given={at_collector("handrail_findings_total", kind="unexplained_failures"): "1x80"},
        at="15m",
    ),
    Case(
        alert="KvWrongRequest",
        name="A03 another request's KV was read",
        given={at_collector("handrail_findings_total", kind="wrong_request"): "0x20 1x20"},
        at="6m",
        fires=({**COLLECTOR, **CLUSTER, "kind": "wrong_request"},),
    ),
    Case(
        alert="KvWrongRequest",
        name="other findings",
        given={
            at_collector("handrail_findings_total", kind="wrong_request"): "0x40",
            at_collector("handrail_findings_total", kind="context_lost"): "0+1x40",
        },
        at="6m",
    ),
    Case(
        alert="KvWrongRequest",
        name="the collector at a new address shows what was found long ago: its counters are kept",
        given={at_collector("handrail_findings_total", kind="wrong_request"): "_x40 3x40"},
        at="11m",
    ),
    Case(
        alert="KvMismatch",
        name="two models on one path",
        given={at_collector("handrail_findings_total", kind="model_mismatch"): "0x20 2x20"},
        at="6m",
        fires=({**COLLECTOR, **CLUSTER, "kind": "model_mismatch"},),
    ),
    Case(
        alert="KvMismatch",
        name="every process names the same model",
        given={at_collector("handrail_findings_total", kind="model_mismatch"): "0x40"},
        at="6m",
    ),
    # --- KvExpiring, KvNearLease
    Case(
        alert="KvExpiring",
        name="A17 sixty expire within a second",
        given={
            at_prefill("handrail_kv_publishes_total", end="expired"): "0x20 60x40",
            at_prefill("handrail_kv_publishes_total", end="read"): "0+5x60",
        },
        at="8m",
        fires=({**P0, **CLUSTER},),
    ),
    Case(
        alert="KvExpiring",
        name="by the engine's counter, without a plugin",
        given={at_prefill("handrail_engine_kv_expired_requests_total", engine="0", transport="nixl"): "0x20 4x40"},
        at="8m",
        fires=({**P0, **CLUSTER},),
    ),
    Case(
        alert="KvExpiring",
        name="the sidecar went away: what the plugin told is still better than the engine's counter",
        given={
            at_prefill("handrail_engine_kv_expired_requests_total", engine="0", transport="nixl"): "0x20 4x8 stale",
            at_prefill("handrail_kv_publishes_total", end="expired"): "0x20 4x8 stale",
            at_prefill("handrail_kv_publishes_total", end="read"): "0+100x28 stale",
        },
        at="9m30s",
    ),
    Case(
        alert="KvExpiring",
        name="one in a thousand: its client had left",
        given={
            at_prefill("handrail_kv_publishes_total", end="expired"): "0x20 4x40",
            at_prefill("handrail_kv_publishes_total", end="read"): "0+100x60",
        },
        at="8m",
    ),
    Case(
        alert="KvNearLease",
        name="A08 hand-offs begin when four fifths of the lease are over, before any has expired",
        given={at_collector("handrail_findings_total", kind="handoff_near_lease"): "0x20 1+1x20"},
        at="8m",
        fires=(CLUSTER,),
    ),
    Case(
        alert="KvNearLease",
        name="one of them",
        given={at_collector("handrail_findings_total", kind="handoff_near_lease"): "0x20 1x20"},
        at="8m",
    ),
    # --- KvLinkSlow
    Case(
        alert="KvLinkSlow",
        name="five minutes over TCP though there is RDMA",
        given={at_collector("handrail_link_slow", source="p0", target="d0", finding="tcp_though_rdma"): "1x40"},
        at="6m",
        fires=({**COLLECTOR, **CLUSTER, "source": "p0", "target": "d0", "finding": "tcp_though_rdma"},),
    ),
    Case(
        alert="KvLinkSlow",
        name="for two minutes",
        given={at_collector("handrail_link_slow", source="p0", target="d0", finding="slow_path"): "1x8 0x40"},
        at="6m",
    ),
)
