"""What must be equal on P and D, and each engine alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from doctor_facts import SOCKET, D, P, facts, failures, found, live, model, same_host, setup, verdict, view
from handrail.doctor.checks_pair import EQUAL
from handrail.doctor.facts import ANY, Answer, Facts, Setup, SidecarSetup
from handrail.doctor.verdict import Verdict

OTHER: dict[str, Any] = {
    "version": "0.31.2",
    "model": "/mnt/qwen",
    "revision": "def456",
    "dtype": "float16",
    "kv_cache_dtype": "fp8",
    "block_size": 32,
    "kv_layout": "NHD",
    "hybrid": False,
}


def test_a_good_pair_fails_nothing_of_its_own() -> None:
    assert not {check for check in failures(facts()) if check.startswith(("pair.", "engine."))}


def test_every_row_has_a_case() -> None:
    assert set(OTHER) == {equal.name for equal in EQUAL}


@pytest.mark.parametrize("equal", EQUAL, ids=lambda equal: str(equal.name))
def test_a_difference_is_found_and_both_sides_named(equal: Any) -> None:
    whole = facts(view(D, setup(D, **{equal.name: OTHER[equal.name]})))
    finding = found(whole, f"pair.{equal.name}")
    assert finding is not None
    assert finding.verdict is (Verdict.WARN if equal.loose else Verdict.FAIL)
    assert "(pair.yaml: prefill)" in finding.seen
    assert "(pair.yaml: decode)" in finding.seen
    assert finding.why
    assert finding.do
    assert verdict(facts(), f"pair.{equal.name}") is Verdict.PASS


@pytest.mark.parametrize("equal", EQUAL, ids=lambda equal: str(equal.name))
def test_what_neither_engine_says_is_not_judged(equal: Any) -> None:
    mute = [view(side, setup(side, whole=False, **{equal.name: None})) for side in (P, D)]
    assert verdict(facts(*mute), f"pair.{equal.name}") is Verdict.SKIP
    half = facts(mute[0], view(D))
    finding = found(half, f"pair.{equal.name}")
    assert finding is not None
    assert (finding.verdict, finding.seen.startswith("decode says ")) == (Verdict.SKIP, True)


def test_what_a_command_line_leaves_out_is_the_default() -> None:
    both = facts(view(P, setup(P, revision=None)), view(D, setup(D, revision=None)))
    assert verdict(both, "pair.revision") is Verdict.PASS
    one = facts(view(P, setup(P, revision=None)))
    finding = found(one, "pair.revision")
    assert finding is not None
    assert finding.verdict is Verdict.FAIL
    assert "the default" in finding.seen


def test_no_model_is_a_default_so_one_that_nobody_told_is_not_judged() -> None:
    """Compose names it by a variable whose value is elsewhere."""
    assert verdict(facts(view(P, setup(P, model=None)), view(D, setup(D, model=None))), "pair.model") is Verdict.SKIP


def test_a_dtype_of_auto_is_the_models() -> None:
    one = view(P, setup(P, dtype="auto"))
    assert verdict(facts(one), "pair.dtype") is Verdict.PASS
    assert verdict(facts(one, view(D, setup(D, dtype="float16"))), "pair.dtype") is Verdict.FAIL
    assert verdict(facts(one, sizes=None), "pair.dtype") is Verdict.SKIP


def test_a_kv_dtype_of_auto_is_compared_as_it_is_written() -> None:
    """So does the handshake."""
    assert verdict(facts(view(P, setup(P, kv_cache_dtype="bfloat16"))), "pair.kv_cache_dtype") is Verdict.FAIL


def test_mla_has_but_one_layout() -> None:
    other = view(D, setup(D, kv_layout="NHD"))
    assert verdict(facts(other, sizes=model("deepseek-v3")), "pair.kv_layout") is Verdict.PASS


@pytest.mark.parametrize(
    ("prefill", "decode", "name", "expected"),
    [
        (8, 8, "llama-3.1-70b", Verdict.PASS),
        (4, 8, "llama-3.1-70b", Verdict.PASS),
        (8, 4, "llama-3.1-70b", Verdict.PASS),
        (16, 8, "llama-3.1-70b", Verdict.FAIL),  # P holds each head twice, and D has fewer ranks
        (16, 8, "deepseek-v3", Verdict.PASS),  # MLA has no heads to hold
        (8, 16, "llama-3.1-70b", Verdict.PASS),
        (6, 4, "llama-3.1-70b", Verdict.FAIL),
    ],
)
def test_ranks(prefill: int, decode: int, name: str, expected: Verdict) -> None:
    whole = facts(view(P, setup(P, tp=prefill)), view(D, setup(D, tp=decode)), sizes=model(name))
    assert verdict(whole, "pair.tp") is expected


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ({}, {}, Verdict.PASS),
        ({"kv_role": "kv_both"}, {"kv_role": "kv_both"}, Verdict.PASS),
        ({"kv_role": "kv_consumer"}, {}, Verdict.FAIL),
        ({}, {"kv_role": "kv_producer"}, Verdict.FAIL),
        ({"connector": "NixlPullConnector"}, {}, Verdict.PASS),  # an alias
        ({"connector": "NixlPushConnector"}, {}, Verdict.FAIL),
        ({"connector": None}, {"connector": None}, Verdict.SKIP),
        ({"connector": None}, {}, Verdict.PASS),
    ],
)
def test_connectors_and_roles(prefill: dict[str, Any], decode: dict[str, Any], expected: Verdict) -> None:
    assert verdict(facts(view(P, setup(P, **prefill)), view(D, setup(D, **decode))), "pair.connector") is expected


def test_the_policy_of_failed_loads_is_told() -> None:
    recompute = found(facts(view(D, setup(D, failure_policy="recompute"))), "pair.connector")
    assert recompute is not None
    assert recompute.seen.endswith("a failed load is recomputed")


def test_one_name_of_the_model_must_be_served_by_both() -> None:
    whole = facts(view(P, live=live(models=("a", "b"))), view(D, live=live(models=("b",))))
    assert verdict(whole, "pair.served") is Verdict.PASS
    assert verdict(facts(view(P, live=live(models=("a",))), view(D, live=live())), "pair.served") is Verdict.FAIL
    assert found(facts(view(P, live=live(models=()))), "pair.served") is None


def test_nothing_is_said_of_a_pair_of_which_one_side_is_not_known() -> None:
    whole = facts()
    half = replace(whole, engines={D: whole.engine(D)})
    assert all(found(half, f"pair.{equal.name}") is None for equal in EQUAL)


# --- each engine alone ------------------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_answer_fails() -> None:
    dead = live(health=Answer(error="cannot connect: Connection refused"))
    finding = found(facts(view(P, url="http://10.0.0.7:8100", live=dead)), "engine.prefill")
    assert finding is not None
    assert (finding.verdict, finding.seen) == (Verdict.FAIL, "http://10.0.0.7:8100/health: cannot connect: Connection refused")
    assert verdict(facts(view(P, live=live(health=Answer(status=503)))), "engine.prefill") is Verdict.FAIL
    assert verdict(facts(view(P, live=live())), "engine.prefill") is Verdict.PASS
    assert found(facts(), "engine.prefill") is None


@pytest.mark.parametrize(
    ("told", "across", "within"),
    [
        ("localhost", Verdict.FAIL, Verdict.PASS),
        ("127.0.0.1", Verdict.FAIL, Verdict.PASS),
        (None, Verdict.FAIL, Verdict.PASS),  # vLLM's default
        ("0.0.0.0", Verdict.FAIL, Verdict.FAIL),
        ("10.0.0.7", Verdict.PASS, Verdict.PASS),
    ],
)
def test_the_host_that_peers_are_told(told: str | None, across: Verdict, within: Verdict) -> None:
    engine = view(P, setup(P, side_host=told))
    assert verdict(facts(engine), "engine.prefill.side_channel_host") is across
    assert verdict(same_host(engine), "engine.prefill.side_channel_host") is within


def test_what_is_set_where_the_engine_runs_is_not_called_unset() -> None:
    """Kubernetes fills the pod's address in (status.podIP), and whole maps of variables (envFrom)."""
    names = frozenset({"VLLM_NIXL_SIDE_CHANNEL_HOST", "HANDRAIL_SOCKET"})
    for elsewhere in (names, frozenset({ANY})):
        whole = facts(view(P, setup(P, side_host=None, env={}, elsewhere=elsewhere, plugins=None)))
        assert verdict(whole, "engine.prefill.side_channel_host") is Verdict.SKIP
        assert verdict(whole, "engine.prefill.plugin") is Verdict.SKIP
    said = facts(view(P, setup(P, elsewhere=frozenset({ANY}))))
    assert verdict(said, "engine.prefill.side_channel_host") is Verdict.PASS
    assert verdict(said, "engine.prefill.plugin") is Verdict.PASS


