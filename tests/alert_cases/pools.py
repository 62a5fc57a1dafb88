"""Cases of the rules in ``decode.py`` and ``engines.py``."""

from __future__ import annotations

from typing import Final

from alert_cases.case import CLUSTER, D0, LONG, P0, Case, at_collector, at_decode, at_prefill

_ROLES: Final = {
    at_prefill("handrail_sidecar_info", version="0.1.0", role="prefill"): "1x200",
    at_decode("handrail_sidecar_info", version="0.1.0", role="decode"): "1x200",
}
_GPU: Final = {"gpu": "3", "uuid": "GPU-8f1b"}

CASES: Final = (
    # --- PrefillDecodeImbalance
    Case(
        alert="PrefillDecodeImbalance",
        name="prefill waits, decode is idle",
        given={
            **_ROLES,
            at_prefill("handrail_engine_requests_waiting", engine="0"): "12x80",
            at_decode("handrail_engine_requests_waiting", engine="0"): "0x80",
        },
        at="12m",
        fires=({**CLUSTER, "role": "prefill"},),
    ),
    Case(
        alert="PrefillDecodeImbalance",
        name="decode waits, prefill is idle; an upgrade left two versions of a sidecar's info",
        given={
            **_ROLES,
            at_decode("handrail_sidecar_info", version="0.0.9", role="decode"): "1x10 stale",
            at_prefill("handrail_engine_requests_waiting", engine="0"): "0x80",
            at_decode("handrail_engine_requests_waiting", engine="0"): "3x80",
            at_decode("handrail_engine_requests_waiting", engine="1"): "4x80",
        },
        at="12m",
        fires=({**CLUSTER, "role": "decode"},),
    ),
    Case(
        alert="PrefillDecodeImbalance",
        name="both wait: the fleet is too small, not out of balance",
        given={
            **_ROLES,
            at_prefill("handrail_engine_requests_waiting", engine="0"): "12x80",
            at_decode("handrail_engine_requests_waiting", engine="0"): "9x80",
        },
        at="12m",
    ),
    # --- StreamsStalling
    Case(
        alert="StreamsStalling",
        name="one request in five stalls by a co-scheduled prefill",
        every="1m",
        given={
            at_collector("handrail_stalls_total", cause="prefill_coscheduled", model_name="llama"): "0+12x30",
            at_collector("handrail_stalls_total", cause="unknown", model_name="llama"): "0x30",
            at_collector("handrail_joined_requests_total", model_name="llama", outcome="ok"): "0+60x30",
        },
        at="25m",
        fires=({**CLUSTER, "cause": "prefill_coscheduled", "model_name": "llama"},),
    ),
    Case(
        alert="StreamsStalling",
        name="clients that read slowly are not ours to mend, and one in twenty is usual",
        every="1m",
        given={
            at_collector("handrail_stalls_total", cause="client_backpressure", model_name="llama"): "0+40x30",
            at_collector("handrail_stalls_total", cause="unknown", model_name="llama"): "0+3x30",
            at_collector("handrail_joined_requests_total", model_name="llama", outcome="ok"): "0+60x30",
        },
        at="25m",
    ),
    # --- EngineDown, EngineHung, EngineRestarted, EngineMetricsRenamed
    Case(
        alert="EngineDown",
        name="it answered, and does not now",
        given={at_decode("handrail_engine_up"): "1x40 0x20"},
        at="12m",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="EngineDown",
        name="its metrics page is not read, and the plugin fell silent",
        given={at_decode("handrail_sidecar_plugin_processes"): "3x40 0x20"},
        at="12m",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="EngineDown",
        name="the plugin is not there yet, while the page answers",
        given={at_decode("handrail_sidecar_plugin_processes"): "3x10 0x50", at_decode("handrail_engine_up"): "1x60"},
        at="12m",
    ),
    Case(
        alert="EngineDown",
        name="it has never answered: it loads its model",
        given={at_decode("handrail_engine_up"): "0x60"},
        at="12m",
    ),
    Case(
        alert="EngineHung",
        name="no step while requests wait, and /health says 200",
        given={at_decode("handrail_engine_hung"): "0x20 1x20", at_decode("handrail_engine_up"): "1x40"},
        at="5m15s",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="EngineHung",
        name="an engine without requests is idle, not hung",
        given={at_decode("handrail_engine_hung"): "0x40", at_decode("handrail_engine_up"): "1x40"},
        at="8m",
    ),
    Case(
        alert="EngineRestarted",
        name="A19 another process answers at the same address",
        given={at_prefill("handrail_engine_restarts_total"): "0x40 1x20"},
        at="11m",
        fires=({**P0, **CLUSTER},),
    ),
    Case(
        alert="EngineRestarted",
        name="it goes on",
        given={at_prefill("handrail_engine_restarts_total"): "2x60"},
        at="14m",
    ),
    Case(
        alert="EngineMetricsRenamed",
        name="a family under a name that nobody knows",
        given={at_decode("handrail_engine_schema_families", state="unknown"): "2x80"},
        at="16m",
        fires=({**D0, **CLUSTER, "state": "unknown"},),
    ),
    Case(
        alert="EngineMetricsRenamed",
        name="missing is a feature that is off, not a new name",
        given={
            at_decode("handrail_engine_schema_families", state="unknown"): "0x80",
            at_decode("handrail_engine_schema_families", state="missing"): "5x80",
        },
        at="16m",
    ),
    # --- GpuLost, GpuThrottled, GpuErrors
    Case(
        alert="GpuLost",
        name="one does not answer",
        given={at_decode("handrail_gpu_lost", gpu="3"): "0x20 1x20", at_decode("handrail_gpu_lost", gpu="4"): "0x40"},
        at="5m15s",
        fires=({**D0, **CLUSTER, "gpu": "3"},),
    ),
    Case(
        alert="GpuLost",
        name="NVML as a whole does not answer any more",
        given={at_decode("handrail_gpu_up"): "1x20 0x20"},
        at="6m",
        fires=({**D0, **CLUSTER},),
    ),
    Case(
        alert="GpuLost",
        name="a host without NVML never had one",
        given={at_decode("handrail_gpu_up"): "0x40", at_decode("handrail_gpu_lost", gpu="3"): "0x40"},
        at="6m",
    ),
    Case(
        alert="GpuThrottled",
        name="too hot for a tenth of the time, by the driver's counter",
        given={at_decode("handrail_gpu_throttled_seconds_total", policy="thermal", **_GPU): "0+1.5x60"},
        at="8m",
        fires=({**D0, **CLUSTER, **_GPU, "policy": "thermal", "reason": "thermal"},),
    ),
    Case(
        alert="GpuThrottled",
        name="without that counter, by looking",
        given={at_decode("handrail_gpu_throttled", reason="hw_slowdown", **_GPU): "0x20 1x40"},
        at="10m",
        fires=({**D0, **CLUSTER, **_GPU, "reason": "hw_slowdown"},),
    ),
    Case(
        alert="GpuThrottled",
        name="at its power limit all the time, as a busy GPU is",
        given={
            at_decode("handrail_gpu_throttled_seconds_total", policy="power", **_GPU): "0+15x60",
            at_decode("handrail_gpu_throttled_seconds_total", policy="thermal", **_GPU): "0x60",
            at_decode("handrail_gpu_throttled", reason="power_cap", **_GPU): "1x60",
        },
        at="10m",
    ),
    Case(
        alert="GpuErrors",
        name="F13 a new Xid",
        given={at_decode("handrail_gpu_xid_errors_total", xid="79", **_GPU): "0x20 1x20"},
        at="6m",
        fires=({**D0, **CLUSTER, **_GPU, "xid": "79"},),
    ),
    Case(
        alert="GpuErrors",
        name="F13 an old Xid that a counter keeps for ten hours is no new one",
        suite=LONG,
        every="1m",
        given={at_decode("handrail_gpu_xid_errors_total", xid="31", **_GPU): "31x600"},
        at="9h",
    ),
)
