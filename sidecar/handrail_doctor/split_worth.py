"""Judge whether splitting prefill from decode is likely to pay for this pair.

The criteria are those of the people who measured it.
Stay collocated when the time to first token is the tightest limit (the transfer adds to every first token), when the interconnect
is slow (no RDMA between hosts, no NVLink or peer-to-peer within one), or when traffic is low, bursty or not latency-sensitive (no
tail to repair). Splitting pays when p99 gaps miss their objective under load, prompts are long, and the hardware moves gigabytes
in tens of milliseconds. Sources: the vLLM team's guide of 2026 and articles on it; the thresholds below are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail.durations import format_duration
from handrail_doctor.facts import Facts, ObservedTraffic
from handrail_doctor.kv_size.size import Sizes
from handrail_doctor.prediction import Rate, RateSource

FAST_BYTES_PER_S: Final = 10e9
"""The rate from which on the link is no reason against.

It moves a gigabyte in a tenth of a second.
"""
SLOW_BYTES_PER_S: Final = 2e9
"""Below this rate the link is a reason against, whatever else is true.

8,000 tokens of a 7B model then take more than 0.2 s.
"""
TTFT_SHARE: Final = 0.25
"""The share of the TTFT objective that a hand-off may take.

A longer hand-off makes the time to first token the tightest limit.
"""
LONG_PROMPT: Final = 2000
BURSTY: Final = 4.0
"""The ratio of the busiest minute's requests to a mean one's in bursty traffic."""
BUSY_SHARE: Final = 0.02
"""The least share of its time that an engine spends on prefill under load.

Below it, fewer than one gap in a hundred can contain a prefill.
"""


class CriterionSide(str, Enum):
    """The answer that a criterion supports."""

    SPLIT = "for splitting"
    STAY = "for staying collocated"
    OPEN = "not known"


class Worth(str, Enum):
    """Whether splitting is likely to pay."""

    LIKELY = "likely to pay"
    UNLIKELY = "stay collocated"
    OPEN = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One criterion: its side and its reason."""

    criterion: str
    side: CriterionSide
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAdvice:
    """The advice, with ``reasons`` in the order of the criteria."""

    worth: Worth
    reasons: tuple[Criterion, ...]


def judged(facts: Facts, rate: Rate | None) -> SplitAdvice:
    """Judge all criteria.

    One reason against is enough to stay.
    Splitting is likely to pay when no criterion is against it, and the link, the first token and either the tail or the load are
    for it.
    """
    reasons = (
        _interconnect(facts, rate),
        _first_token(facts, rate),
        _tail(facts),
        _load(facts),
        _prompts(facts),
    )
    sides = [reason.side for reason in reasons]
    if CriterionSide.STAY in sides:
        return SplitAdvice(worth=Worth.UNLIKELY, reasons=reasons)
    enough = (
        reasons[0].side is CriterionSide.SPLIT
        and reasons[1].side is CriterionSide.SPLIT
        and CriterionSide.SPLIT in (reasons[2].side, reasons[3].side)
    )
    return SplitAdvice(worth=Worth.LIKELY if enough else Worth.OPEN, reasons=reasons)


def _interconnect(facts: Facts, rate: Rate | None) -> Criterion:
    criterion = "interconnect"
    if rate is None:
        return Criterion(criterion=criterion, side=CriterionSide.OPEN, seen="the rate of the link is not known")
    text = f"{_rate(rate.bytes_per_s)} {rate.source.value}"
    if rate.source is RateSource.HOST_STAGED or rate.bytes_per_s < SLOW_BYTES_PER_S:
        return Criterion(criterion=criterion, side=CriterionSide.STAY, seen=f"slow: {text}")
    if rate.bytes_per_s >= FAST_BYTES_PER_S and rate.source is not RateSource.TCP:
        return Criterion(criterion=criterion, side=CriterionSide.SPLIT, seen=f"fast: {text}")
    return Criterion(criterion=criterion, side=CriterionSide.OPEN, seen=f"{text}: neither fast nor slow; measure it under load")


