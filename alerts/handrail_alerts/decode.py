"""Alerts on the pools: one waits while the other is idle, or streams stall."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from handrail_alerts.alert import Alert, Recording, RuleGroup, Severity, minutes
from handrail_alerts.context import Context, any_of

WAITING: Final = "handrail:engine_requests_waiting:avg"
"""Recording of the average number of requests that wait at each engine, by role."""

_IDLE: Final = 1
_LEAST_STALLS: Final = 20
_NOT_OURS: Final = "client_backpressure"


def groups(context: Context) -> Iterator[RuleGroup]:
    yield RuleGroup(name="handrail-decode", rules=(_waiting(context), _imbalance(context), _stalling(context)))


def _waiting(context: Context) -> Recording:
    engines = f"sum by {context.of_target()} ({context.series('handrail_engine_requests_waiting')})"
    return Recording(
        record=WAITING, expr=f"avg by {context.fleet('role')} ({context.with_role(engines, 'handrail_sidecar_info')})"
    )


def _imbalance(context: Context) -> Alert:
    limit, on = context.limits.queued_requests, context.fleet()
    sides = (
        f'({WAITING}{{role="{short}"}} > {limit:g} and on {on} {WAITING}{{role="{idle}"}} < {_IDLE})'
        for short, idle in (("prefill", "decode"), ("decode", "prefill"))
    )
    return Alert(
        name="PrefillDecodeImbalance",
        expr=any_of(*sides),
        severity=Severity.TICKET,
        wait=minutes(10),
        summary="Too few {{ $labels.role }} engines for this traffic{{ with $labels.cluster }} in {{ . }}{{ end }}",
        description=(
            '{{ $value | printf "%.1f" }} requests wait at each {{ $labels.role }} engine on average, and almost none at '
            "the other pool, for 10 minutes or longer. At decode a request also waits there while its KV is on its way."
        ),
        command="handrail explain --since -30m",
    )


def _stalling(context: Context) -> Alert:
    window, fleet = context.window(minutes(15)), context.fleet("model_name")
    stalls = context.series("handrail_stalls_total", f'cause!="{_NOT_OURS}"')
    stalls = f"sum by {context.fleet('cause', 'model_name')} (increase({stalls}[{window}]))"
    requests = f"sum by {fleet} (increase({context.series('handrail_joined_requests_total')}[{window}]))"
    return Alert(
        name="StreamsStalling",
        expr=(
            f"{stalls}\n/ on {fleet} group_left ()\n{requests}\n> {context.limits.stalls_per_request:g}\n"
            f"and {stalls} >= {_LEAST_STALLS}"
        ),
        severity=Severity.TICKET,
        wait=minutes(5),
        summary="Streams of {{ $labels.model_name }} stall: {{ $labels.cause }}{{ with $labels.cluster }} in {{ . }}{{ end }}",
        description=(
            'There were {{ $value | printf "%.2f" }} stalls a request by {{ $labels.cause }} in the last 15 minutes: gaps '
            "much longer than those around them in the same stream."
        ),
        command="handrail explain --since -30m",
    )
