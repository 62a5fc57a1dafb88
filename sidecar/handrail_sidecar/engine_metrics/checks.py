"""Check one metrics page against itself for unknown, odd or missing figures.

Each note is a kind and one plain sentence.
None is an alarm: a page is one moment, and its counters run since the engine's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from handrail.records import EngineSample, Role
from handrail_sidecar.engine_metrics.histogram import saturated_share
from handrail_sidecar.engine_metrics.page import PageReading


@dataclass(frozen=True, slots=True)
class PageNote:
    """One note: ``kind`` is from a closed list, ``text`` is for people."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is known from outside the page; None: not known."""

    role: Role = Role.UNKNOWN
    engines: int | None = None  # data-parallel ranks
    agents: int | None = None  # transport agents: ranks of tensor parallelism


def page_notes(sample: EngineSample, reading: PageReading, expected: Expected) -> Iterator[PageNote]:
    """Yield the notes on a page, the most serious kinds first."""
    yield from _engines(reading, expected)
    yield from _agents(reading, expected)
    yield from _failures(reading)
    yield from _requests(reading)
    yield from _tokens(reading, expected)
    for histogram in sample.histograms:
        share = saturated_share(histogram)
        if share > 0.01 and histogram.bounds:
            yield PageNote(
                "saturated",
                f"{histogram.name}: {share:.1%} of its samples lie above its last bucket ({histogram.bounds[-1]:g}); "
                f"quantiles there are only lower bounds",
            )
    if reading.invalid.get("poisoned_sum"):
        yield PageNote(
            "poisoned_sum",
            "the sum of a time is negative: a failed KV load adds minus the machine's uptime; mean and high quantiles "
            "are unknown",
        )


def _engines(reading: PageReading, expected: Expected) -> Iterator[PageNote]:
    there = len(reading.engines)
    if expected.engines is not None and there < expected.engines:
        yield PageNote("engines_missing", f"{expected.engines - there} of {expected.engines} engines not exported")


def _agents(reading: PageReading, expected: Expected) -> Iterator[PageNote]:
    agents = {engine for engine, _ in reading.of("transport_sent_bytes")}
    if not agents:
        return
    if expected.agents is not None and len(agents) < expected.agents:
        yield PageNote(
            "agents_missing",
            f"{len(agents)} of {expected.agents} agents visible: neither a rate of the instance nor a count of its errors",
        )
    sent = reading.total("transport_sent_bytes") or 0.0
    moved = sum(buckets.total or 0.0 for key, buckets in reading.histograms.items() if key[0] == "kv_transfer_bytes")
    if sent and moved / sent > 1.5:
        yield PageNote("agents_disagree", f"the engine counts {moved / sent:.1f} times the bytes that the visible agents sent")


def _failures(reading: PageReading) -> Iterator[PageNote]:
    """Note failures whose kind is unknown.

    Before vLLM 0.33 one counter counted transport failures and expiry together (case A04).
    """
    failures, expired = reading.total("kv_transfer_failures"), reading.total("kv_expired_requests")
    if failures and expired is None:
        yield PageNote(
            "failures_mixed",
            f"{failures:.0f} failed transfers: this version counts transport failures and expiries together",
        )
    moved = reading.count("kv_transfer_bytes")
    if failures and not moved:
        yield PageNote("no_transfer_ever", f"{failures:.0f} failures and no finished transfer: rate and size are unknown")


def _requests(reading: PageReading) -> Iterator[PageNote]:
    first_tokens, ended = reading.count("ttft_seconds"), reading.total("requests_finished")
    if first_tokens is not None and ended is not None and first_tokens > ended:
        running = reading.total("requests_running") or 0.0
        missing = first_tokens - ended - running
        if missing > 0:
            yield PageNote("unaccounted", f"{missing:.0f} requests with a first token are neither finished nor running")
    whole = reading.count("e2e_seconds")
    if whole is not None and first_tokens is not None and whole > first_tokens:
        yield PageNote("no_first_token", f"{whole - first_tokens:.0f} finished requests have no first-token sample")


def _tokens(reading: PageReading, expected: Expected) -> Iterator[PageNote]:
    gaps, tokens = reading.count("inter_token_seconds"), reading.total("generation_tokens")
    requests = reading.count("e2e_seconds")
    if gaps and tokens and requests is not None and expected.role is not Role.PREFILL:
        missing = tokens - requests - gaps
        if missing > 0.01 * tokens:
            yield PageNote(
                "tokens_without_gap",
                f"{missing:.0f} tokens ({missing / tokens:.1%}) have no inter-token sample: it is taken per output event",
            )
    if expected.role is Role.DECODE:
        yield from _recomputed(reading)


def _recomputed(reading: PageReading) -> Iterator[PageNote]:
    """Note a D that computes prompt tokens itself.

    D computes one prompt token per request in any case (case D12).
    """
    sources = {label: value for (_, label), value in reading.of("prompt_tokens_by_source").items()}
    computed, transferred = sources.get("local_compute", 0.0), sources.get("external_kv_transfer", 0.0)
    requests = reading.total("requests_finished") or 0.0
    if transferred and requests and computed > 2 * requests:
        share = computed / sum(sources.values())
        yield PageNote(
            "decode_recomputes", f"decode computed {computed:.0f} prompt tokens itself ({share:.1%}): more than one a request"
        )
