"""What the buckets of published pages prove about a quantile."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.records import EPOCH, process
from handrail.records import EngineHistogram, Role
from handrail_sidecar.engine_metrics.counters import CounterTracks
from handrail_sidecar.engine_metrics.histogram import LimitSide, mean, quantile, saturated_share, share_above
from handrail_sidecar.engine_metrics.page import PageReader
from handrail_sidecar.sources.engine_metrics import sample_of

_REPLAY = Path(__file__).parents[2] / "data/replay/metrics"


def histogram(name: str, page: str) -> EngineHistogram:
    reading = PageReader().read((_REPLAY / page).read_bytes())
    (found,) = [h for h in sample_of(reading, process(Role.DECODE), EPOCH, CounterTracks()).histograms if h.name == name]
    return found


def test_D01_above_the_last_bucket_is_not_the_last_bucket() -> None:
    e2e = histogram("e2e_seconds", "D01_saturated.prom")
    p99 = quantile(e2e, 0.99)
    assert p99 is not None
    assert (p99.side, p99.low, p99.high, p99.value) == (LimitSide.ABOVE, 60.0, None, None)
    assert (saturated_share(e2e), mean(e2e)) == (0.1, 142.0)
    assert share_above(e2e, 60.0) == (0.1, 0.1)
    assert share_above(e2e, 100.0) == (0.0, 0.1), "above the last bound a limit is judged at least, never met"


def test_D02_below_the_first_bucket_nothing_is_interpolated() -> None:
    queue = histogram("queue_seconds", "D02_floor.prom")
    p99 = quantile(queue, 0.99)
    assert p99 is not None
    assert (p99.side, p99.high, p99.value) == (LimitSide.AT_MOST, 0.3, None)
    assert mean(queue) == pytest.approx(0.0041)
    assert share_above(queue, 0.1) == (0.0, 1.0), "a limit inside the first bucket is not judged"
    assert share_above(queue, 0.3) == (0.0, 0.0)


def test_D25_the_numbers_of_the_published_sample() -> None:
    expected = json.loads((_REPLAY / "D25_sglang_sample_expected.json").read_text())
    ttft, itl = histogram("ttft_seconds", "D25_sglang_sample.prom"), histogram("inter_token_seconds", "D25_sglang_sample.prom")
    assert {quantile(ttft, share).side for share in (0.5, 0.9, 0.99)} == {LimitSide.ABOVE}  # type: ignore[union-attr]
    assert saturated_share(ttft) == pytest.approx(expected["ttft"]["share_above"], abs=1e-4)
    assert mean(ttft) == pytest.approx(expected["ttft"]["mean_s"], abs=1e-3)
    p99 = quantile(itl, 0.99)
    assert p99 is not None
    assert p99.value == pytest.approx(expected["itl"]["p99_s"], abs=1e-4)
    assert mean(itl) == pytest.approx(expected["itl"]["mean_s"], abs=1e-5)
    above = share_above(itl, 2.5)
    assert above is not None
    assert above[0] == above[1] == pytest.approx(expected["itl"]["above_2_5_s"] / expected["itl"]["count"])


def test_an_empty_histogram_has_no_quantile() -> None:
    empty = EngineHistogram(name="ttft_seconds", bounds=(1.0,), counts=(0, 0), count=0, total=0.0)
    assert (quantile(empty, 0.5), share_above(empty, 1.0), mean(empty), saturated_share(empty)) == (None, None, None, 0.0)


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=60), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_lies_in_its_interval(samples: list[float], share: float) -> None:
    bounds = (0.01, 0.1, 1.0, 10.0)
    edges = (0.0, *bounds, float("inf"))
    counts = tuple(sum(low < each <= high for each in samples) for low, high in itertools.pairwise(edges))
    found = quantile(EngineHistogram(name="x", bounds=bounds, counts=counts, count=len(samples), total=sum(samples)), share)
    assert found is not None
    exact = sorted(samples)[max(0, -(-int(share * len(samples) * 10**6) // 10**6) - 1)]
    assert found.low <= exact
    assert found.high is None or exact <= found.high
    assert found.value is None or found.low <= found.value <= (found.high or 0)