def test_the_host_is_not_judged_where_it_is_not_known_or_not_used() -> None:
    assert found(facts(view(P, setup(P, side_host=None, env=None))), "engine.prefill.side_channel_host") is None
    assert (
        found(facts(view(P, setup(P, side_host=None, connector="LMCacheConnectorV1"))), "engine.prefill.side_channel_host")
        is None
    )


class TestPlugin:
    def of(self, **more: Any) -> Facts:
        return facts(view(D, setup(D, **more)))

    @pytest.mark.parametrize("plugins", [("other",), ("",), ("Handrail",)])
    def test_a_list_without_us_fails(self, plugins: tuple[str, ...]) -> None:
        finding = found(self.of(plugins=plugins), "engine.decode.plugin")
        assert finding is not None
        assert finding.verdict is Verdict.FAIL
        assert "VLLM_PLUGINS" in finding.seen

    def test_a_list_with_us_passes(self) -> None:
        assert verdict(self.of(plugins=("other", "handrail")), "engine.decode.plugin") is Verdict.PASS

    def test_without_a_socket_it_is_inert(self) -> None:
        assert verdict(self.of(env={}), "engine.decode.plugin") is Verdict.WARN

    def test_an_environment_that_is_not_known(self) -> None:
        assert verdict(self.of(env=None), "engine.decode.plugin") is Verdict.SKIP

    def test_a_sidecar_that_listens_elsewhere_fails(self) -> None:
        sidecar = SidecarSetup(by="sidecar.yaml", role="decode", plugin_socket="/run/other.sock")
        finding = found(replace(self.of(), sidecars=(sidecar,)), "engine.decode.plugin")
        assert finding is not None
        assert finding.verdict is Verdict.FAIL
        assert "/run/handrail/engine.sock" in finding.seen
        assert "/run/other.sock" in finding.seen
        same = replace(sidecar, plugin_socket=SOCKET["HANDRAIL_SOCKET"])
        assert verdict(replace(self.of(), sidecars=(same,)), "engine.decode.plugin") is Verdict.PASS
        of_prefill = replace(sidecar, role="prefill")
        assert verdict(replace(self.of(), sidecars=(of_prefill,)), "engine.decode.plugin") is Verdict.PASS