def _first_token(facts: Facts, rate: Rate | None) -> Criterion:
    criterion = "time to first token"
    if rate is None or facts.sizes is None:
        return Criterion(criterion=criterion, side=CriterionSide.OPEN, seen="what the hand-off adds is not known")
    tokens = _tokens(facts)
    took = facts.sizes.request(tokens).transfer_ns(rate.bytes_per_s)
    text = f"the hand-off of {tokens:,} tokens adds {format_duration(took)}"
    objective = facts.options.ttft_ns
    if objective is not None:
        share = took / objective
        side = CriterionSide.STAY if share > TTFT_SHARE else CriterionSide.SPLIT
        return Criterion(
            criterion=criterion, side=side, seen=f"{text}, {share:.0%} of the objective of {format_duration(objective)}"
        )
    prefill = _prefill_ns(facts.traffic, tokens)
    if prefill:
        side = CriterionSide.STAY if took > prefill else CriterionSide.SPLIT if took < prefill / 4 else CriterionSide.OPEN
        return Criterion(
            criterion=criterion, side=side, seen=f"{text}, beside {format_duration(prefill)} of prefill; no objective (--ttft)"
        )
    return Criterion(criterion=criterion, side=CriterionSide.OPEN, seen=f"{text}; no objective to compare it with (--ttft)")


def _tail(facts: Facts) -> Criterion:
    criterion = "gaps between tokens"
    traffic, objective = facts.traffic, facts.options.itl_ns
    if traffic is None or traffic.gap_p99_ns is None:
        return Criterion(criterion=criterion, side=CriterionSide.OPEN, seen="no traffic was seen (--api of a collector)")
    text = f"a request's p99 gap is {format_duration(traffic.gap_p99_ns)} at the median"
    if traffic.split:
        return Criterion(
            criterion=criterion, side=CriterionSide.OPEN, seen=f"{text}, but these requests were served split: handrail compare"
        )
    if objective is None:
        return Criterion(criterion=criterion, side=CriterionSide.OPEN, seen=f"{text}; no objective to compare it with (--itl)")
    if traffic.gap_p99_ns <= objective:
        return Criterion(
            criterion=criterion,
            side=CriterionSide.STAY,
            seen=f"{text}, within the objective of {format_duration(objective)}: no tail to repair",
        )
    return Criterion(
        criterion=criterion, side=CriterionSide.SPLIT, seen=f"{text}, above the objective of {format_duration(objective)}"
    )


def _load(facts: Facts) -> Criterion:
    criterion = "load"
    traffic = facts.traffic
    rate = facts.options.requests_per_s or (traffic.requests_per_s if traffic is not None else None)
    if rate is None:
        return Criterion(
            criterion=criterion, side=CriterionSide.OPEN, seen="the rate of requests is not known (--rate, or --api)"
        )
    text = f"{rate:.3g} requests a second"
    burst = traffic.busiest_over_mean if traffic is not None else None
    if burst is not None and burst >= BURSTY:
        return Criterion(
            criterion=criterion,
            side=CriterionSide.STAY,
            seen=f"{text}, bursty: the busiest minute has {burst:.1f} times the mean",
        )
    prefill = _prefill_ns(traffic, _tokens(facts))
    if prefill is None:
        return Criterion(criterion=criterion, side=CriterionSide.OPEN, seen=f"{text}; what a prefill takes is not known (--api)")
    share = rate * prefill / 1e9
    seen = f"{text} of {format_duration(prefill)} of prefill: {share:.0%} of one engine's time"
    if share < BUSY_SHARE:
        return Criterion(criterion=criterion, side=CriterionSide.STAY, seen=f"low: {seen}")
    return Criterion(criterion=criterion, side=CriterionSide.SPLIT if share >= 0.1 else CriterionSide.OPEN, seen=seen)


def _prompts(facts: Facts) -> Criterion:
    criterion = "prompts"
    traffic = facts.traffic
    if traffic is None or traffic.prompt_tokens is None:
        return Criterion(
            criterion=criterion,
            side=CriterionSide.OPEN,
            seen=f"their length is not known; {facts.options.tokens:,} tokens are taken (--tokens)",
        )
    side = CriterionSide.SPLIT if traffic.prompt_tokens >= LONG_PROMPT else CriterionSide.OPEN
    length = "long" if side is CriterionSide.SPLIT else "short: a prefill hardly stalls anybody"
    return Criterion(criterion=criterion, side=side, seen=f"{traffic.prompt_tokens:,} tokens at the median, {length}")


def _tokens(facts: Facts) -> int:
    seen = facts.traffic.prompt_tokens if facts.traffic is not None else None
    return seen or facts.options.tokens


def _prefill_ns(traffic: ObservedTraffic | None, tokens: int) -> int | None:
    return None if traffic is None or traffic.prefill_token_ns is None else round(traffic.prefill_token_ns * tokens)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def per_thousand_ns(sizes: Sizes, rate: Rate) -> int:
    """Return what 1,000 tokens of a prompt add to a hand-off, in ns."""
    return sizes.request(1000).transfer_ns(rate.bytes_per_s)
