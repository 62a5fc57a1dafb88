"""Cases of the rules in ``itself.py``."""

from __future__ import annotations

from typing import Final

from alert_cases.case import CLUSTER, COLLECTOR, D0, EDGE, P0, Case, at_collector, at_decode, at_edge, at_prefill, series

_DECODE: Final = at_decode("handrail_sidecar_info", version="0.1.0", role="decode")
_PREFILL: Final = at_prefill("handrail_sidecar_info", version="0.1.0", role="prefill")
_EDGE: Final = at_edge("handrail_sidecar_info", version="0.1.0", role="edge")
_COLLECTOR: Final = at_collector("handrail_collector_info", version="0.1.0")
_D9: Final = {"job": "handrail-sidecar", "instance": "d9:9464"}
_PAIR: Final = {"host": "host-p", "peer_host": "host-d"}

CASES: Final = (
    # --- HandrailAbsent
    Case(
        alert="HandrailAbsent",
        name="H10 the exporters are gone",
        given={_DECODE: "1x20 stale"},
        at="11m",
        fires=({},),
    ),
    Case(
        alert="HandrailAbsent",
        name="H15 nothing was ever scraped: a selector that matches nothing looks like health",
        given={'up{job="kubernetes-pods",instance="d0:9464"}': "1x60"},
        at="6m",
        fires=({},),
    ),
    Case(
        alert="HandrailAbsent",
        name="H10 an idle night: sidecars, and no requests",
        given={_DECODE: "1x60", at_decode("handrail_requests_total", model_name="llama", role="decode", outcome="ok"): "900x60"},
        at="14m",
    ),
    # --- EdgeSidecarDown, SidecarDown
    Case(
        alert="EdgeSidecarDown",
        name="clients reach nothing",
        given={_EDGE: "1x20 stale", at_edge("up"): "1x20 0x20"},
        at="7m",
        fires=({**EDGE, **CLUSTER, "role": "edge"},),
    ),
    Case(
        alert="EdgeSidecarDown",
        name="a decode engine's sidecar is off the requests' path",
        given={_DECODE: "1x20 stale", at_decode("up"): "1x20 0x20", _EDGE: "1x40", at_edge("up"): "1x40"},
        at="7m",
    ),
    Case(
        alert="SidecarDown",
        name="beside a decode engine, after an upgrade that left two versions",
        given={
            at_decode("handrail_sidecar_info", version="0.0.9", role="decode"): "1x8 stale",
            _DECODE: "_x8 1x12 stale",
            at_decode("up"): "1x20 0x40",
        },
        at="11m",
        fires=({**D0, **CLUSTER, "role": "decode"},),
    ),
    Case(
        alert="SidecarDown",
        name="another job's target that is down is not ours",
        given={_DECODE: "1x60", at_decode("up"): "1x60", 'up{job="node",instance="d0:9100"}': "0x60"},
        at="11m",
    ),
    Case(
        alert="SidecarDown",
        name="it never came up, so that no series of its own says what it is",
        given={series("up", **_D9): "0x20", _DECODE: "1x20", at_decode("up"): "1x20"},
        at="6m",
        fires=({**_D9, **CLUSTER},),
    ),
    Case(
        alert="SidecarDown",
        name="down for longer than an hour, it is still down",
        given={
            series("handrail_sidecar_info", **_D9, role="decode"): "1x20 stale",
            series("up", **_D9): "1x20 0x500",
        },
        at="110m",
        fires=({**_D9, **CLUSTER},),
    ),
    # --- CollectorDown
    Case(
        alert="CollectorDown",
        name="it cannot be scraped",
        given={_COLLECTOR: "1x20 stale", at_collector("up"): "1x20 0x40", _DECODE: "1x60"},
        at="11m",
        fires=({**COLLECTOR, **CLUSTER},),
    ),
    Case(
        alert="CollectorDown",
        name="there are sidecars, and no collector is scraped at all",
        given={_DECODE: "1x60", _PREFILL: "1x60"},
        at="6m",
        fires=(CLUSTER,),
    ),
    Case(
        alert="CollectorDown",
        name="it is there",
        given={_DECODE: "1x60", _COLLECTOR: "1x60", at_collector("up"): "1x60"},
        at="11m",
    ),
    # --- HandrailDropping, SidecarNotDelivering
    Case(
        alert="HandrailDropping",
        name="spans that did not fit into the spool",
        given={
            at_decode("handrail_sidecar_spans_dropped_total", reason="spool_full"): "0+2x60",
            at_decode("handrail_sidecar_spans_dropped_total", reason="fault"): "0x60",
        },
        at="6m",
        fires=({**D0, **CLUSTER, "lost": "handrail_sidecar_spans_dropped_total"},),
    ),
    Case(
        alert="HandrailDropping",
        name="nothing is lost",
        given={
            at_decode("handrail_sidecar_spans_dropped_total", reason="spool_full"): "3x60",
            at_decode("handrail_sidecar_plugin_lost_events_total"): "0x60",
            at_collector("handrail_collector_faults_total"): "0x60",
        },
        at="12m",
    ),
    Case(
        alert="SidecarNotDelivering",
        name="nothing is acknowledged, and the spool fills",
        given={
            at_decode("handrail_sidecar_export_up"): "1x20 0x60",
            at_decode("handrail_sidecar_spool_bytes"): "0x20 0+1048576x60",
        },
        at="11m",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="SidecarNotDelivering",
        name="before its first export a sidecar has nothing to deliver",
        given={at_decode("handrail_sidecar_export_up"): "0x60", at_decode("handrail_sidecar_spool_bytes"): "0x60"},
        at="11m",
    ),
    # --- SpoolDiskFailing
    Case(
        alert="SpoolDiskFailing",
        name="a read-only disk, while everything is delivered from memory",
        given={
            at_decode("handrail_sidecar_spool_degraded"): "0x5 1x60",
            at_decode("handrail_sidecar_export_up"): "1x65",
            at_decode("handrail_sidecar_spool_bytes"): "0x65",
        },
        at="12m",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="SpoolDiskFailing",
        name="a disk that was full for two minutes, and its errors since",
        given={
            at_decode("handrail_sidecar_spool_degraded"): "0x5 1x2 0x60",
            at_decode("handrail_sidecar_spool_errors_total"): "0x5 120x62",
        },
        at="12m",
    ),
    # --- CollectorLagging
    Case(
        alert="CollectorLagging",
        name="two minutes",
        given={at_collector("handrail_collector_journal_lag_seconds"): "120x40"},
        at="6m",
        fires=({**COLLECTOR, **CLUSTER},),
    ),
    Case(
        alert="CollectorLagging",
        name="a second",
        given={at_collector("handrail_collector_journal_lag_seconds"): "1x40"},
        at="6m",
    ),
    # --- TraceCoverageLost
    Case(
        alert="TraceCoverageLost",
        name="seven of ten",
        given={at_collector("handrail_trace_coverage_ratio"): "0.7x80"},
        at="16m",
        fires=({**COLLECTOR, **CLUSTER},),
    ),
    Case(
        alert="TraceCoverageLost",
        name="all but one of a hundred; absent where it is not known",
        given={at_collector("handrail_trace_coverage_ratio"): "0.99x40 stale"},
        at="16m",
    ),
    # --- HandOffsUnwatched
    Case(
        alert="HandOffsUnwatched",
        name="H08 a decode engine without plugin, log or counters of its connector",
        given={_DECODE: "1x80", at_decode("handrail_engine_up"): "1x80"},
        at="16m",
        fires=({**D0, **CLUSTER, "version": "0.1.0", "role": "decode"},),
    ),
    Case(
        alert="HandOffsUnwatched",
        name="H08 the counters were there until the engine renamed them",
        given={
            _PREFILL: "1x200",
            at_prefill("handrail_engine_kv_expired_requests_total", engine="0", transport="nixl"): "0x40 stale",
        },
        at="30m",
        fires=({**P0, **CLUSTER, "version": "0.1.0", "role": "prefill"},),
    ),
    Case(
        alert="HandOffsUnwatched",
        name="H08 D13 by role: an edge has no hand-offs, prefill no fetches, decode keeps nothing",
        given={
            _EDGE: "1x80",
            _PREFILL: "1x80",
            at_prefill("handrail_kv_publishes_total", end="read"): "0x80",
            _DECODE: "1x80",
            at_decode("handrail_kv_fetches_total", outcome="ok", reason=""): "0x80",
        },
        at="16m",
    ),
    # --- EngineSendsNoSpans
    Case(
        alert="EngineSendsNoSpans",
        name="C05 requests pass and the tap gets nothing",
        given={at_decode("handrail_sidecar_engine_silent"): "0x10 1x60"},
        at="8m",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="EngineSendsNoSpans",
        name="it sends",
        given={at_decode("handrail_sidecar_engine_silent"): "0x60"},
        at="8m",
    ),
    # --- ClockBoundTooWide
    Case(
        alert="ClockBoundTooWide",
        name="a fifth of a second",
        given={at_collector("handrail_clock_bound_seconds", **_PAIR): "0.2x80"},
        at="16m",
        fires=({**CLUSTER, **_PAIR},),
    ),
    Case(
        alert="ClockBoundTooWide",
        name="two milliseconds",
        given={at_collector("handrail_clock_bound_seconds", **_PAIR): "0.002x80"},
        at="16m",
    ),
    # --- CertificateExpiring, SecretStale
    Case(
        alert="CertificateExpiring",
        name="valid for a week",
        given={at_decode("handrail_tls_certificate_expiry_timestamp_seconds", use="server"): "604800x80"},
        at="16m",
        fires=({**D0, **CLUSTER, "use": "server"},),
    ),
    Case(
        alert="CertificateExpiring",
        name="valid for a month",
        given={at_decode("handrail_tls_certificate_expiry_timestamp_seconds", use="server"): "2592000x80"},
        at="16m",
    ),
    Case(
        alert="SecretStale",
        name="a token file that cannot be read",
        given={at_decode("handrail_secret_stale", use="tokens"): "0x4 1x40"},
        at="7m",
        fires=({**D0, **CLUSTER, "use": "tokens"},),
    ),
    Case(
        alert="SecretStale",
        name="all are in force",
        given={at_decode("handrail_secret_stale", use="tokens"): "0x40"},
        at="7m",
    ),
)
