"""The hand-off board: KV from P to D.

It shows what failed, what hangs, how fast KV moves, and what waits to be read.
"""

from __future__ import annotations

from typing import Final

from handrail.kv_outcomes import FetchOutcome
from handrail_dashboards.panel import GREEN, ORANGE, RED, Board, PanelQuery, PanelRow, series, stat, table
from handrail_dashboards.query import (
    FAILED_FETCHES,
    counted,
    highest,
    increase,
    joined,
    of_line_rate,
    own,
    pooled,
    quantile,
    rate,
    ratio,
    total,
    worst,
)

_NO_FETCH: Final = "no fetch seen to end"
_SHARES: Final = ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
_OUTCOMES: Final = {
    FetchOutcome.OK.value: GREEN,
    FetchOutcome.FALLBACK_LOCAL.value: "light-blue",
    FetchOutcome.ABORTED.value: "#8e8e8e",
    FetchOutcome.UNKNOWN.value: "#b0b0b0",
    FetchOutcome.FAILED.value: "dark-red",
    FetchOutcome.RECOMPUTED.value: "orange",
    FetchOutcome.RETRIED.value: "yellow",
    FetchOutcome.EXPIRED.value: "dark-orange",
    FetchOutcome.STALE_READ.value: "purple",
    FetchOutcome.WRONG_REQUEST.value: "dark-purple",
    FetchOutcome.TIMED_OUT.value: "light-red",
    FetchOutcome.HUNG.value: "red",
}
_NONE: Final = ((0, GREEN), (0.5, RED))


def _quantiles(name: str) -> tuple[PanelQuery, ...]:
    return tuple(PanelQuery(quantile(share, own(f"{name}_bucket")), word) for share, word in _SHARES)


def _counted(what: str) -> str:
    return total(pooled(increase(own(f"handrail_engine_{what}_total"))), "role", "instance")


_TRANSFERS: Final = _counted("kv_transfer_failures")
_EXPIRED: Final = _counted("kv_expired_requests")
_HANDSHAKES: Final = _counted("kv_handshake_failures")

