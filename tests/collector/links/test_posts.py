"""The share of a transfer's time that is its submission, by an engine's metrics."""

from __future__ import annotations

import pytest

from builders.links import BEGAN, S, hand_off, process
from handrail.records import EngineHistogram, EngineSample, Source
from handrail_collector.links.facts import posts_of
from handrail_collector.links.findings import LinkFindingKind
from handrail_collector.links.report import link_lines

START = BEGAN - 500 * S


def sample(at_s: float, transfers: int, seconds: float, posted: float, *, start: int = START, host: str = "d0") -> EngineSample:
    def histogram(name: str, total: float) -> EngineHistogram:
        return EngineHistogram(
            name=name, bounds=(), counts=(transfers,), count=transfers, total=total, label="nixl", start_unix_ns=start
        )

    return EngineSample(
        process=process(host),
        source=Source.METRICS,
        at_unix_ns=BEGAN + round(at_s * S),
        histograms=(
            histogram("kv_transfer_seconds", seconds),
            histogram("kv_post_seconds", posted),
            histogram("kv_transfer_descriptors", 112_000.0 * transfers),
            histogram("kv_transfer_bytes", 5.04e9 * transfers),
        ),
    )


def test_B05_by_what_grew_between_the_first_and_the_last_sample() -> None:
    (posts,) = posts_of([sample(60, 150, 1000 + 42.0, 100 + 30.5), sample(0, 100, 1000.0, 100.0), sample(30, 120, 1020.0, 112.0)])
    assert (posts.instance, posts.transfers, posts.transfer_ns, posts.post_ns) == ("d0:8000", 50, 840_000_000, 610_000_000)
    assert (posts.descriptors, posts.bytes) == (112_000, 5_040_000_000)
    assert posts.share == pytest.approx(0.726, abs=0.001)


def test_an_engine_that_began_anew_counts_since_then() -> None:
    (posts,) = posts_of([sample(0, 100, 1000.0, 100.0), sample(60, 10, 8.0, 2.0, start=BEGAN + S)])
    assert (posts.transfers, posts.transfer_ns, posts.post_ns) == (10, 800_000_000, 200_000_000)


def test_one_sample_or_no_transfer_tells_nothing() -> None:
    assert posts_of([sample(0, 100, 1000.0, 100.0)]) == []
    assert posts_of([sample(0, 100, 1000.0, 100.0), sample(60, 100, 1000.0, 100.0)]) == []
    assert posts_of([]) == []


def test_B05_what_metrics_say_makes_the_finding() -> None:
    fetched = [hand_off(2.0 * n, 0.84, 5_040_000_000) for n in range(20)]
    (line,) = link_lines(fetched, counted_posts=posts_of([sample(0, 1, 1.0, 1.0), sample(60, 51, 43.0, 31.5)]))
    (finding,) = (each for each in line.findings if each.kind is LinkFindingKind.SUBMISSION_BOUND)
    assert "d0:8000 spends 73 % of a transfer's time" in finding.seen
