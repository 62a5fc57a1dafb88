"""Alerts on engines and GPUs.

An engine is down, hangs behind a healthy endpoint, has restarted or has renamed its metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from handrail_alerts.alert import Alert, RuleGroup, Severity, minutes
from handrail_alerts.context import Context, any_of

_AT: Final = "at {{ $labels.instance }}"
_HARMFUL: Final = ("hw_slowdown", "sw_thermal", "hw_thermal", "power_brake", "board_limit", "reliability")
"""Throttle reasons that are alerted.

``power_cap`` is not one: a GPU under full load is often at its power limit, as its owner intended.
"""

_HARMFUL_POLICIES: Final = ("thermal", "board_limit", "reliability")


def groups(context: Context) -> Iterator[RuleGroup]:
    yield RuleGroup(
        name="handrail-engines",
        rules=(_down(context), _hung(context), _restarted(context), _metrics_changed(context)),
    )
    yield RuleGroup(name="handrail-gpus", rules=(_gpu_lost(context), _gpu_throttled(context), _gpu_errors(context)))


def was_up(context: Context, name: str) -> str:
    """Match a series that is 0 now and was 1 within the last hour.

    A process that has never been up is still starting, or is not there.
    """
    series = context.series(name)
    return f"({series} == 0 and on {context.of_target()} max_over_time({series}[1h]) == 1)"


def _down(context: Context) -> Alert:
    """Alert when an engine does not answer on its metrics page.

    Where the sidecar reads no page, the plugin decides: no process of the engine reports any more.
    """
    speaking, on = context.series("handrail_sidecar_plugin_processes"), context.of_target()
    silent = (
        f"{speaking} == 0 and on {on} max_over_time({speaking}[1h]) > 0 unless on {on} {context.series('handrail_engine_up')}"
    )
    return Alert(
        name="EngineDown",
        expr=any_of(was_up(context, "handrail_engine_up"), f"({silent})"),
        severity=Severity.PAGE,
        wait=minutes(1),
        summary=f"The engine watched {_AT} does not answer",
        description=(
            f"The engine that the sidecar {_AT} watches answered within the last hour, but not for a minute or longer (its "
            "metrics page, or its plugin if no page is read). Its open requests are lost, and peers fail to fetch KV from it."
        ),
        command="handrail events --since -1h",
    )


def _hung(context: Context) -> Alert:
    return Alert(
        name="EngineHung",
        expr=f"{context.series('handrail_engine_hung')} == 1",
        severity=Severity.PAGE,
        summary=f"The engine watched {_AT} hangs while its endpoint answers",
        description=(
            f"The engine that the sidecar {_AT} watches completes no step, token or request while requests wait "
            "(metrics.hung_after, 30s by default). /health still returns 200, so a load balancer keeps sending requests to it."
        ),
        command="handrail events --since -1h",
    )


def _restarted(context: Context) -> Alert:
    return Alert(
        name="EngineRestarted",
        expr=context.grew("handrail_engine_restarts_total"),
        severity=Severity.TICKET,
        summary=f"The engine watched {_AT} restarted",
        description=(
            f"Restarts of the engine that the sidecar {_AT} watches, in the last 10 minutes: "
            '{{ $value | printf "%.0f" }}. Its KV is lost, and its peers must repeat the handshake.'
        ),
        command="handrail events --since -1h",
    )


def _metrics_changed(context: Context) -> Alert:
    unknown = context.series("handrail_engine_schema_families", 'state="unknown"')
    return Alert(
        name="EngineMetricsRenamed",
        expr=f"{unknown} > 0",
        severity=Severity.TICKET,
        wait=minutes(15),
        summary=f"The engine watched {_AT} has metrics under new names",
        description=(
            "For 15 minutes or longer, {{ $value }} metric families of the engine look like known ones with new names: the "
            "engine is newer than this Handrail, which does not read them."
        ),
        command="handrail metrics http://ENGINE:8000/metrics --role decode",
    )


def _gpu_lost(context: Context) -> Alert:
    return Alert(
        name="GpuLost",
        expr=any_of(f"{context.series('handrail_gpu_lost')} == 1", was_up(context, "handrail_gpu_up")),
        severity=Severity.PAGE,
        summary=f"{{{{ with $labels.gpu }}}}GPU {{{{ . }}}} does{{{{ else }}}}The GPUs do{{{{ end }}}} not answer {_AT}",
        description=(
            f"{{{{ with $labels.gpu }}}}GPU {{{{ . }}}}{{{{ else }}}}NVML as a whole{{{{ end }}}} {_AT} answered before and does "
            "not answer now. An engine on it hangs or dies."
        ),
        command="handrail gpus",
    )


def _gpu_throttled(context: Context) -> Alert:
    window, limit = context.window(minutes(5)), f"{context.limits.throttled_percent / 100:.6g}"
    counted = context.series("handrail_gpu_throttled_seconds_total", f'policy=~"{"|".join(_HARMFUL_POLICIES)}"')
    looked = context.series("handrail_gpu_throttled", f'reason=~"{"|".join(_HARMFUL)}"')
    return Alert(
        name="GpuThrottled",
        expr=any_of(
            f'label_replace(rate({counted}[{window}]), "reason", "$1", "policy", "(.*)") > {limit}',
            f"avg_over_time({looked}[{window}]) > {limit}",
        ),
        severity=Severity.TICKET,
        wait=minutes(2),
        summary=f"GPU {{{{ $labels.gpu }}}} {_AT} is throttled: {{{{ $labels.reason }}}}",
        description=(
            f"The clock of GPU {{{{ $labels.gpu }}}} {_AT} was throttled for {{{{ $value | humanizePercentage }}}} of the last 5 "
            "minutes ({{ $labels.reason }}). Every step on this GPU takes longer meanwhile."
        ),
        command="handrail gpus --for 10s",
    )


def _gpu_errors(context: Context) -> Alert:
    return Alert(
        name="GpuErrors",
        expr=context.grew("handrail_gpu_xid_errors_total"),
        severity=Severity.TICKET,
        summary=f"GPU {{{{ $labels.gpu }}}} {_AT} reported Xid {{{{ $labels.xid }}}}",
        description=(
            f"Errors (Xid {{{{ $labels.xid }}}}) that the driver reported for GPU {{{{ $labels.gpu }}}} {_AT} in the last 10 "
            'minutes: {{ $value | printf "%.0f" }}. '
            "NVIDIA's list of Xid errors says which are the application's and which the hardware's."
        ),
        command="handrail events --since -1h",
    )
