"""Answers of the boards' own queries in a real Prometheus.

The answer of each series is known.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import pytest

from handrail.metrics.histogram import LATENCY, SIZE, Histogram, Layout
from handrail_dashboards.export import Choices, dashboards
from harness.prometheus import ONE_AT_THE_END, WINDOW_S, Series, written

SHARES = ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
WITHIN = 0.1


def queries(board: str, title: str) -> list[str]:
    made = json.loads(dashboards(Choices())[f"{board}.json"])["panels"]
    (panel,) = (each for each in made if each["title"] == title and each["type"] != "row")
    return [target["expr"] for target in panel["targets"]]


def buckets(name: str, values: Sequence[float], labels: Mapping[str, str], layout: Layout = LATENCY) -> Iterator[Series]:
    """Yield a histogram of ``values`` (in s, or in bytes), spread evenly in a window."""
    histogram, total = Histogram(layout), 0
    for value in values:
        histogram.observe(round(value * layout.per_unit))
    for bound, count in zip((*layout.bounds, math.inf), histogram.counts, strict=True):
        total += count
        le = "+Inf" if bound == math.inf else str(bound)
        yield f"{name}_bucket", {"job": "j", **labels, "le": le}, total / WINDOW_S


def true_quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def test_quantiles_of_the_boards_are_within_10_percent_of_the_raw_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values from 1 ms to 100 s, over two processes a pool; the mean error is printed."""
    random.seed(6)
    middles = {"edge": 0.003, "router": 0.03, "prefill": 0.3, "decode": 3.0, "collocated": 20.0}
    raw = {
        role: [min(99.0, max(0.001, random.lognormvariate(math.log(middle), 0.6))) for _ in range(20_000)]
        for role, middle in middles.items()
    }
    series = [
        each
        for role, values in raw.items()
        for number in (0, 1)
        for each in buckets(
            "handrail_ttft_seconds",
            values[number::2],
            {"instance": f"{role}-{number}", "model_name": "m", "role": role, "scope": "edge"},
        )
    ]
    errors = {}
    with written(tmp_path, series) as prometheus:
        for (share, word), query in zip(SHARES, queries("fleet", "Time to first token by pool"), strict=False):
            for labels, found in prometheus.ask(query).items():
                role = dict(labels)["role"]
                errors[role, word] = abs(found / true_quantile(raw[role], share) - 1)
    assert len(errors) == len(raw) * len(SHARES)
    assert max(errors.values()) <= WITHIN, errors
    with capsys.disabled():
        print(f"\nquantiles by the boards: mean error {mean(errors.values()):.1%}, highest {max(errors.values()):.1%}")


def test_H03_the_slow_pod_with_few_requests_does_not_make_the_pools_p99(tmp_path: Path) -> None:
    """10,000 fast requests at one pod, 99 slow ones at another.

    The true p99 is fast; the mean of both pods' p99 is half a second.
    """
    fast, slow = [0.0105] * 10_000, [1.05] * 99
    common = {"model_name": "m", "role": "decode", "scope": "decode"}
    series = [
        *buckets("handrail_ttft_seconds", fast, {"instance": "a", **common}),
        *buckets("handrail_ttft_seconds", slow, {"instance": "b", **common}),
    ]
    with written(tmp_path, series) as prometheus:
        (shown,) = prometheus.ask(queries("fleet", "TTFT p99")[0]).values()
        mean_of_pods = "avg(histogram_quantile(0.99, sum by (le, instance) (rate(handrail_ttft_seconds_bucket[1m]))))"
        (averaged,) = prometheus.ask(mean_of_pods).values()
    assert shown == pytest.approx(true_quantile(fast + slow, 0.99), rel=WITHIN)
    assert averaged > 0.5


def test_without_an_edge_the_headline_is_of_decode_and_never_of_both(tmp_path: Path) -> None:
    at_decode = list(
        buckets("handrail_ttft_seconds", [0.2] * 100, {"instance": "d", "model_name": "m", "role": "decode", "scope": "decode"})
    )
    at_edge = list(
        buckets("handrail_ttft_seconds", [0.9] * 100, {"instance": "e", "model_name": "m", "role": "edge", "scope": "edge"})
    )
    (query,) = queries("fleet", "TTFT p99")
    for number, (series, output, value) in enumerate(((at_decode, "decode", 0.2), (at_decode + at_edge, "edge", 0.9))):
        (folder := tmp_path / str(number)).mkdir()
        with written(folder, series) as prometheus:
            found = prometheus.ask(query)
        assert {dict(labels)["scope"]: pytest.approx(shown, rel=WITHIN) for labels, shown in found.items()} == {output: value}


