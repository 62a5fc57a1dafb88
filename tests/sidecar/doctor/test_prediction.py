"""Predict a link's rate, a hand-off's duration, and whether splitting pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders.doctor_facts import SOCKET, D, facts, gpus, host, model, port, same_host, setup, view
from handrail_doctor.facts import SIDES, DoctorOptions, Facts, Nic, ObservedTraffic, P2pStatus, Placement
from handrail_doctor.prediction import Rate, RateSource, predicted
from handrail_doctor.split_worth import CriterionSide, SplitAdvice, Worth, judged

BOTH = frozenset(SIDES)


def rate_of(whole: Facts) -> tuple[RateSource, float] | None:
    found = predicted(whole)
    return None if found is None else (found.source, found.bytes_per_s)


def on(**more: Any) -> Facts:
    return same_host(host=host(here=BOTH, **more))


def test_a_measured_rate_wins_over_a_configured_one_and_that_over_hardware() -> None:
    whole = on(gpus=gpus(nvlink=True))
    assert rate_of(whole) == (RateSource.NVLINK, 450e9)
    reported_facts = replace(whole, options=replace(whole.options, link_bits_per_s=100e9))
    assert rate_of(reported_facts) == (RateSource.CONFIGURED, 12.5e9)
    seen = replace(reported_facts, traffic=ObservedTraffic(by="http://c", fetches=40, fetch_bytes_per_s=3e9))
    assert rate_of(seen) == (RateSource.MEASURED, 3e9)


def test_without_peers_the_published_rate_is_assumed_and_named() -> None:
    rate = predicted(on(gpus=gpus(read=P2pStatus.CHIPSET)))
    assert rate is not None
    assert rate.assumed
    assert rate.bytes_per_s == pytest.approx(361.5e6, rel=0.001)
    assert "470 MB in 1.3 s between two L40S" in rate.why
    assert rate.best_bytes_per_s == 0.5e9


def test_peers_without_nvlink_that_pull_are_host_staged_too() -> None:
    rate = predicted(on(gpus=gpus()))
    assert rate is not None
    assert rate.source is RateSource.HOST_STAGED
    switched = view(D, setup(D, env={**SOCKET, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}))
    assert rate_of(same_host(switched)) == (RateSource.PCIE, 16 * 1.969e9)


def test_an_adapter_carries_what_gpus_cannot() -> None:
    assert rate_of(on(gpus=gpus(read=P2pStatus.CHIPSET), rdma=(port(),))) == (RateSource.RDMA, 50e9)


def test_across_hosts_one_port_is_counted_and_more_ports_are_mentioned() -> None:
    eight = tuple(port(f"mlx5_{number}") for number in range(8))
    rate = predicted(facts(host=host(rdma=eight), sizes=model("llama-3.1-70b", tp=8)))
    assert rate is not None
    assert (rate.bytes_per_s, rate.best_bytes_per_s) == (50e9, 400e9)
    one_rank = predicted(facts(host=host(rdma=eight)))
    assert one_rank is not None
    assert one_rank.best_bytes_per_s is None


def test_only_ports_that_ucx_may_use_count() -> None:
    ports = (port("mlx5_0"), port("mlx5_1", bits_per_s=100e9))
    chosen = view(D, setup(D, env={"UCX_NET_DEVICES": "mlx5_0:1"}))
    assert rate_of(facts(chosen, host=host(rdma=ports))) == (RateSource.RDMA, 50e9)
    assert rate_of(facts(host=host(rdma=ports))) == (RateSource.RDMA, 12.5e9)


def test_without_rdma_the_fastest_interface() -> None:
    nics = tuple(Nic(name=name, up=True, bits_per_s=speed, mtu=1500, physical=True) for name, speed in (("a", 10e9), ("b", 25e9)))
    assert rate_of(facts(host=host(nics=nics))) == (RateSource.TCP, 25e9 / 8)


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(facts(), id="across-hosts-and-nothing-seen"),
        pytest.param(
            facts(host=host(rdma=None, nics=(Nic(name="a", up=True, bits_per_s=1e9, mtu=1, physical=True),))), id="unread"
        ),
        pytest.param(facts(host=host(rdma=(port(bits_per_s=None),))), id="a-port-without-a-rate"),
        pytest.param(on(gpus=gpus(read=None)), id="the-driver-does-not-say"),
        pytest.param(on(gpus=gpus(nvlink=True, nvlink_bytes_per_s=None)), id="nvlinks-without-a-rate"),
        pytest.param(replace(on(gpus=gpus(nvlink=True)), placement=Placement.UNKNOWN), id="placement-not-known"),
    ],
)
def test_where_nothing_is_known_nothing_is_predicted(whole: Facts) -> None:
    assert predicted(whole) is None


# --- whether splitting pays --------------------------------------------------------------------------------------------------

FAST = Rate(bytes_per_s=50e9, source=RateSource.RDMA, why="")
SLOW = Rate(bytes_per_s=0.36e9, source=RateSource.HOST_STAGED, why="")
MIDDLE = Rate(bytes_per_s=4e9, source=RateSource.CONFIGURED, why="")
BUSY = ObservedTraffic(
    by="http://c",
    requests=1000,
    requests_per_s=1.0,
    busiest_over_mean=1.3,
    prompt_tokens=8000,
    prefill_token_ns=85_000,
    gap_p99_ns=169_000_000,
)


def answer(
    rate: Rate | None, traffic: ObservedTraffic | None = BUSY, *, ttft_ms: int | None = 1000, itl_ms: int | None = 50
) -> SplitAdvice:
    doctor_options = DoctorOptions(
        tokens=8000,
        ttft_ns=ttft_ms * 10**6 if ttft_ms is not None else None,
        itl_ns=itl_ms * 10**6 if itl_ms is not None else None,
    )
    return judged(facts(options=doctor_options, traffic=traffic), rate)


def side_of(given: SplitAdvice, criterion: str) -> CriterionSide:
    return next(reason.side for reason in given.reasons if reason.criterion == criterion)


def test_a_fast_link_and_a_tail_that_misses_its_objective_are_likely_to_pay() -> None:
    given = answer(FAST)
    assert given.worth is Worth.LIKELY
    assert {reason.side for reason in given.reasons} == {CriterionSide.SPLIT}


def test_B02_a_slow_link_says_stay_whatever_else_is_so() -> None:
    given = answer(SLOW)
    assert given.worth is Worth.UNLIKELY
    assert side_of(given, "interconnect") is CriterionSide.STAY
    assert side_of(given, "time to first token") is CriterionSide.STAY


@pytest.mark.parametrize(
    ("changed", "criterion"),
    [
        pytest.param({"requests_per_s": 0.01}, "load", id="low-traffic"),
        pytest.param({"busiest_over_mean": 9.0}, "load", id="bursty-traffic"),
        pytest.param({"gap_p99_ns": 24_000_000}, "gaps between tokens", id="no-tail-to-mend"),
    ],
)
def test_one_reason_against_is_enough(changed: dict[str, Any], criterion: str) -> None:
    given = answer(FAST, replace(BUSY, **changed))
    assert given.worth is Worth.UNLIKELY
    assert side_of(given, criterion) is CriterionSide.STAY


def test_the_first_token_as_the_tightest_limit() -> None:
    """A KV fetch of 459 MB over 4 GB/s takes 115 ms.

    That is much of an objective of 200 ms, little of 2 s.
    """
    assert side_of(answer(MIDDLE, ttft_ms=200), "time to first token") is CriterionSide.STAY
    assert side_of(answer(MIDDLE, ttft_ms=2000), "time to first token") is CriterionSide.SPLIT


def test_without_an_objective_the_prefill_is_the_measure() -> None:
    assert side_of(answer(FAST, ttft_ms=None), "time to first token") is CriterionSide.SPLIT  # 9 ms beside 680
    assert side_of(answer(SLOW, ttft_ms=None), "time to first token") is CriterionSide.STAY  # 1.3 s beside 0.7
    assert side_of(answer(FAST, None, ttft_ms=None), "time to first token") is CriterionSide.OPEN


def test_unknown_facts_are_reported_and_decide_nothing() -> None:
    given = answer(None, None, ttft_ms=None, itl_ms=None)
    assert given.worth is Worth.OPEN
    assert {reason.side for reason in given.reasons} == {CriterionSide.OPEN}
    assert answer(FAST, None).worth is Worth.OPEN
    assert answer(MIDDLE).worth is Worth.OPEN


def test_gaps_of_requests_that_were_served_split_say_nothing_of_collocation() -> None:
    assert side_of(answer(FAST, replace(BUSY, split=True)), "gaps between tokens") is CriterionSide.OPEN


def test_tcp_is_never_fast() -> None:
    tcp = Rate(bytes_per_s=12.5e9, source=RateSource.TCP, why="")
    assert side_of(answer(tcp), "interconnect") is CriterionSide.OPEN


def test_a_rate_that_was_given_counts_for_the_load() -> None:
    doctor_options = DoctorOptions(tokens=8000, requests_per_s=0.4)
    given = judged(facts(options=doctor_options, traffic=replace(BUSY, requests_per_s=None)), FAST)
    assert side_of(given, "load") is CriterionSide.SPLIT