BOARD: Final = Board(
    "handoff",
    "Handrail / Hand-off",
    "KV from prefill to decode: what failed and why, what hangs, how long KV waits and moves, at what rate, and what P "
    "keeps unread.",
    (
        PanelRow(
            "Does it fail or hang?",
            (
                stat(
                    "Failed",
                    "KV fetches of this time range that failed in any way, as the consumer reports. 0 means none "
                    "failed; no number means that no plugin reports from D.",
                    "none",
                    total(counted(own("handrail_kv_fetches_total", FAILED_FETCHES))),
                    once=True,
                    decimals=0,
                    steps=_NONE,
                    width=3,
                ),
                stat(
                    "Hung now",
                    "Open KV fetches older than the limit (`hung_after`). No counter of an engine shows these, since "
                    "they have not ended.",
                    "none",
                    total(own("handrail_kv_fetches_hung")),
                    decimals=0,
                    steps=_NONE,
                    width=3,
                ),
                stat(
                    "Oldest open",
                    "Age of the oldest fetch that has not ended; 0 where none is open.",
                    "s",
                    worst(own("handrail_kv_fetch_oldest_age_seconds")),
                    steps=((0, GREEN), (5, ORANGE), (30, RED)),
                    width=3,
                ),
                stat(
                    "Stale reads",
                    "Blocks that D read after P had freed them: the answer may belong to another prompt. Even one is too many.",
                    "none",
                    total(counted(own("handrail_kv_publishes_total", 'end="stale_read"'))),
                    once=True,
                    decimals=0,
                    steps=_NONE,
                    width=3,
                ),
                stat(
                    "Wrong KV",
                    "KV fetches whose KV was published for another request, as the collector found by joining both ends.",
                    "none",
                    total(increase(joined("handrail_findings_total", 'kind="wrong_request"'))),
                    once=True,
                    decimals=0,
                    steps=_NONE,
                    width=3,
                ),
                stat(
                    "Expired",
                    "KV that P kept until its lease ended and that no consumer read.",
                    "none",
                    total(counted(own("handrail_kv_publishes_total", 'end="expired"'))),
                    once=True,
                    decimals=0,
                    steps=((0, GREEN), (0.5, ORANGE)),
                    width=3,
                ),
                stat(
                    "Oldest kept",
                    "Age of the oldest KV that P keeps for a consumer that has not read it.",
                    "s",
                    worst(own("handrail_kv_pinned_oldest_age_seconds")),
                    steps=((0, GREEN), (60, ORANGE), (240, RED)),
                    width=3,
                ),
                stat(
                    "Slow links",
                    "Pairs of P and D over which KV moves slower than its transport should allow, as the collector "
                    "finds; the table below names them.",
                    "none",
                    total(joined("handrail_link_slow")),
                    decimals=0,
                    steps=_NONE,
                    width=3,
                ),
            ),
        ),
        PanelRow(
            "What failed",
            (
                series(
                    "Fetches by outcome",
                    "Ended KV fetches a second. `recomputed` and `retried`: the request was answered, but later. "
                    "Squares are the last failure of each kind, with its trace.",
                    "ops",
                    PanelQuery(total(rate(own("handrail_kv_fetches_total")), "outcome"), "{{outcome}}", exemplars=True),
                    width=10,
                    stacked=True,
                    low=0,
                    colours=_OUTCOMES,
                    to_requests=True,
                ),
                table(
                    "Failed, by reason",
                    "Failures of this time range by outcome and the engine's own failure type.",
                    {"outcome": "Outcome", "reason": "Reason"},
                    PanelQuery(
                        total(counted(own("handrail_kv_fetches_total", FAILED_FETCHES)), "outcome", "reason") + " > 0",
                        "Failed",
                        unit="none",
                        steps=((0, ORANGE),),
                    ),
                    width=6,
                    sort="-Failed",
                    no_value="no failure is counted",
                ),
                table(
                    "Failed, by peer",
                    "Failures of this time range by the sidecar of the consumer and the peer that it read from.",
                    {"instance": "Reader", "peer": "Peer"},
                    PanelQuery(
                        total(counted(own("handrail_link_fetches_total", FAILED_FETCHES)), "instance", "peer") + " > 0",
                        "Failed",
                        unit="none",
                        steps=_NONE,
                    ),
                    width=8,
                    sort="-Failed",
                    no_value="no failure is counted",
                ),
            ),
        ),
        PanelRow(
            "How long",
            (
                series(
                    "Fetch: posted to done",
                    "Time of the transfer itself, as the consumer reports; where only a poll in each step sees the end,"
                    " up to one step more.",
                    "s",
                    *_quantiles("handrail_kv_fetch_seconds"),
                    width=8,
                    log=True,
                    no_value=_NO_FETCH,
                    to_requests=True,
                ),
                series(
                    "Wait before it: known to posted",
                    "Time from when D's scheduler knew of the request until the transfer was posted: waiting for "
                    "blocks, for a free load slot, for the handshake with a peer.",
                    "s",
                    *_quantiles("handrail_kv_fetch_wait_seconds"),
                    width=8,
                    log=True,
                    no_value=_NO_FETCH,
                    to_requests=True,
                ),
                series(
                    "Open and oldest",
                    "Open KV fetches, the hung ones among them, and the age of the oldest.",
                    "none",
                    PanelQuery(total(own("handrail_kv_fetches_open")), "open"),
                    PanelQuery(total(own("handrail_kv_fetches_hung")), "hung"),
                    PanelQuery(worst(own("handrail_kv_fetch_oldest_age_seconds")), "age of the oldest, s"),
                    width=8,
                    low=0,
                    colours={"hung": RED, "age of the oldest, s": ORANGE},
                ),
            ),
        ),
        PanelRow(
            "How much and how fast: three different figures",
            (
                series(
                    "Size of a fetch",
                    "Bytes of one KV fetch: the size of a prompt's KV, not a rate.",
                    "decbytes",
                    PanelQuery(quantile(0.5, own("handrail_kv_fetch_bytes_bucket")), "p50"),
                    PanelQuery(quantile(0.99, own("handrail_kv_fetch_bytes_bucket")), "p99"),
                    width=8,
                    no_value=_NO_FETCH,
                    low=0,
                ),
                series(
                    "Rate while transferring",
                    "Bytes over the time in which a transfer ran: how fast the link is while it is used.",
                    "Bps",
                    PanelQuery(
                        ratio(
                            total(rate(own("handrail_link_fetched_bytes_total")), "peer"),
                            total(rate(own("handrail_link_busy_seconds_total")), "peer"),
                        ),
                        "from {{peer}}",
                    ),
                    width=8,
                    no_value="no transfer seen",
                    low=0,
                ),
                series(
                    "Carried, on average",
                    "Bytes over all of the time: how much of a link KV fetches use, not how fast it is.",
                    "Bps",
                    PanelQuery(total(rate(own("handrail_kv_fetched_bytes_total"))), "all fetches"),
                    width=8,
                    low=0,
                ),
                series(
                    "Ports against their line rate",
                    "The fullest ports: the share of its line rate that each carried, mean of the step, and the highest"
                    " second of the last minute, which a mean hides. A virtual port has no line rate and is not shown.",
                    "percentunit",
                    PanelQuery(
                        of_line_rate(rate(own("handrail_link_bytes_total"))), "{{instance}} {{device}} {{direction}}, mean"
                    ),
                    PanelQuery(
                        of_line_rate(own("handrail_link_peak_bytes_per_second")),
                        "{{instance}} {{device}} {{direction}}, peak second",
                    ),
                    width=14,
                    legend_right=True,
                    no_value="no port with a line rate is sampled",
                    low=0,
                    high=1,
                    steps=((0, GREEN), (0.7, ORANGE), (0.9, RED)),
                ),
                table(
                    "Slow links now",
                    "Findings of the collector on pairs of P and D. `handrail links` shows the numbers and what to do.",
                    {"source": "From", "target": "To", "finding": "Finding"},
                    PanelQuery(worst(joined("handrail_link_slow"), "source", "target", "finding") + " > 0", "Now", unit="none"),
                    width=10,
                    no_value="no slow link is known",
                ),
            ),
        ),
        PanelRow(
            "What P keeps",
            (
                series(
                    "Kept KV by how that ended",
                    "`read`: a peer took it. `expired`: nobody did in time. `stale_read`: somebody did after that.",
                    "ops",
                    PanelQuery(total(rate(own("handrail_kv_publishes_total")), "end"), "{{end}}"),
                    width=7,
                    stacked=True,
                    low=0,
                    colours={"read": GREEN, "expired": ORANGE, "stale_read": "purple"},
                ),
                series(
                    "Pinned KV",
                    "Bytes that each P keeps for consumers that have not read them. This memory serves no request.",
                    "decbytes",
                    PanelQuery(highest(worst(own("handrail_kv_pinned_bytes"), "instance") + " > 0"), "{{instance}}"),
                    width=7,
                    low=0,
                    no_value="nothing seen pinned",
                ),
                table(
                    "Failures as engines count them",
                    "The engine's own counters in this time range. An engine without a counter of expiry counts expiry "
                    "as failed transfers (vLLM before it had two counters), so compare the sum of both. The network is "
                    "the cause only where expiry has a counter of its own and that is 0.",
                    {"role": "Role", "instance": "Sidecar"},
                    PanelQuery(f"{_TRANSFERS} + ({_EXPIRED} or 0 * {_TRANSFERS})", "Together", unit="none", steps=_NONE),
                    PanelQuery(_TRANSFERS, "Transfers", unit="none"),
                    PanelQuery(_EXPIRED, "Expired", unit="none"),
                    PanelQuery(_HANDSHAKES, "Handshakes", unit="none"),
                    width=10,
                    no_value="no engine exports these counters",
                ),
            ),
        ),
    ),
)
