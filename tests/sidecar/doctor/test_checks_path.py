"""Checks of side channels, OTLP, clocks and the lease."""

from __future__ import annotations

from typing import Any

import pytest

from builders.doctor_facts import D, P, facts, found, host, setup, verdict, view
from handrail_doctor.checks.all_checks import findings
from handrail_doctor.checks.result import CheckResult, CheckStatus
from handrail_doctor.facts import SIDES, ClockPair, DoctorOptions, Facts, OtlpTarget, Reach, SideChannel

CHECK = "path.prefill_side_channel"


def reached(reach: Reach | None, *, here: Any = frozenset({D}), by: str = "pair.yaml: prefill", **more: Any) -> Facts:
    channel = SideChannel(side=P, host="10.0.0.7", port=5600, by=by, reach=reach, **more)
    return facts(host=host(here=here), side_channels=(channel,))


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        (Reach.OPEN, CheckStatus.PASS),
        (Reach.MUTE, CheckStatus.WARN),
        (Reach.REFUSED, CheckStatus.FAIL),
        (Reach.SILENT, CheckStatus.FAIL),
        (Reach.UNRESOLVED, CheckStatus.FAIL),
        (Reach.ERROR, CheckStatus.FAIL),
        (None, CheckStatus.SKIP),
    ],
)
def test_prefills_port_from_decodes_host(reach: Reach | None, expected: CheckStatus) -> None:
    finding = found(reached(reach), CHECK)
    assert finding is not None
    assert finding.verdict is expected
    assert "10.0.0.7:5600" in finding.seen


def test_a_port_that_is_only_guessed_proves_nothing() -> None:
    for reach in (Reach.REFUSED, Reach.SILENT, Reach.MUTE):
        assert verdict(reached(reach, by="vLLM's default port"), CHECK) is CheckStatus.SKIP


def test_paths_that_could_not_be_tried_from_here_are_reported() -> None:
    finding = found(reached(Reach.OPEN, here=frozenset({P})), CHECK)
    assert finding is not None
    assert (finding.verdict, finding.do) == (CheckStatus.SKIP, "doctor --on decode on its host")
    assert verdict(reached(Reach.REFUSED, here=frozenset()), CHECK) is CheckStatus.WARN
    why = found(reached(None, why_not="it is an address of its own host"), CHECK)
    assert why is not None
    assert why.seen == "it is an address of its own host"
    assert found(facts(), CHECK) is None


def test_decodes_port_matters_for_a_push_alone() -> None:
    def way_back(connector: str) -> Facts:
        channel = SideChannel(side=D, host="10.0.0.8", port=5601, by="x", reach=Reach.REFUSED)
        return facts(view(D, setup(D, connector=connector)), host=host(here=frozenset(SIDES)), side_channels=(channel,))

    assert verdict(way_back("NixlConnector"), "path.decode_side_channel") is CheckStatus.WARN
    assert verdict(way_back("NixlPushConnector"), "path.decode_side_channel") is CheckStatus.FAIL


def otlp(*targets: OtlpTarget) -> list[CheckResult]:
    return [each for each in findings(facts(otlp=targets))["ways between"] if each.check.startswith("path.otlp")]


def test_G10_the_mistake_is_named() -> None:
    (finding,) = otlp(
        OtlpTarget(name="--otlp", endpoint="https://c:4318", problem="https://c:4318: TLS was sent to a plaintext port")
    )
    assert (finding.verdict, finding.seen) == (CheckStatus.FAIL, "https://c:4318: TLS was sent to a plaintext port")


def test_endpoints_are_numbered() -> None:
    good = OtlpTarget(name="a", endpoint="http://c:4318")
    untried = OtlpTarget(name="b", endpoint="http://127.0.0.1:4318", why_not="it is an address of decode's own host")
    found_ = otlp(good, untried)
    assert [(each.check, each.verdict) for each in found_] == [("path.otlp", CheckStatus.PASS), ("path.otlp1", CheckStatus.SKIP)]


MS = 1_000_000


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-5 * MS, 5 * MS, CheckStatus.PASS),
        (90 * MS, 110 * MS, CheckStatus.PASS),  # possibly within a tenth of a second
        (101 * MS, 110 * MS, CheckStatus.WARN),
        (-2000 * MS, -101 * MS, CheckStatus.WARN),
        (5 * MS, -5 * MS, CheckStatus.WARN),  # no offset fits
        (None, 5 * MS, CheckStatus.SKIP),
        (5 * MS, None, CheckStatus.SKIP),
    ],
)
def test_clocks(low: int | None, high: int | None, expected: CheckStatus) -> None:
    pair = ClockPair(source="a", target="b", low_ns=low, high_ns=high, by="http://c")
    assert verdict(facts(clocks=(pair,)), "path.clock") is expected


def test_no_clock_was_seen() -> None:
    finding = found(facts(no_clocks="no collector answers at http://c"), "path.clock")
    assert finding is not None
    assert (finding.verdict, finding.seen) == (CheckStatus.SKIP, "no collector answers at http://c")


@pytest.mark.parametrize(
    ("gbps", "lease_s", "expected"),
    [
        (400, 30.0, CheckStatus.PASS),
        (1, 30.0, CheckStatus.WARN),  # 32,768 tokens of 57,344 bytes take 15 s
        (0.4, 30.0, CheckStatus.FAIL),  # 38 s
        (0.4, 300.0, CheckStatus.PASS),
        (0.4, None, CheckStatus.FAIL),  # 30 s is the default
    ],
)
def test_A01_the_lease_outlasts_the_slowest_hand_off(gbps: float, lease_s: float | None, expected: CheckStatus) -> None:
    """Case A01: a lease that ends early frees blocks that D still reads.

    In the case, 8 of 42 requests were answered from freed blocks.
    """
    whole = facts(view(P, setup(P, lease_s=lease_s)), options=DoctorOptions(tokens=8000, link_bits_per_s=gbps * 1e9))
    finding = found(whole, "path.lease")
    assert finding is not None
    assert finding.verdict is expected
    assert "32,768 tokens" in finding.seen


def test_older_engines_have_a_timeout_in_place_of_a_lease() -> None:
    engine = view(P, setup(P, env={"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"}))
    finding = found(facts(engine, options=DoctorOptions(tokens=8000, link_bits_per_s=0.4e9)), "path.lease")
    assert finding is not None
    assert finding.verdict is CheckStatus.PASS
    assert finding.seen.startswith("480 s (VLLM_NIXL_ABORT_REQUEST_TIMEOUT")


def test_the_lease_is_held_against_the_engines_longest_prompt() -> None:
    whole = facts(view(P, setup(P, max_model_len=1000)), options=DoctorOptions(tokens=8000, link_bits_per_s=1e9))
    finding = found(whole, "path.lease")
    assert finding is not None
    assert "1,000 tokens takes 462 ms" in finding.seen  # 63 blocks of 16


def test_the_lease_is_not_judged_without_size_rate_or_nixl() -> None:
    assert verdict(facts(), "path.lease") is CheckStatus.SKIP  # no rate is known
    assert verdict(facts(sizes=None, no_sizes="no model"), "path.lease") is CheckStatus.SKIP
    assert found(facts(view(P, setup(P, connector="LMCacheConnectorV1"))), "path.lease") is None
