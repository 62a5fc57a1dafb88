"""What truly happened to a request, and what a fault did to it.

The effect of a fault is the difference from a run of the same seed without the fault.
This is the referee's side. Nothing here may import ``handrail``: the words are those of its design, written once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class TruePhase(str, Enum):
    """The parts of the time to first token.

    Each is inside one process; the rest is ``router`` and ``hops``.
    """

    PREFILL_ABANDONED = "prefill_abandoned"  # attempts at hosts that answered with an error, and the way back from there
    PREFILL_ADMISSION = "prefill_admission"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL_COMPUTE = "prefill_compute"  # includes the time in which it was preempted
    PREFILL_RESPOND = "prefill_respond"
    DECODE_ADMISSION = "decode_admission"
    KV_WAIT = "kv_wait"
    KV_HANDSHAKE = "kv_handshake"
    KV_TRANSFER = "kv_transfer"
    KV_NOTICE = "kv_notice"
    DECODE_QUEUE = "decode_queue"
    FIRST_STEP = "first_step"
    DECODE_RESPOND = "decode_respond"
    ROUTER = "router"
    HOPS = "hops"


class TrueOutcome(str, Enum):
    """How a request ended. ``HUNG``: still open when the run was over."""

    OK = "ok"
    FAILED = "failed"
    HUNG = "hung"


class FetchTruth(str, Enum):
    """How a KV fetch ended.

    ``RECOMPUTED``: it failed and D computed the prompt. D also computes it where a lease had expired.
    """

    NONE = "none"  # collocated, or never begun
    OK = "ok"
    FAILED = "failed"
    RECOMPUTED = "recomputed"
    EXPIRED = "expired"
    STALE_READ = "stale_read"  # D read another request's KV: the answer is wrong and looks right


_AT_PREFILL = {TruePhase.PREFILL_ADMISSION, TruePhase.PREFILL_QUEUE, TruePhase.PREFILL_COMPUTE, TruePhase.PREFILL_RESPOND}
_ON_LINK = {TruePhase.KV_HANDSHAKE, TruePhase.KV_TRANSFER}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTruth:
    """What truly happened to one request.

    Times are ns of virtual time, from the start of the run or as durations.
    ``phases`` sum to ``ttft_ns``, or to ``total_ns`` where there was no token and the request is not hung.
    ``gaps_ns``: between its tokens, as they leave the engine. ``cached_tokens``: found at P. ``kv_bytes``: asked over the link.
    ``prefill_host``: the host that served it. ``abandoned``: the hosts that were tried before, in order.
    """

    index: int
    request_id: str
    arrival_ns: int
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    kv_bytes: int
    prefill_host: str
    decode_host: str
    outcome: TrueOutcome
    fetch: FetchTruth
    ttft_ns: int | None
    total_ns: int | None
    phases: Mapping[TruePhase, int]
    gaps_ns: tuple[int, ...]
    preemptions: int
    abandoned: tuple[str, ...] = ()

    def place(self, phase: TruePhase) -> str:
        """Return the host or link to which ``phase`` belongs."""
        if phase is TruePhase.ROUTER:
            return "router"
        if phase is TruePhase.HOPS:
            return "network"
        if phase is TruePhase.PREFILL_ABANDONED:
            return self.abandoned[0]
        if phase in _AT_PREFILL:
            return self.prefill_host
        return f"{self.prefill_host}>{self.decode_host}" if phase in _ON_LINK else self.decode_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """What the fault cost one request.

    ``phase``: the one that grew most, and ``place``: where it is; None when none grew.
    ``ttft_ns`` and ``phases``: the growth over the run without the fault; negative where it shrank. ``ttft_ns`` is None where
    either run has no first token. ``gap_ns``: by how much the largest gap grew. ``outcome_changed``: in outcome or fetch.
    """

    ttft_ns: int | None
    phases: Mapping[TruePhase, int]
    phase: TruePhase | None
    place: str | None
    gap_ns: int
    outcome_changed: bool

    def slow(self, healthy_ttft_ns: int, *, least_ns: int = 50_000_000, share: float = 0.2) -> bool:
        """Test whether the fault delayed the first token enough to be worth a diagnosis."""
        return self.ttft_ns is not None and self.ttft_ns >= max(least_ns, share * healthy_ttft_ns)


def excess(healthy: RequestTruth, faulted: RequestTruth) -> Excess:
    """Compare a request with and without the fault.

    Both must be the same request of one seed; a retry may have led one of them elsewhere. Raises ``ValueError`` otherwise.
    """
    same = ("index", "arrival_ns", "prompt_tokens", "answer_tokens")
    if any(getattr(healthy, name) != getattr(faulted, name) for name in same):
        raise ValueError(f"request {healthy.index} and request {faulted.index} are not the same request")
    grown = {phase: faulted.phases.get(phase, 0) - healthy.phases.get(phase, 0) for phase in TruePhase}
    grown = {phase: ns for phase, ns in grown.items() if ns}
    most = max(grown, key=lambda phase: grown[phase], default=None)
    if most is not None and grown[most] <= 0:
        most = None
    both = healthy.ttft_ns is not None and faulted.ttft_ns is not None
    return Excess(
        ttft_ns=faulted.ttft_ns - healthy.ttft_ns if healthy.ttft_ns is not None and faulted.ttft_ns is not None else None,
        phases=grown,
        phase=most,
        place=faulted.place(most) if most is not None else None,
        gap_ns=max(faulted.gaps_ns, default=0) - max(healthy.gaps_ns, default=0) if both else 0,
        outcome_changed=(healthy.outcome, healthy.fetch) != (faulted.outcome, faulted.fetch),
    )
