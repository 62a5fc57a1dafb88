"""Checks of the ways between the processes, and of the lease.

The ways are side channels and OTLP endpoints. Clocks are checked too, and the lease is compared with the slowest hand-off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from handrail.durations import format_duration
from handrail_doctor.checks.result import CheckResult, failed, passed, skipped, warned
from handrail_doctor.connectors import ConnectorKind
from handrail_doctor.facts import ClockPair, Facts, PairSide, Reach, SideChannel
from handrail_doctor.prediction import predicted

LEASE_S: Final = 30.0
"""NIXL's default ``kv_lease_duration`` in vLLM 0.32, in seconds.

D's heartbeats renew the lease every sixth of it, by two thirds.
"""
_CLOCK_NS: Final = 100_000_000


def check_side_channel(facts: Facts, side: PairSide) -> CheckResult | None:
    """Check the port at which the peer asks where KV is.

    A pull needs P's port from D; a push needs D's port from P.
    """
    found = next((each for each in facts.side_channels if each.side is side), None)
    if found is None:
        return None
    other = PairSide.DECODE if side is PairSide.PREFILL else PairSide.PREFILL
    check, title = f"path.{side.value}_side_channel", f"side channel of {side.value}, from {other.value}"
    where = f"{found.host}:{found.port}" if found.host else "address unknown"
    if found.reach is None:
        return skipped(check, title, found.why_not or f"{where} was not tried", f"doctor on {other.value}'s host")
    if found.reach is Reach.OPEN:
        if other not in facts.host.here:
            return skipped(
                check,
                title,
                f"{where} is open from here, but {other.value} does not run here",
                f"doctor --on {other.value} on its host",
            )
        return passed(check, title, f"{where} is open ({found.by})")
    seen = f"{where}: {found.reach.value}{f' ({found.detail})' if found.detail else ''}, by {found.by}"
    if found.reach is Reach.MUTE and _sure(found):
        why = "something other than an engine accepts the connection: the proxy of a service mesh does so for every port"
        return warned(check, title, seen, why=why, do="keep the port of the engine's NIXL connector outside the mesh")
    if not _sure(found):
        tried = f"{where} is {found.by}: {found.reach.value}; the engine may use another"
        return skipped(check, title, tried, f"--{side.value}-side-channel HOST:PORT")
    needed = side is PairSide.PREFILL or _pushes(facts)
    why = "the first hand-off of every pair begins there; without it the KV fetch fails after the handshake timeout (5 s)"
    do = (
        "check VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT of an engine with a NIXL connector, network policies, "
        "firewalls and security groups"
    )
    if not needed or other not in facts.host.here:
        return warned(
            check,
            title,
            seen,
            why=f"{why}; {'only a push or a next turn needs this direction' if not needed else 'tried from this host alone'}",
            do=do,
        )
    return failed(check, title, seen, why=why, do=do)


def check_otlp(facts: Facts) -> Iterator[CheckResult]:
    """Check each OTLP endpoint with an empty export (case G10).

    The endpoint's answer names the mistake.
    """
    for number, target in enumerate(facts.otlp):
        check, title = f"path.otlp{number or ''}", f"OTLP: {target.name}"
        if target.why_not:
            yield skipped(check, title, f"{target.endpoint}: {target.why_not}")
        elif target.problem:
            yield failed(
                check,
                title,
                target.problem,
                why="no evidence arrives, and exporters report no error",
                do="use the address that the collector logged, with its scheme and port",
            )
        else:
            yield passed(check, title, f"{target.endpoint} accepts an export")


def check_clocks(facts: Facts) -> Iterator[CheckResult]:
    """Check the clocks of the hosts against each other.

    Handrail compares no clocks across hosts for a duration, but people read times of logs and traces side by side.
    """
    title = "clocks"
    if not facts.clocks:
        missing = facts.no_clocks or "no collector (--api) and no engine gave a time"
        yield skipped("path.clock", title, missing, "--api of a collector that has seen hand-offs between the hosts")
        return
    for number, pair in enumerate(facts.clocks):
        yield _clock(pair, f"path.clock{number or ''}", f"{title} of {pair.source} and {pair.target}")


def check_lease(facts: Facts) -> CheckResult | None:
    """Check that the lease is longer than the slowest hand-off (case A01).

    P frees KV that nobody has read when the lease ends, and D reads freed blocks without an error.
    """
    connector = facts.engine(PairSide.PREFILL).connector
    if connector is not None and connector.nixl is None:
        return None
    check, title = "path.lease", "lease against the slowest hand-off"
    lease_s, by = _lease(facts)
    if facts.sizes is None:
        return skipped(check, title, f"{lease_s:g} s ({by}); the model's size is not known: {facts.no_sizes}", "--model")
    longest = facts.engine(PairSide.PREFILL).value("max_model_len") or facts.sizes.shape.max_tokens
    tokens = longest or facts.options.tokens
    rate = predicted(facts)
    if rate is None:
        return skipped(check, title, f"{lease_s:g} s ({by}); the link's rate is not known", "--link-gbps")
    took_s = facts.sizes.request(tokens).bytes / rate.bytes_per_s
    seen = f"{lease_s:g} s ({by}); a prompt of {tokens:,} tokens takes {format_duration(round(took_s * 1e9))} alone"
    do = "kv_lease_duration in kv_connector_extra_config above the longest wait and transfer, on P"
    if took_s > lease_s:
        return failed(
            check,
            title,
            seen,
            why="only D's heartbeats (every sixth of the lease) then keep the lease: after one stalled step of D, P frees blocks "
            "that D is reading. vLLM answers 200 with KV that may belong to another prompt",
            do=do,
        )
    if took_s > lease_s / 3:
        return warned(
            check,
            title,
            seen,
            why="three such prompts, one after the other on this link, outlast the lease; then only heartbeats keep it",
            do=do,
        )
    return passed(check, title, seen)


def checks(facts: Facts) -> Iterator[CheckResult | None]:
    """Yield all checks, in the order in which they are shown."""
    yield check_side_channel(facts, PairSide.PREFILL)
    yield check_side_channel(facts, PairSide.DECODE)
    yield check_lease(facts)
    yield from check_clocks(facts)
    yield from check_otlp(facts)


def _lease(facts: Facts) -> tuple[float, str]:
    """Return (lease in seconds, source of the value)."""
    prefill = facts.engine(PairSide.PREFILL)
    sourced_value, older = prefill.setting("lease_s"), prefill.variable("VLLM_NIXL_ABORT_REQUEST_TIMEOUT")
    if sourced_value is not None:
        return float(sourced_value.value), sourced_value.by
    if older is not None and older.value.isdigit() and int(older.value):
        return float(older.value), f"VLLM_NIXL_ABORT_REQUEST_TIMEOUT, of vLLM before leases ({older.by})"
    return LEASE_S, "vLLM's default"


# --- helpers ----------------------------------------------------------------------------------------------------------------


def _clock(pair: ClockPair, check: str, title: str) -> CheckResult:
    low, high = pair.low_ns, pair.high_ns
    if low is not None and high is not None and low > high:
        return warned(
            check,
            title,
            f"no offset fits all hand-offs ({pair.by})",
            why="a clock stepped during traffic, or a join is wrong",
            do="run NTP or PTP on both hosts (chronyc tracking)",
        )
    if low is None or high is None:
        return skipped(check, title, f"bounded on one side only ({pair.by})", "traffic in both directions")
    seen = f"{_signed(low)} to {_signed(high)} apart, {format_duration(high - low)} wide ({pair.by})"
    if low > _CLOCK_NS or high < -_CLOCK_NS:
        return warned(
            check,
            title,
            seen,
            why="durations are right (none compares clocks), but logs and traces of the two hosts do not line up",
            do="run NTP or PTP on both hosts (chronyc tracking)",
        )
    return passed(check, title, seen)


def _signed(ns: int) -> str:
    return f"{'−' if ns < 0 else '+'}{format_duration(abs(ns))}"


def _sure(found: SideChannel) -> bool:
    """Test whether the address comes from a setting instead of a guess."""
    return "default" not in found.by


def _pushes(facts: Facts) -> bool:
    connector = facts.engine(PairSide.DECODE).connector
    return connector is not None and ConnectorKind.NIXL_PUSH in connector.kinds