def test_goodput_counts_each_request_once_and_each_model_where_it_is_seen(tmp_path: Path) -> None:
    """Model a has an edge, which met 90 of 100; model b has none.

    b's decode met 50 of 100. The answer is 140 of 200.
    """
    met = {("a", "edge"): 90, ("a", "decode"): 100, ("a", "prefill"): 100, ("b", "decode"): 50}
    series: list[Series] = [
        (
            "handrail_slo_requests_total",
            {"job": "j", "instance": f"{model}-{role}", "model_name": model, "role": role, "slo": "all", "met": word},
            count / WINDOW_S,
        )
        for (model, role), good in met.items()
        for word, count in (("true", good), ("false", 100 - good))
    ]
    with written(tmp_path, series) as prometheus:
        (shown,) = prometheus.ask(queries("fleet", "Goodput")[0]).values()
    assert shown == pytest.approx(0.7)


def test_failed_requests_are_those_of_clients_each_once(tmp_path: Path) -> None:
    """Model a has an edge: 2 requests failed there, 3 at D.

    One of the latter was sent again. Model b has no edge, and 1 failed at D. The answer is 3 in all.
    """
    failed = {("a", "edge"): 2, ("a", "decode"): 3, ("b", "decode"): 1}
    series: list[Series] = [
        (
            "handrail_requests_total",
            {"job": "j", "instance": f"{model}-{role}", "model_name": model, "role": role, "outcome": "http_error"},
            count / WINDOW_S,
        )
        for (model, role), count in failed.items()
    ]
    with written(tmp_path, series) as prometheus:
        (shown,) = prometheus.ask(queries("fleet", "Failed requests")[0]).values()
    assert shown == pytest.approx(3)


def test_D22_one_hand_off_has_three_figures(tmp_path: Path) -> None:
    """10 fetches of 470 MB in a minute, with 3.1 s of transferring.

    The figures are 470 MB each, 1.52 GB/s while busy, and 78 MB/s over the minute.
    """
    common = {"job": "j", "instance": "d"}
    series: list[Series] = [
        *buckets("handrail_kv_fetch_bytes", [470e6] * 10, {"instance": "d"}, SIZE),
        ("handrail_kv_fetched_bytes_total", common, 4.7e9 / WINDOW_S),
        ("handrail_link_fetched_bytes_total", {**common, "peer": "p"}, 4.7e9 / WINDOW_S),
        ("handrail_link_busy_seconds_total", {**common, "peer": "p"}, 3.1 / WINDOW_S),
    ]
    with written(tmp_path, series) as prometheus:
        (size,) = prometheus.ask(queries("handoff", "Size of a fetch")[0]).values()
        (busy,) = prometheus.ask(queries("handoff", "Rate while transferring")[0]).values()
        (carried,) = prometheus.ask(queries("handoff", "Carried, on average")[0]).values()
    assert 470e6 / 2 <= size <= 470e6 * 2, "buckets of bytes are twice apart"
    assert busy == pytest.approx(4.7e9 / 3.1, rel=1e-3)
    assert carried == pytest.approx(78.3e6, rel=1e-2)


def test_an_engines_failures_are_the_same_together_whether_expiry_is_counted_apart_or_not(tmp_path: Path) -> None:
    """A04: 7 failures in all, in an older and in a newer engine.

    The older engine counts 7 failed transfers. The newer one counts 3 of them and 4 expired.
    """
    series: list[Series] = [
        ("handrail_sidecar_info", {"job": "j", "instance": instance, "role": "decode"}, ONE_AT_THE_END)
        for instance in ("old", "new")
    ]
    counted = {("old", "kv_transfer_failures"): 7, ("new", "kv_transfer_failures"): 3, ("new", "kv_expired_requests"): 4}
    series += [
        (f"handrail_engine_{name}_total", {"job": "j", "instance": instance, "engine": "0", "transport": "nixl"}, n / WINDOW_S)
        for (instance, name), n in counted.items()
    ]
    with written(tmp_path, series) as prometheus:
        found = prometheus.ask(queries("handoff", "Failures as engines count them")[0])
    together = {dict(labels)["instance"]: value for labels, value in found.items()}
    assert together == {"old": pytest.approx(7), "new": pytest.approx(7)}


