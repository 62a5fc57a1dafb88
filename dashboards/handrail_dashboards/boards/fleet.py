"""The fleet board: is it bad, for whom, and where."""

from __future__ import annotations

from typing import Final

from handrail_dashboards.panel import GREEN, ORANGE, RED, Board, PanelQuery, PanelRow, series, stat, table, text
from handrail_dashboards.query import (
    FAILED_FETCHES,
    FAILED_REQUESTS,
    client_counted,
    client_quantile,
    client_total,
    client_ttft,
    counted,
    each_of,
    increase,
    joined,
    joined_model,
    least,
    live,
    own,
    quantile,
    quantile_of_range,
    rate,
    ratio,
    role,
    total,
    worst,
)

_IDLE: Final = "no requests seen"
_POOL: Final = {"model_name": "Model", "role": "Role"}
_TTFT, _GAP = "handrail_ttft_seconds", "handrail_stream_gap_seconds"
_SLO: Final = "handrail_slo_requests_total"
_TTFT_LIMIT: Final = PanelQuery(worst(own("handrail_slo_threshold_seconds", 'slo="ttft"')), "limit of the SLO")
_GAP_LIMIT: Final = PanelQuery(worst(own("handrail_slo_threshold_seconds", 'slo="itl"')), "limit of the SLO")
_REQUESTS: Final = total(rate(live("handrail_requests_total")), "model_name", "role")
_OWN_SCOPE: Final = 'scope=~"edge|router|decode"'
_SHARES: Final = ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))

_READ_ME: Final = """\
**Bad?** The numbers above are what clients saw. **For whom?** The table, worst first. **Where?** The phases: `prefill_…` is P,
`kv_…` the hand-off, `decode_…` and `first_step` D, `router_and_hops` what lies between.

**Next:** `handrail explain --since -15m` names phase, place and cause; `handrail requests --sort ttft --descending` lists the
slowest; `handrail trace ID` shows one. Boards: *Handrail* at the top right. A point's menu leads to the requests of that time.
"""


def _ttft(share: float) -> str:
    """Return a quantile of time to first token, with one scope for each role.

    The scope begins at the request's arrival where a proxy sees that, else at queued, as the plugin reports it.
    """
    seen, reported_text = (
        quantile(share, live(f"{_TTFT}_bucket", scope), "role", "scope") for scope in (_OWN_SCOPE, 'scope="engine"')
    )
    return f"({seen}) or on (role) ({reported_text})"


_SLOW: Final = each_of(
    total(increase(joined_model("handrail_slow_phase_seconds_total")), "phase"),
    total(increase(joined_model("handrail_slow_requests_total"))),
)
_USUAL: Final = ratio(
    total(increase(joined_model("handrail_phase_seconds_sum")), "phase"),
    total(increase(joined_model("handrail_phase_seconds_count")), "phase"),
)


def _met(slo: str, *by: str) -> str:
    part, whole = live(_SLO, f'slo="{slo}"', 'met="true"'), live(_SLO, f'slo="{slo}"')
    return ratio(total(rate(part), *by), total(rate(whole), *by))


