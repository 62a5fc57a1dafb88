"""Alerts on KV hand-offs: failed, hung, stale, expired, and a slow link.

One is on a consumer that read another request's KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from handrail_alerts.alert import Alert, RuleGroup, Severity, minutes
from handrail_alerts.burn import FAILED_FETCHES
from handrail_alerts.context import LATELY, Context, any_of

_FETCHES: Final = "handrail_kv_fetches_total"
_FETCHES_BY_LOG: Final = "handrail_sidecar_log_failed_fetches_total"
_PUBLISHES: Final = "handrail_kv_publishes_total"
_FINDINGS: Final = "handrail_findings_total"
_COUNTED: Final = {
    "transfer": "handrail_engine_kv_transfer_failures_total",
    "handshake": "handrail_engine_kv_handshake_failures_total",
    "receive": "handrail_engine_kv_receive_failures_total",
}
_AT: Final = "at {{ $labels.instance }}"
_QUARTER: Final = minutes(15)
SPIKE_FLOOR: Final = 1
"""Failures a second, below which a multiple of a small rate fires nothing.

Case H14.
"""


def groups(context: Context) -> Iterator[RuleGroup]:
    yield RuleGroup(
        name="handrail-handoff",
        rules=(
            _fetch_failed(context),
            _failures_counted(context),
            _failure_spike(context),
            _fetch_hung(context),
            _transfers_stuck(context),
            _stale_read(context),
            _unexplained(context),
            _wrong_request(context),
            _mismatch(context),
            _expiring(context),
            _near_lease(context),
            _link_slow(context),
        ),
    )


def _fetch_failed(context: Context) -> Alert:
    text = context.grew(_FETCHES, FAILED_FETCHES)
    by_log = f"({context.grew(_FETCHES_BY_LOG)} unless on {context.of_target()} {text})"
    return Alert(
        name="KvFetchFailed",
        expr=any_of(text, by_log),
        severity=Severity.PAGE,
        summary=f"KV fetch failed {_AT}{{{{ with $labels.reason }}}}: {{{{ . }}}}{{{{ end }}}}",
        description=(
            f"KV fetches {_AT} that {{{{ with $labels.outcome }}}}ended as {{{{ . }}}}{{{{ else }}}}failed according to the log"
            '{{ end }} in the last 10 minutes: {{ $value | printf "%.0f" }}. The clients may still have received HTTP 200.'
        ),
        command="handrail fetches --failed --since -15m",
    )


def _failures_counted(context: Context) -> Alert:
    """Alert on the failures that the engine itself counts.

    It serves where neither the plugin nor a log reports each fetch.
    """
    counted = "\n  or ".join(
        f'label_replace({context.grew(name)}, "failure", "{word}", "", "")' for word, name in _COUNTED.items()
    )
    text = "".join(f"\nunless on {context.of_target()} {context.known(name, LATELY)}" for name in (_FETCHES, _FETCHES_BY_LOG))
    return Alert(
        name="KvTransferFailuresCounted",
        expr=f"(\n  {counted}\n){text}",
        severity=Severity.PAGE,
        summary=f"The engine {_AT} counted KV {{{{ $labels.failure }}}} failures",
        description=(
            f"KV {{{{ $labels.failure }}}} failures that the engine {_AT} counted in the last 10 minutes: "
            '{{ $value | printf "%.0f" }}. The engine does not name the requests, and each worker '
            "may count a failure. vLLM before 0.33 also counts expired leases, so the network may be healthy. The plugin names "
            "each failed fetch."
        ),
        command="handrail fetches --failed --since -15m",
    )


def _failure_spike(context: Context) -> Alert:
    fleet = context.fleet()
    failed = context.series(_FETCHES, FAILED_FETCHES)
    now = f"sum by {fleet} (rate({failed}[{context.window(minutes(5))}]))"
    before = f"sum by {fleet} (rate({failed}[1h] offset 15m))"
    return Alert(
        name="KvFetchFailureSpike",
        expr=f"{now} > 3 * {before}\nand {now} > {SPIKE_FLOOR}\nand count by {fleet} ({failed} offset 75m)",
        severity=Severity.TICKET,
        wait=minutes(2),
        summary="KV fetches fail more than three times as often as before{{ with $labels.cluster }} in {{ . }}{{ end }}",
        description=(
            '{{ $value | printf "%.1f" }} KV fetches a second failed in the last 5 minutes: more than three times the rate of '
            "the hour before. This alert is for fleets in which some fetches always fail and KvFetchFailed is silenced."
        ),
        command="handrail fetches --failed --since -2h",
    )


def _fetch_hung(context: Context) -> Alert:
    age, hung = context.series("handrail_kv_fetch_oldest_age_seconds"), context.series("handrail_kv_fetches_hung")
    return Alert(
        name="KvFetchHung",
        expr=f"{age} and on {context.of_target()} {hung} > 0",
        severity=Severity.PAGE,
        summary=f"A KV fetch hangs {_AT} for {{{{ $value | humanizeDuration }}}}",
        description=(
            f"The oldest open KV fetch {_AT} has neither ended nor failed for {{{{ $value | humanizeDuration }}}}. No counter of "
            "the engine shows this, and the client only sees no further token."
        ),
        command="handrail fetches --open --sort duration",
    )


def _transfers_stuck(context: Context) -> Alert:
    return Alert(
        name="KvTransfersStuck",
        expr=context.grew("handrail_engine_process_events_total", 'kind="transfers_stuck"'),
        severity=Severity.PAGE,
        summary=f"KV transfers make no progress {_AT}",
        description=(
            f"The engine {_AT} has open KV transfers. Neither their number nor the bytes transferred changed while requests "
            "waited; this began within the last 10 minutes. Low throughput here does not mean low load."
        ),
        command="handrail events --since -30m",
    )


def _stale_read(context: Context) -> Alert:
    return Alert(
        name="KvStaleRead",
        expr=any_of(context.grew(_PUBLISHES, 'end="stale_read"'), context.rose(_FINDINGS, 'kind="stale_read"')),
        severity=Severity.PAGE,
        summary=f"KV was read after it had been freed, reported {_AT}",
        description=(
            'KV fetches that read blocks after their lease ended, in the last 10 minutes: {{ $value | printf "%.0f" }}. The '
            "blocks may have held another request's KV. The clients received HTTP 200, but their answers cannot be trusted."
        ),
        command="handrail fetches --outcome stale_read --since -1h",
    )


def _wrong_request(context: Context) -> Alert:
    return Alert(
        name="KvWrongRequest",
        expr=context.rose(_FINDINGS, 'kind="wrong_request"'),
        severity=Severity.PAGE,
        summary="Requests were answered from another request's KV{{ with $labels.cluster }} in {{ . }}{{ end }}",
        description=(
            'Requests that read KV published for another request in the last 10 minutes: {{ $value | printf "%.0f" }}. '
            "One user's answer may rest on another user's prompt."
        ),
        command="handrail fetches --outcome wrong_request --since -1h",
    )


def _unexplained(context: Context) -> Alert:
    return Alert(
        name="KvFailuresUnexplained",
        expr=context.rose(_FINDINGS, 'kind="unexplained_failures"'),
        severity=Severity.TICKET,
        summary="An engine counted KV failures that no request explains{{ with $labels.cluster }} in {{ . }}{{ end }}",
        description=(
            'Such findings in the last 10 minutes: {{ $value | printf "%.0f" }} (one per engine and hour). Its counters rose, '
            "but no plugin, log or proxy reported a failed request at that time. What failed is unknown."
        ),
        command="handrail events --since -2h",
    )


def _mismatch(context: Context) -> Alert:
    return Alert(
        name="KvMismatch",
        expr=context.rose(_FINDINGS, 'kind=~"model_mismatch|kv_mismatch"'),
        severity=Severity.PAGE,
        summary="Prefill and decode do not fit together: {{ $labels.kind }}{{ with $labels.cluster }} in {{ . }}{{ end }}",
        description=(
            "Requests of the last 10 minutes whose processes name different models, or whose KV layouts differ: "
            '{{ $value | printf "%.0f" }}. Decode may misread the KV that prefill wrote.'
        ),
        command="handrail requests --finding kv_mismatch --since -1h",
    )


def _expiring(context: Context) -> Alert:
    by, window = context.of_target(), context.window(_QUARTER)

    def rose(name: str, *matchers: str) -> str:
        return f"sum by {by} (increase({context.series(name, *matchers)}[{window}]))"

    expired, kept = rose(_PUBLISHES, 'end="expired"'), rose(_PUBLISHES)
    counted = rose("handrail_engine_kv_expired_requests_total")
    return Alert(
        name="KvExpiring",
        expr=any_of(
            f"({expired} >= 3 and {expired} / {kept} > {context.limits.expired_percent / 100:.6g})",
            f"({counted} >= 3 unless on {by} {context.known(_PUBLISHES, _QUARTER)})",
        ),
        severity=Severity.TICKET,
        wait=minutes(2),
        summary=f"KV expires unread {_AT}",
        description=(
            f'The KV of {{{{ $value | printf "%.0f" }}}} prompts computed {_AT} was freed unread in the last 15 minutes. '
            "That work is wasted, and a later read fails or reads other data."
        ),
        command="handrail fetches --outcome expired --since -1h",
    )


def _near_lease(context: Context) -> Alert:
    window = context.window(_QUARTER)
    near = context.series(_FINDINGS, 'kind=~"handoff_near_lease|handoff_over_lease"')
    return Alert(
        name="KvNearLease",
        expr=f"sum by {context.fleet()} (increase({near}[{window}])) >= 3",
        severity=Severity.TICKET,
        summary="KV fetches begin near the end of the lease{{ with $labels.cluster }} in {{ . }}{{ end }}",
        description=(
            '{{ $value | printf "%.0f" }} KV fetches in the last 15 minutes began when most or all of their lease was over. '
            "With a little more delay, prefill frees the blocks before decode reads them."
        ),
        command="handrail requests --finding handoff_near_lease --since -1h",
    )


def _link_slow(context: Context) -> Alert:
    return Alert(
        name="KvLinkSlow",
        expr=f"{context.series('handrail_link_slow')} == 1",
        severity=Severity.TICKET,
        wait=minutes(5),
        summary="KV moves slowly from {{ $labels.source }} to {{ $labels.target }}: {{ $labels.finding }}",
        description=(
            "The link from {{ $labels.source }} to {{ $labels.target }} has been slower than its kind should be for 5 minutes or "
            "longer ({{ $labels.finding }}). Every request whose KV uses this link waits longer."
        ),
        command="handrail links --since -1h",
    )
