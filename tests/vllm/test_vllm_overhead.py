"""The arithmetic of ``make bench-overhead``, and its page: no engine."""

from __future__ import annotations

from bench.overhead.arms import ORDER, Arm, Measured, block
from bench.overhead.page import Result, page
from bench.overhead.paired import differences, interval, quantile


def test_quantiles_lie_between_the_nearest_values() -> None:
    assert [quantile([4, 1, 3, 2], share) for share in (0, 0.5, 1)] == [1, 2.5, 4]


def test_the_interval_is_students() -> None:
    mean, low, high = interval([0.01, 0.02, 0.03])  # s = 0.01, t = 4.303
    assert (round(mean, 6), round(low, 5), round(high, 5)) == (0.02, -0.00484, 0.04484)


def test_each_arm_is_as_often_early_as_late() -> None:
    at = {letter: sum(n for n, each in enumerate(ORDER) if each == letter) for letter in "AB"}
    assert at["A"] == at["B"]
    assert ORDER.count("A") == ORDER.count("B")


def test_both_arms_get_prompts_of_the_same_lengths_in_other_words() -> None:
    """The same words would hit the engine's prefix cache the second time."""
    off, on, later = block("run-0", 1, Arm.OFF), block("run-0", 1, Arm.ON), block("run-0", 2, Arm.ON)
    lengths = [[len(r.prompt.split()) for r in each] for each in (off, on, later)]
    assert lengths[0] == lengths[1] != lengths[2]
    assert not {r.prompt for r in off} & {r.prompt for r in on}


def made(gap_ns: int, cpu_s: float) -> Measured:
    return Measured(
        ttft_ns=[10**8] * 4, gap_ns=[gap_ns] * 20, token_ns=[gap_ns], requests=4, engine_cpu_s=cpu_s, sidecar_cpu_s=0.02
    )


def test_a_cost_over_its_limit_is_missed_and_the_page_says_so() -> None:
    runs = [{Arm.OFF: made(1_000_000, 1.0), Arm.ON: made(1_030_000, 1.0 + n / 1000)} for n in range(3)]
    found = {d.figure.name: d for d in differences(runs)}
    gap, cpu, ttft = found["gap p50"], found["engine CPU per request"], found["TTFT p50"]
    assert (gap.met, cpu.met, ttft.met) == (False, True, None)
    assert abs(gap.mean - 0.03) < 1e-9
    alone = [
        {"name": "guest_record_event", "value": 200.0, "unit": "ns", "budget": 1000.0, "met": True},
        {"name": "guest_thread_encode_and_send_event", "value": 1.8, "unit": "us", "budget": None, "met": None},
    ]
    result = Result(
        differences=list(found.values()),
        runs=runs,
        alone=alone,
        middleware=True,
        load=0.1,
        seconds=60,
        command="make bench-overhead",
    )
    text = page(result, "a machine")
    assert "| gap p50 | 1.00 ms | 1.03 ms | +3.00% | +3.00% to +3.00% | ≤ 1%: missed |" in text
    assert "| events recorded, encoded and sent a second, one core | 500,000 |" in text
    assert "5.00 ms of CPU a request" in text
