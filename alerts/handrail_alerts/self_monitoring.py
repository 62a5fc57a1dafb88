"""Alerts on Handrail itself: what is unwatched, lost or down.

Silence must not look like health (case H08).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from handrail_alerts.alert import Alert, RuleGroup, Severity, minutes, prometheus
from handrail_alerts.context import Context, any_of

_AT: Final = "at {{ $labels.instance }}"
_SIDECAR_JOB: Final = 'job="handrail-sidecar"'  # set in every deployment; nothing else is known of a target that never answered
_SIDECARS: Final = "handrail_sidecar_info"
_COLLECTORS: Final = "handrail_collector_info"
LOSSES: Final = (
    "handrail_sidecar_spans_dropped_total",
    "handrail_sidecar_spool_lost_bytes_total",
    "handrail_sidecar_export_rejected_items_total",
    "handrail_sidecar_device_samples_dropped_total",
    "handrail_sidecar_plugin_lost_events_total",
    "handrail_sidecar_plugin_lost_datagrams_total",
    "handrail_sidecar_plugin_hook_failures_total",
    "handrail_sidecar_log_facts_dropped_total",
    "handrail_sidecar_scrape_samples_dropped_total",
    "handrail_collector_rejected_items_total",
    "handrail_collector_journal_damaged_bytes_total",
    "handrail_collector_publish_failures_total",
    "handrail_collector_forward_dropped_items_total",
    "handrail_collector_faults_total",
)
"""Counters of lost evidence, and of evidence that a fault of ours left out."""

LAG_SECONDS: Final = 60
_FETCHES_SEEN: Final = (
    "handrail_kv_fetches_total",
    "handrail_sidecar_log_failed_fetches_total",
    "handrail_engine_kv_transfer_failures_total",
)
_PUBLISHES_SEEN: Final = (
    "handrail_kv_publishes_total",
    "handrail_sidecar_log_failed_fetches_total",
    "handrail_engine_kv_expired_requests_total",
)


def groups(context: Context) -> Iterator[RuleGroup]:
    yield RuleGroup(
        name="handrail-itself",
        rules=(
            _absent(context),
            _edge_down(context),
            _sidecar_down(context),
            _collector_down(context),
            _dropping(context),
            _not_delivering(context),
            _spool_failing(context),
            _lagging(context),
            _coverage(context),
            _unwatched(context),
            _silent_engine(context),
            _clocks(context),
            _certificate(context),
            _secret(context),
        ),
    )


def _absent(context: Context) -> Alert:
    return Alert(
        name="HandrailAbsent",
        expr=f"absent({context.series(_SIDECARS)})",
        severity=Severity.PAGE,
        wait=minutes(5),
        summary="No sidecar of Handrail is scraped: no other alert can fire",
        description=(
            "Prometheus has had no handrail_sidecar_info for 5 minutes or longer: the sidecars are gone, are not scraped, or the "
            "selector of slo.yaml matches none of them. Requests, hand-offs and engines are not watched."
        ),
        command="handrail alerts check slo.yaml --prometheus http://PROMETHEUS:9090",
    )


def _gone(context: Context, *matchers: str) -> str:
    """Match targets that were sidecars in the last hour and cannot be scraped now.

    The result has their role.
    """
    return f"({context.series('up')} == 0) + on {context.of_target()} group_left (role) {context.processes(_SIDECARS, *matchers)}"


def _edge_down(context: Context) -> Alert:
    return Alert(
        name="EdgeSidecarDown",
        expr=_gone(context, 'role=~"edge|router"'),
        severity=Severity.PAGE,
        wait=minutes(1),
        summary=f"The sidecar in front of the {{{{ $labels.role }}}} {_AT} is down",
        description=(
            f"The sidecar {_AT} (role {{{{ $labels.role }}}}) has not answered Prometheus for a minute or longer. Clients "
            "that use its proxy reach nothing."
        ),
        command="handrail requests --scope edge --since -15m",
    )


def _sidecar_down(context: Context) -> Alert:
    unknown = f"({context.series('up', _SIDECAR_JOB)} == 0) unless on {context.of_target()} {context.processes_of(_SIDECARS)}"
    return Alert(
        name="SidecarDown",
        expr=any_of(_gone(context, 'role!~"edge|router"'), f"({unknown})"),
        severity=Severity.TICKET,
        wait=minutes(5),
        summary=f"The sidecar{{{{ with $labels.role }}}} beside the {{{{ . }}}} engine{{{{ end }}}} {_AT} is down",
        description=(
            f"The sidecar {_AT} {{{{ with $labels.role }}}}(role {{{{ . }}}}) has not answered Prometheus for 5 minutes or "
            "longer{{ else }}has not answered Prometheus for an hour, or never has{{ end }}. Requests go "
            "on unless it is their proxy, but Handrail does not observe them there."
        ),
        command="handrail events --since -1h",
    )


def _collector_down(context: Context) -> Alert:
    fleet = context.fleet()
    down = f"{context.series('up')} == 0 and on {context.of_target()} {context.processes_of(_COLLECTORS)}"
    sidecars, collectors = (f"count by {fleet} ({context.series(name)})" for name in (_SIDECARS, _COLLECTORS))
    none = f"{sidecars} unless {collectors} unless on {fleet} ({down})"
    return Alert(
        name="CollectorDown",
        expr=any_of(f"({down})", f"({none})"),
        severity=Severity.TICKET,
        wait=minutes(5),
        summary="{{ with $labels.instance }}The collector at {{ . }} is down{{ else }}Sidecars have no collector{{ end }}",
        description=(
            "{{ with $labels.instance }}The collector at {{ . }} has not answered Prometheus{{ else }}No collector has been "
            "scraped, though sidecars are,{{ end }} for 5 minutes or longer. Sidecars keep their evidence in bounded spools; "
            "meanwhile there are no findings that need joined requests (wrong_request, coverage, stalls)."
        ),
        command="handrail requests --data /var/lib/handrail --since -15m",
    )


def _dropping(context: Context) -> Alert:
    window = context.window(minutes(10))
    losses = (
        f'label_replace(sum by {context.of_target()} (increase({context.series(name)}[{window}])) > 0, "lost", "{name}", "", "")'
        for name in LOSSES
    )
    return Alert(
        name="HandrailDropping",
        expr=any_of(*losses),
        severity=Severity.TICKET,
        wait=minutes(2),
        summary=f"Handrail loses evidence {_AT}",
        description=(
            f'{{{{ $labels.lost }}}} rose by {{{{ $value | printf "%.0f" }}}} {_AT} in the last 10 minutes: requests and '
            "hand-offs of that time are reported with less detail, or not at all."
        ),
        command="handrail events --since -1h",
    )


def _not_delivering(context: Context) -> Alert:
    up, waiting = context.series("handrail_sidecar_export_up"), context.series("handrail_sidecar_spool_bytes")
    return Alert(
        name="SidecarNotDelivering",
        expr=f"{waiting} > 0 and on {context.of_target()} {up} == 0",
        severity=Severity.TICKET,
        wait=minutes(5),
        summary=f"The sidecar {_AT} cannot reach its collector",
        description=(
            f"The collector has acknowledged no export of the sidecar {_AT} for 5 minutes or longer; "
            "{{ $value | humanize1024 }}B wait in its spool. When the spool is full, the sidecar drops evidence."
        ),
        command="handrail config check sidecar.yaml",
    )


def _spool_failing(context: Context) -> Alert:
    return Alert(
        name="SpoolDiskFailing",
        expr=f"{context.series('handrail_sidecar_spool_degraded')} == 1",
        severity=Severity.TICKET,
        wait=minutes(5),
        summary=f"The disk under the spool of the sidecar {_AT} fails",
        description=(
            f"The sidecar {_AT} could not use its spool.dir for 5 minutes or longer. Evidence still reaches the collector from "
            "memory. Evidence that is not acknowledged is lost if the sidecar restarts, and dropped above a bound."
        ),
        command="handrail config check sidecar.yaml",
    )


def _lagging(context: Context) -> Alert:
    return Alert(
        name="CollectorLagging",
        expr=f"{context.series('handrail_collector_journal_lag_seconds')} > {LAG_SECONDS}",
        severity=Severity.TICKET,
        wait=minutes(5),
        summary=f"The collector {_AT} is {{{{ $value | humanizeDuration }}}} behind",
        description=(
            f"The oldest unprocessed journal entry of the collector {_AT} is {{{{ $value | humanizeDuration }}}} old; the "
            "collector has been late for 5 minutes or longer. Its answers are that old. When its journal is full, it tells "
            "senders to retry later."
        ),
        command="handrail requests --since -15m",
    )


def _coverage(context: Context) -> Alert:
    least = context.limits.trace_coverage_percent / 100
    return Alert(
        name="TraceCoverageLost",
        expr=f"{context.series('handrail_trace_coverage_ratio')} < {least:g}",
        severity=Severity.TICKET,
        wait=minutes(15),
        summary="Only {{ $value | humanizePercentage }} of requests are seen whole{{ with $labels.cluster }} in {{ . }}{{ end }}",
        description=(
            "{{ $value | humanizePercentage }} of the requests that edges or engines counted were joined with evidence from "
            f"every process on their path, for 15 minutes or longer; {least:.0%} are expected. Less is known about the others."
        ),
        command="handrail requests --since -15m --finding context_lost",
    )


def _unwatched(context: Context) -> Alert:
    """Alert on absent critical inputs.

    The alert is by role, since each input exists only where it means something (case H08).
    """
    info, on = context.series(_SIDECARS, 'role="decode"'), context.of_target()
    keeper = context.series(_SIDECARS, 'role="prefill"')
    fetches = "".join(f" unless on {on} {context.series(name)}" for name in _FETCHES_SEEN)
    publishes = "".join(f" unless on {on} {context.series(name)}" for name in _PUBLISHES_SEEN)
    return Alert(
        name="HandOffsUnwatched",
        expr=any_of(f"({info}{fetches})", f"({keeper}{publishes})"),
        severity=Severity.TICKET,
        wait=minutes(15),
        summary=f"Nothing reports KV hand-offs at the {{{{ $labels.role }}}} engine {_AT}",
        description=(
            f"The sidecar {_AT} has run for 15 minutes or longer, but neither the plugin, nor a log, nor the engine's "
            "counters report KV hand-offs. A failed hand-off would go unnoticed there: their number is unknown, not 0."
        ),
        command="handrail metrics http://ENGINE:8000/metrics --role decode",
    )


def _silent_engine(context: Context) -> Alert:
    return Alert(
        name="EngineSendsNoSpans",
        expr=f"{context.series('handrail_sidecar_engine_silent')} == 1",
        severity=Severity.TICKET,
        wait=minutes(5),
        summary=f"The engine {_AT} sends no spans",
        description=(
            f"Requests pass the sidecar {_AT}, but its tap has received no span from the engine for 5 minutes or longer. "
            "Handrail still reports the requests from what the proxy measured; the engine's part is missing."
        ),
        command="handrail requests --since -15m",
    )


def _clocks(context: Context) -> Alert:
    limit = context.limits.clock_bound
    widest = f"max by {context.fleet('host', 'peer_host')} ({context.series('handrail_clock_bound_seconds')})"
    return Alert(
        name="ClockBoundTooWide",
        expr=f"{widest} > {limit.seconds:g}",
        severity=Severity.TICKET,
        wait=minutes(15),
        summary="The clock bound of {{ $labels.host }} and {{ $labels.peer_host }} is {{ $value | humanizeDuration }} wide",
        description=(
            f"The bound of these two hosts' clock offset has been {{{{ $value | humanizeDuration }}}} wide (limit {limit}) "
            "for 15 minutes or longer. Durations inside one process stay exact; times between the two hosts are less exact."
        ),
        command="handrail explain --since -1h",
    )


def _certificate(context: Context) -> Alert:
    left = context.limits.certificate_left
    return Alert(
        name="CertificateExpiring",
        expr=f"{context.series('handrail_tls_certificate_expiry_timestamp_seconds')} - time() < {left.seconds:.0f}",
        severity=Severity.TICKET,
        wait=minutes(15),
        summary=f"A certificate ({{{{ $labels.use }}}}) {_AT} expires in {{{{ $value | humanizeDuration }}}}",
        description=(
            f"The certificate for {{{{ $labels.use }}}} {_AT} expires in {{{{ $value | humanizeDuration }}}} (limit "
            f"{prometheus(left)}). Then the connections that need it fail."
        ),
        command="handrail config check sidecar.yaml",
    )


def _secret(context: Context) -> Alert:
    return Alert(
        name="SecretStale",
        expr=f"{context.series('handrail_secret_stale')} == 1",
        severity=Severity.TICKET,
        wait=minutes(5),
        summary=f"A changed secret ({{{{ $labels.use }}}}) {_AT} cannot be used",
        description=(
            f"The file of {{{{ $labels.use }}}} {_AT} changed 5 minutes ago or earlier and cannot be used. The previous one "
            "stays in force; a restart of the process would fail."
        ),
        command="handrail config check sidecar.yaml",
    )