@pytest.mark.parametrize(
    ("board", "title", "name", "labels"),
    [
        ("handoff", "Failed, by peer", "handrail_link_fetches_total", {"peer": "p", "outcome": "failed"}),
        ("handoff", "Failed, by reason", "handrail_kv_fetches_total", {"outcome": "failed", "reason": "of another version"}),
        ("handoff", "Failed", "handrail_kv_fetches_total", {"outcome": "failed", "reason": "of another version"}),
        ("handoff", "Stale reads", "handrail_kv_publishes_total", {"end": "stale_read"}),
        ("handoff", "Expired", "handrail_kv_publishes_total", {"end": "expired"}),
        ("fleet", "Failed requests", "handrail_requests_total", {"model_name": "m", "role": "edge", "outcome": "http_error"}),
        ("fleet", "Failed KV fetches", "handrail_kv_fetches_total", {"outcome": "failed", "reason": "of another version"}),
        ("gpu-links", "Xid errors", "handrail_gpu_xid_errors_total", {"gpu": "0", "uuid": "u", "xid": "79"}),
        ("gpu-links", "Errors of this time range", "handrail_gpu_xid_errors_total", {"gpu": "0", "uuid": "u", "xid": "79"}),
        ("handrail", "Sidecars: lost in this time range", "handrail_sidecar_spans_dropped_total", {"reason": "x"}),
    ],
)
def test_H01_the_very_first_failure_is_shown_where_the_series_is_born_with_it(
    board: str, title: str, name: str, labels: Mapping[str, str], tmp_path: Path
) -> None:
    """The first failure is shown, though its series begins with it.

    A peer, a failure type, an Xid or a process is new. ``increase`` alone sees nothing grow.
    """
    common = {"job": "j", "instance": "d"}
    there: Series = ("handrail_sidecar_info", {**common, "role": "decode"}, 0)
    with written(tmp_path, [there], born=[(name, {**common, **labels}, 1)]) as it:
        (shown,) = it.ask(queries(board, title)[0]).values()
    assert shown == 1


def test_a_count_goes_on_where_the_process_began_anew_or_went_away(tmp_path: Path) -> None:
    """A count goes on when its process restarts or goes away.

    What grew in the time range counts whether or not the series is new; what it had before does not.
    """
    common = {"job": "j", "peer": "p", "outcome": "failed"}
    series: list[Series] = [("handrail_link_fetches_total", {**common, "instance": "old"}, 3 / WINDOW_S)]
    with written(tmp_path, series, born=[("handrail_link_fetches_total", {**common, "instance": "new"}, 2)]) as prometheus:
        found = prometheus.ask(queries("handoff", "Failed, by peer")[0])
    assert {dict(labels)["instance"]: value for labels, value in found.items()} == {"old": pytest.approx(3), "new": 2}


def test_coverage_is_that_of_the_collector_with_the_least(tmp_path: Path) -> None:
    """One fully joined cluster must not hide another that is not joined."""
    series: list[Series] = [
        ("handrail_trace_coverage_ratio", {"job": "j", "instance": instance, "cluster": instance}, share * ONE_AT_THE_END)
        for instance, share in (("a", 1.0), ("b", 0.2))
    ]
    with written(tmp_path, series) as prometheus:
        for board, title in (("fleet", "Trace coverage"), ("fleet", "Coverage"), ("handrail", "Coverage")):
            (shown,) = prometheus.ask(queries(board, title)[0]).values()
            assert shown == pytest.approx(0.2), (board, title)


def test_H08_what_was_lost_is_not_0_where_nobody_tells(tmp_path: Path) -> None:
    """A loss is 0 only where somebody counts it.

    With a sidecar alone, the collectors' losses are unknown. With neither, everything is unknown.
    """
    sidecar: Series = ("handrail_sidecar_info", {"job": "j", "instance": "s", "role": "decode"}, ONE_AT_THE_END)
    (lost,), (unused,) = queries("handrail", "Sidecars lost"), queries("handrail", "Unused")
    with written(tmp_path, [sidecar]) as prometheus:
        assert list(prometheus.ask(lost).values()) == [0]
        assert prometheus.ask(unused) == {}
    (folder := tmp_path / "none").mkdir()
    with written(folder, [("up", {"job": "j"}, 0)]) as prometheus:
        assert prometheus.ask(lost) == {}


def test_a_gpu_that_every_pod_of_its_node_reads_is_one(tmp_path: Path) -> None:
    """A GPU that every pod of a node reads counts once.

    In Kubernetes with NVML each sidecar of a node reads all its GPUs (docs/deployment.md).
    """
    series: list[Series] = [
        (name, {"job": "j", "instance": instance, "gpu": gpu, "uuid": f"GPU-{gpu}", **more}, 1 / WINDOW_S)
        for instance in ("a", "b")
        for gpu in ("0", "1")
        for name, more in (
            ("handrail_gpu_memory_total_bytes", {}),
            ("handrail_gpu_throttled", {"reason": "hw_thermal"}),
            ("handrail_gpu_xid_errors_total", {"xid": "79"}),
        )
    ]
    with written(tmp_path, series) as prometheus:
        for title in ("GPUs", "Throttled now", "Xid errors"):
            (shown,) = prometheus.ask(queries("gpu-links", title)[0]).values()
            assert shown == pytest.approx(2), title
