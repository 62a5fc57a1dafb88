"""The decode board: do streams run smoothly, and what stalls them.

It also shows whether P and D are in balance.
"""

from __future__ import annotations

from typing import Final

from handrail_dashboards.panel import GREEN, ORANGE, RED, Board, PanelQuery, PanelRow, bars, series, stat, table
from handrail_dashboards.query import (
    client_quantile,
    highest,
    increase,
    joined_model,
    live,
    mean,
    own,
    pooled,
    quantile,
    rate,
    total,
    worst,
)

_NO_STREAM: Final = "not applicable: no stream, or a prefill pool, which gives one token"
_NO_TOKENS: Final = "not applicable: no answer whose tokens are known, or a prefill pool, which gives one"
_NO_PAGE: Final = "no engine's metrics page is read"
_SHARES: Final = ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
_ENGINE: Final = "{{instance}} {{engine}}"
"""Legend of an engine.

The label ``engine`` exists where a process has several engines (data parallel), and is empty otherwise. The legend works for
both.
"""
_ONE: Final = ("role", "instance", "engine")


def _engines(name: str, *more: str) -> str:
    return worst(pooled(own(f"handrail_engine_{name}", *more)), *_ONE)


def _pools(name: str) -> str:
    return total(pooled(own(f"handrail_engine_{name}")), "role")


def _pools_rate(name: str) -> str:
    return total(pooled(rate(own(f"handrail_engine_{name}"))), "role")