BOARD: Final = Board(
    "fleet",
    "Handrail / Fleet",
    "Is it bad, for whom, and where: SLO, goodput, time to first token and stream gaps by pool, the phases of the "
    "slowest requests, coverage.",
    (
        PanelRow(
            "Is it bad?",
            (
                stat(
                    "Goodput",
                    "Share of requests that met every objective (ttft, itl and success) as clients saw them: at the "
                    "edge, or at D where a model has no edge. Thresholds: 99 % and 95 %. No number without requests.",
                    "percentunit",
                    ratio(client_total(_SLO, 'slo="all"', 'met="true"'), client_total(_SLO, 'slo="all"')),
                    no_value=_IDLE,
                    steps=((0, RED), (0.95, ORANGE), (0.99, GREEN)),
                    high=1,
                ),
                stat(
                    "TTFT p99",
                    "99 of 100 requests had their first token within this: as clients saw them (`edge`), where there is no "
                    "edge from D's arrival on (`decode`), without a proxy as D's scheduler tells (`engine`). Within 10 %: "
                    "the buckets are 10 % apart.",
                    "s",
                    client_ttft(0.99),
                    once=True,  # otherwise the last point of each scope would stay from when another scope was the nearest
                    no_value=_IDLE,
                    legend="{{scope}}",
                ),
                stat(
                    "Stream gap p99",
                    "99 of 100 gaps between chunks with content were shorter, as clients saw them. Counted as each gap "
                    "ends, not when its stream does.",
                    "s",
                    client_quantile(0.99, _GAP),
                    no_value=_IDLE,
                ),
                stat(
                    "Failed requests",
                    "Requests of this time range that failed, except those that the client ended, as clients saw them: "
                    "at the edge, or at D where a model has no edge. The table shows every role.",
                    "none",
                    client_counted("handrail_requests_total", FAILED_REQUESTS),
                    once=True,
                    decimals=0,
                    steps=((0, GREEN), (0.5, RED)),
                ),
                stat(
                    "Failed KV fetches",
                    "KV fetches of this time range that failed in any way. They include those whose request was saved "
                    "by recomputing the prompt.",
                    "none",
                    total(counted(own("handrail_kv_fetches_total", FAILED_FETCHES))),
                    once=True,
                    decimals=0,
                    steps=((0, GREEN), (0.5, RED)),
                ),
                stat(
                    "Trace coverage",
                    "Of the requests counted at the edges (by engines where there is no edge), the share joined with "
                    "evidence from every process on their path. With several collectors, the lowest share. If it is "
                    "low, the collector's other panels show only a part of the requests.",
                    "percentunit",
                    least(joined("handrail_trace_coverage_ratio")),
                    no_value="not known",
                    steps=((0, RED), (0.9, ORANGE), (0.99, GREEN)),
                    high=1,
                ),
            ),
        ),
        PanelRow(
            "For whom?",
            (
                table(
                    "Models and pools",
                    "Each model at each role that has requests, the worst goodput first. The figures of an edge are the"
                    " client's; those of P and D begin at their own arrival. P sends one token, so it has no gaps. "
                    "`Failed` covers the whole time range, the others are current.",
                    _POOL,
                    PanelQuery(
                        f"1 - {_met('all', 'model_name', 'role')}",
                        "SLO missed",
                        unit="percentunit",
                        steps=((0, GREEN), (0.01, ORANGE), (0.05, RED)),
                    ),
                    PanelQuery(f"{_REQUESTS} > 0", "Requests", unit="reqps"),
                    PanelQuery(quantile(0.5, live(f"{_TTFT}_bucket", _OWN_SCOPE), "model_name", "role"), "TTFT p50", unit="s"),
                    PanelQuery(quantile(0.99, live(f"{_TTFT}_bucket", _OWN_SCOPE), "model_name", "role"), "TTFT p99", unit="s"),
                    PanelQuery(quantile(0.99, live(f"{_GAP}_bucket"), "model_name", "role"), "Gap p99", unit="s"),
                    PanelQuery(
                        f"{total(counted(live('handrail_requests_total', FAILED_REQUESTS)), 'model_name', 'role')} and "
                        f"{total(counted(live('handrail_requests_total')), 'model_name', 'role')} > 0",
                        "Failed",
                        unit="none",
                        steps=((0, GREEN), (0.5, RED)),
                    ),
                    width=15,
                    sort="-SLO missed",
                    no_value=_IDLE,
                ),
                series(
                    "SLO met, by objective",
                    "Share of requests that met each objective, over all chosen roles; choose a role above to see one. "
                    "Thresholds: 99 % and 95 %.",
                    "percentunit",
                    PanelQuery(_met("all", "slo"), "all: goodput"),
                    PanelQuery(_met("ttft"), "ttft"),
                    PanelQuery(_met("itl"), "itl"),
                    PanelQuery(_met("success"), "success"),
                    width=9,
                    no_value=_IDLE,
                    high=1,
                    steps=((0, RED), (0.95, ORANGE), (0.99, GREEN)),
                ),
                series(
                    "Time to first token by pool",
                    "Quantiles over all processes of a role, within 10 %: `edge` as the client saw it, `decode` from "
                    "the arrival at D, `engine` from queued to first token. The dashed line is slo.ttft of the "
                    "sidecars.",
                    "s",
                    *(
                        PanelQuery(_ttft(share), f"{{{{role}}}} ({{{{scope}}}}) {word}", exemplars=share > 0.5)
                        for share, word in _SHARES
                    ),
                    _TTFT_LIMIT,
                    width=12,
                    legend_right=True,
                    log=True,
                    no_value=_IDLE,
                    to_requests=True,
                ),
                series(
                    "Stream gaps by pool",
                    "Time between chunks with content, as each gap ends; a chunk may hold several tokens. Within 10 %. "
                    "P has none, since it sends one token.",
                    "s",
                    *(
                        PanelQuery(quantile(share, live(f"{_GAP}_bucket"), "role"), f"{{{{role}}}} {word}", exemplars=share > 0.5)
                        for share, word in _SHARES
                    ),
                    _GAP_LIMIT,
                    width=12,
                    legend_right=True,
                    log=True,
                    no_value="not applicable: no stream, or a prefill pool, which gives one token",
                    to_requests=True,
                ),
            ),
        ),
        PanelRow(
            "Where?",
            (
                table(
                    "Where the slowest 1 % spend their time to first token",
                    "Mean time in each phase over this time range: of the requests at or above their model's running "
                    "p99, and of all joined requests. Look at the phase with the largest excess. The means of the slow "
                    "requests add up to their mean time to first token. The p99 of each phase do not add up, since each"
                    " phase has other slow requests.",
                    {"phase": "Phase"},
                    PanelQuery(f"{_SLOW} - on (phase) ({_USUAL} or 0 * {_SLOW})", "Excess", unit="s"),
                    PanelQuery(_SLOW, "Slow 1 %", unit="s"),
                    PanelQuery(_USUAL, "All", unit="s"),
                    PanelQuery(
                        quantile_of_range(0.99, joined_model("handrail_phase_seconds_bucket"), "phase"), "p99 of each", unit="s"
                    ),
                    width=10,
                    height=10,
                    sort="-Excess",
                    no_value="no slow request was joined in this time",
                ),
                series(
                    "Slow requests, by phase",
                    "Mean time in each phase of the slowest 1 % of the requests joined in each step. Stacked, it is "
                    "their mean time to first token. Steps without a slow request are empty. The collector joins them, "
                    "so they are some seconds late.",
                    "s",
                    PanelQuery(
                        each_of(
                            total(rate(joined_model("handrail_slow_phase_seconds_total")), "phase"),
                            total(rate(joined_model("handrail_slow_requests_total"))),
                        ),
                        "{{phase}}",
                    ),
                    width=14,
                    height=10,
                    legend_right=True,
                    stacked=True,
                    bars=True,
                    no_value="no slow request was joined in this time",
                    to_requests=True,
                ),
                series(
                    "Requests",
                    "Finished requests a second, by role and outcome. Every process that sees a request counts it. "
                    "Squares are the last failure of each kind, with its trace.",
                    "reqps",
                    PanelQuery(
                        total(rate(live("handrail_requests_total")), "role", "outcome") + " > 0",
                        "{{role}} {{outcome}}",
                        exemplars=True,
                    ),
                    width=8,
                    no_value=_IDLE,
                    low=0,
                ),
                series(
                    "Open requests",
                    "Open requests, and the age of the oldest. If the age only grows, that request hangs.",
                    "none",
                    PanelQuery(total(role("handrail_requests_open"), "role"), "open at {{role}}"),
                    PanelQuery(worst(role("handrail_request_oldest_age_seconds")), "age of the oldest, s"),
                    width=8,
                    low=0,
                    colours={"age of the oldest, s": ORANGE},
                ),
                series(
                    "Coverage",
                    "Share of counted requests that were joined completely. With several collectors, the lowest share.",
                    "percentunit",
                    PanelQuery(least(joined("handrail_trace_coverage_ratio")), "joined whole"),
                    width=8,
                    no_value="not known",
                    low=0,
                    high=1,
                    steps=((0, RED), (0.9, ORANGE), (0.99, GREEN)),
                ),
                text("How to read this", "What to do next", _READ_ME, width=24, height=4),
            ),
        ),
    ),
)