@pytest.mark.parametrize(
    ("more", "engine", "expected"),
    [
        pytest.param({}, live(), Verdict.PASS, id="good"),
        pytest.param({"log_stats": False}, live(), Verdict.FAIL, id="statistics-off"),
        pytest.param({}, live(metrics=Answer(status=404)), Verdict.FAIL, id="no-page"),
        pytest.param({}, live(families=frozenset({"go_info"})), Verdict.WARN, id="another-page"),
        pytest.param({"middleware": ()}, live(), Verdict.WARN, id="no-middleware"),
        pytest.param({"middleware": None}, live(), Verdict.PASS, id="flags-not-known"),
        pytest.param(
            {}, live(health=Answer(error="dead"), metrics=Answer(error="dead")), Verdict.PASS, id="dead-says-engine.decode"
        ),
    ],
)
def test_telemetry(more: dict[str, Any], engine: Any, expected: Verdict) -> None:
    assert verdict(facts(view(D, setup(D, **more), live=engine)), "engine.decode.telemetry") is expected


def test_sources_that_disagree_are_named() -> None:
    page = Setup(by="http://d/metrics", block_size=32, kv_cache_dtype="fp8")
    finding = found(facts(view(D, page, setup(D))), "engine.decode.drift")
    assert finding is not None
    assert finding.verdict is Verdict.WARN
    assert "block_size is 32 by http://d/metrics and 16 by pair.yaml: decode" in finding.seen
    assert "kv_cache_dtype" not in finding.seen  # auto is whatever the engine made of it
    assert found(facts(), "engine.decode.drift") is None


def test_of_a_dead_engine_nothing_is_said_but_that_it_is_dead() -> None:
    dead = replace(view(D, setup(D)), setups=(), live=live(health=Answer(error="cannot connect")))
    whole = facts(dead)
    assert verdict(whole, "engine.decode") is Verdict.FAIL
    assert found(whole, "engine.decode.telemetry") is None