BOARD: Final = Board(
    "decode",
    "Handrail / Decode",
    "Do streams run smoothly: gaps, stalls and their causes, batch and KV cache, preemptions, and the balance of P and D.",
    (
        PanelRow(
            "Do streams run smoothly?",
            (
                stat(
                    "Stream gap p99",
                    "99 of 100 gaps between chunks with content were shorter, as clients saw them.",
                    "s",
                    client_quantile(0.99, "handrail_stream_gap_seconds"),
                    no_value="no streams seen",
                ),
                stat(
                    "ITL p99",
                    "99 of 100 times per token were shorter: a gap over the tokens of its chunk, where their number is known.",
                    "s",
                    client_quantile(0.99, "handrail_itl_seconds"),
                    no_value="tokens unknown",
                ),
                stat(
                    "Stalls",
                    "Streams of this time range that stalled, each counted once, by its longest stall (a gap far above "
                    "the stream's own median).",
                    "none",
                    total(increase(joined_model("handrail_stalls_total"))),
                    once=True,
                    decimals=0,
                    steps=((0, GREEN), (0.5, ORANGE)),
                ),
                stat(
                    "Preemptions",
                    "Requests that engines preempted in this time range. An engine recomputes their KV.",
                    "none",
                    total(pooled(increase(own("handrail_engine_preemptions_total")))),
                    once=True,
                    decimals=0,
                    steps=((0, GREEN), (0.5, ORANGE)),
                ),
                stat(
                    "Fullest KV cache",
                    "The engine with the largest share of its KV cache in use. Shares of several engines are not added.",
                    "percentunit",
                    worst(pooled(own("handrail_engine_kv_cache_usage_ratio"))),
                    steps=((0, GREEN), (0.85, ORANGE), (0.95, RED)),
                    high=1,
                ),
                stat(
                    "Hung engines",
                    "Engines that make no progress while requests wait, although /health may return 200.",
                    "none",
                    total(pooled(own("handrail_engine_hung"))),
                    decimals=0,
                    steps=((0, GREEN), (0.5, RED)),
                ),
            ),
        ),
        PanelRow(
            "Gaps and stalls",
            (
                series(
                    "Stream gaps by pool",
                    "Time between chunks with content, as each gap ends; within 10 %.",
                    "s",
                    *(
                        PanelQuery(
                            quantile(share, live("handrail_stream_gap_seconds_bucket"), "role"),
                            f"{{{{role}}}} {word}",
                            exemplars=share > 0.5,
                        )
                        for share, word in _SHARES
                    ),
                    width=8,
                    log=True,
                    no_value=_NO_STREAM,
                    to_requests=True,
                ),
                series(
                    "Time per token by pool",
                    "Time between tokens (ITL), where continuous usage or token ids show how many tokens a chunk has. "
                    "Elsewhere only the mean of each whole answer is known, which hides its stalls.",
                    "s",
                    *(
                        PanelQuery(quantile(share, live("handrail_itl_seconds_bucket"), "role"), f"{{{{role}}}} ITL {word}")
                        for share, word in _SHARES
                    ),
                    *(
                        PanelQuery(
                            quantile(share, live("handrail_tpot_seconds_bucket"), "role"), f"{{{{role}}}} answer's mean {word}"
                        )
                        for share, word in _SHARES[:2]
                    ),
                    width=8,
                    log=True,
                    no_value=_NO_TOKENS,
                    to_requests=True,
                ),
                series(
                    "Stalls a minute, by cause",
                    "Stalls a minute by cause, as the collector finds it from evidence; `unknown` where there is none. "
                    "Only the longest stalls of each stream count. The figures are some seconds late.",
                    "none",
                    PanelQuery(f"60 * {total(rate(joined_model('handrail_stalls_total')), 'cause')}", "{{cause}}"),
                    width=8,
                    stacked=True,
                    low=0,
                    colours={"unknown": "#8e8e8e"},
                    to_requests=True,
                ),
                series(
                    "Worst engines: gap p99",
                    "The sidecars with the highest p99 of gaps now: one slow engine among many does not show in the "
                    "pool's figure.",
                    "s",
                    PanelQuery(
                        highest(quantile(0.99, live("handrail_stream_gap_seconds_bucket"), "role", "instance")),
                        "{{role}} {{instance}}",
                    ),
                    width=10,
                    log=True,
                    no_value=_NO_STREAM,
                ),
                bars(
                    "Stalls of this time range, by cause",
                    "Number of stalls by cause. `handrail explain` shows how much more often than by chance the evidence occurs.",
                    "none",
                    PanelQuery(total(increase(joined_model("handrail_stalls_total")), "cause"), "{{cause}}"),
                    width=6,
                    decimals=0,
                    steps=((0, GREEN), (0.5, ORANGE)),
                ),
                table(
                    "Models",
                    "Gaps of each model and role, and the mean time per token of its answers; the longest gaps first.",
                    {"model_name": "Model", "role": "Role"},
                    PanelQuery(
                        quantile(0.99, live("handrail_stream_gap_seconds_bucket"), "model_name", "role"), "Gap p99", unit="s"
                    ),
                    PanelQuery(
                        quantile(0.99, live("handrail_tpot_seconds_bucket"), "model_name", "role"), "Per token p99", unit="s"
                    ),
                    width=8,
                    sort="-Gap p99",
                    no_value=_NO_STREAM,
                ),
            ),
        ),
        PanelRow(
            "What the engines hold",
            (
                series(
                    "Batch: requests being computed",
                    "Requests in the running batch, the engines with most.",
                    "none",
                    PanelQuery(highest(_engines("requests_running")), f"{{{{role}}}} {_ENGINE}"),
                    width=8,
                    low=0,
                    no_value=_NO_PAGE,
                ),
                series(
                    "KV cache in use",
                    "The fullest engines. Above 95 %, the next request waits or another one is preempted.",
                    "percentunit",
                    PanelQuery(highest(_engines("kv_cache_usage_ratio")), f"{{{{role}}}} {_ENGINE}"),
                    width=8,
                    low=0,
                    high=1,
                    steps=((0, GREEN), (0.85, ORANGE), (0.95, RED)),
                    no_value=_NO_PAGE,
                ),
                series(
                    "Waiting and preempted",
                    "Requests that wait for the scheduler, on the engines with most of them, and preemptions a minute. "
                    "On a vLLM decode engine, the waiting requests include those whose KV fetch is still open.",
                    "none",
                    PanelQuery(highest(_engines("requests_waiting")), f"{{{{role}}}} {_ENGINE}"),
                    PanelQuery(f"60 * {_pools_rate('preemptions_total')} > 0", "{{role}}: preempted a minute"),
                    width=8,
                    low=0,
                    no_value=_NO_PAGE,
                ),
            ),
        ),
        PanelRow(
            "Are P and D in balance?",
            (
                series(
                    "Waiting, by pool",
                    "Requests that wait at all engines of a role. If one pool waits and the other does not, they are "
                    "out of balance.",
                    "none",
                    PanelQuery(_pools("requests_waiting"), "{{role}}"),
                    width=8,
                    low=0,
                    no_value=_NO_PAGE,
                ),
                series(
                    "KV cache in use, mean and fullest of a pool",
                    "Mean over the engines of a role, and the fullest of them. If they are far apart, the router "
                    "distributes requests unevenly.",
                    "percentunit",
                    PanelQuery(mean(pooled(own("handrail_engine_kv_cache_usage_ratio")), "role"), "{{role}} mean"),
                    PanelQuery(worst(pooled(own("handrail_engine_kv_cache_usage_ratio")), "role"), "{{role}} fullest"),
                    width=8,
                    low=0,
                    high=1,
                    no_value=_NO_PAGE,
                ),
                series(
                    "Tokens a second, by pool",
                    "Prompt tokens and generated tokens as the engines of each role count them. P should process the "
                    "prompts, D should generate.",
                    "none",
                    PanelQuery(_pools_rate("prompt_tokens_total"), "{{role}} prompt"),
                    PanelQuery(_pools_rate("generation_tokens_total"), "{{role}} generated"),
                    width=8,
                    low=0,
                    no_value=_NO_PAGE,
                ),
            ),
        ),
    ),
)
