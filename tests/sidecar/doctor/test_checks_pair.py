"""Checks of what must be equal on P and D, and of each engine alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders.doctor_facts import SOCKET, D, P, facts, failures, found, live, model, nixl, same_host, setup, verdict, view
from handrail_doctor.checks.handshake import EQUAL
from handrail_doctor.checks.result import CheckStatus
from handrail_doctor.facts import ANY, Facts, HttpAnswer, Setup, SidecarSetup

OTHER: dict[str, dict[str, Any]] = {
    "version": {"version": "0.31.2"},
    "model": {"model": "/mnt/qwen"},
    "revision": {"revision": "def456"},
    "dtype": {"dtype": "float16"},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    "hf_overrides": {"hf_overrides": '{"num_hidden_layers": 2}'},
    "attention_backend": {"attention_backend": "FLASHINFER"},
    "hybrid": {"hybrid": False},
    "speculation": {"speculation": {"method": "eagle3", "model": "org/draft"}},
    "cross_layers": {"connector": nixl(extra={"enable_cross_layers_blocks": True})},
}
LOOSE = {"hf_overrides"}
"""A difference that NIXL refuses only where it changes heads or layers."""
OLD = {"cross_layers": "0.28.0"}
"""Settings that only older releases compare."""


def pair(name: str, **decode: Any) -> Facts:
    """Build a good pair of a release that compares the setting, with D changed."""
    common: dict[str, Any] = {"attention_backend": "FLASH_ATTN", "version": OLD.get(name, "0.32.0")}
    return facts(view(P, setup(P, **common)), view(D, setup(D, **{**common, **decode})))


def test_a_good_pair_fails_nothing_of_its_own() -> None:
    assert not {check for check in failures(facts()) if check.startswith(("pair.", "engine."))}


def test_every_row_has_a_case() -> None:
    assert set(OTHER) == {equal.name for equal in EQUAL}


@pytest.mark.parametrize("equal", EQUAL, ids=lambda equal: str(equal.name))
def test_a_difference_is_found_and_both_sides_named(equal: Any) -> None:
    finding = found(pair(equal.name, **OTHER[equal.name]), f"pair.{equal.name}")
    assert finding is not None
    assert finding.verdict is (CheckStatus.WARN if equal.name in LOOSE else CheckStatus.FAIL)
    assert finding.seen.startswith("P ")
    assert ", D " in finding.seen
    assert "decode)" in finding.seen or "settings)" in finding.seen
    assert finding.why
    assert finding.do
    assert verdict(pair(equal.name), f"pair.{equal.name}") is CheckStatus.PASS


@pytest.mark.parametrize("equal", EQUAL, ids=lambda equal: str(equal.name))
def test_what_neither_engine_says_is_not_judged(equal: Any) -> None:
    nothing = {"whole": False, "connector" if equal.name == "cross_layers" else equal.name: None}
    old = {"version": OLD[equal.name]} if equal.name in OLD else {}
    mute = [view(side, setup(side, **{**old, **nothing})) for side in (P, D)]
    expected = None if equal.name == "cross_layers" and not old else CheckStatus.SKIP
    assert verdict(facts(*mute), f"pair.{equal.name}") is expected
    half = facts(mute[0], view(D, setup(D, **old)))
    finding = found(half, f"pair.{equal.name}")
    assert finding is not None
    assert (finding.verdict, finding.seen.startswith("decode says ")) == (CheckStatus.SKIP, True)


def test_block_sizes_and_layouts_are_compared_apart() -> None:
    assert verdict(facts(view(D, setup(D, block_size=32))), "pair.block_size") is CheckStatus.WARN
    assert verdict(facts(view(D, setup(D, kv_layout="NHD"))), "pair.kv_layout") is CheckStatus.FAIL
    for name in ("block_size", "kv_layout"):
        mute = [view(side, setup(side, whole=False, **{name: None})) for side in (P, D)]
        assert verdict(facts(), f"pair.{name}") is CheckStatus.PASS
        assert verdict(facts(*mute), f"pair.{name}") is CheckStatus.SKIP
        half = found(facts(mute[0]), f"pair.{name}")
        assert half is not None
        assert (half.verdict, half.seen.startswith("decode says ")) == (CheckStatus.SKIP, True)


def test_what_a_command_line_leaves_out_is_the_default() -> None:
    both = facts(view(P, setup(P, revision=None)), view(D, setup(D, revision=None)))
    assert verdict(both, "pair.revision") is CheckStatus.PASS
    one = facts(view(P, setup(P, revision=None)))
    finding = found(one, "pair.revision")
    assert finding is not None
    assert finding.verdict is CheckStatus.FAIL
    assert "the default" in finding.seen


def test_no_model_is_a_default_so_an_unnamed_one_is_not_judged() -> None:
    """The Compose file names the model by a variable whose value is elsewhere."""
    assert verdict(facts(view(P, setup(P, model=None)), view(D, setup(D, model=None))), "pair.model") is CheckStatus.SKIP


def test_a_dtype_of_auto_is_the_models() -> None:
    one = view(P, setup(P, dtype="auto"))
    assert verdict(facts(one), "pair.dtype") is CheckStatus.PASS
    assert verdict(facts(one, view(D, setup(D, dtype="float16"))), "pair.dtype") is CheckStatus.FAIL
    assert verdict(facts(one, sizes=None), "pair.dtype") is CheckStatus.SKIP


def test_a_kv_dtype_of_auto_is_compared_as_it_is_written() -> None:
    """vLLM's handshake compares it as written, too."""
    assert verdict(facts(view(P, setup(P, kv_cache_dtype="bfloat16"))), "pair.kv_cache_dtype") is CheckStatus.FAIL


def test_mla_has_but_one_layout() -> None:
    other = view(D, setup(D, kv_layout="NHD"))
    assert verdict(facts(other, sizes=model("deepseek-v3")), "pair.kv_layout") is CheckStatus.PASS


@pytest.mark.parametrize(
    ("prefill", "decode", "name", "expected"),
    [
        (8, 8, "llama-3.1-70b", CheckStatus.PASS),
        (4, 8, "llama-3.1-70b", CheckStatus.PASS),
        (8, 4, "llama-3.1-70b", CheckStatus.PASS),
        (16, 8, "llama-3.1-70b", CheckStatus.FAIL),  # P holds each head twice, and D has fewer ranks
        (16, 8, "deepseek-v3", CheckStatus.PASS),  # MLA has no heads to hold
        (8, 16, "llama-3.1-70b", CheckStatus.PASS),
        (6, 4, "llama-3.1-70b", CheckStatus.FAIL),
    ],
)
def test_ranks(prefill: int, decode: int, name: str, expected: CheckStatus) -> None:
    whole = facts(view(P, setup(P, tp=prefill)), view(D, setup(D, tp=decode)), sizes=model(name))
    assert verdict(whole, "pair.tp") is expected


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ({}, {}, CheckStatus.PASS),
        ({"kv_role": "kv_both"}, {"kv_role": "kv_both"}, CheckStatus.PASS),
        ({"kv_role": "kv_consumer"}, {}, CheckStatus.FAIL),
        ({}, {"kv_role": "kv_producer"}, CheckStatus.FAIL),
        ({"connector": "NixlPullConnector"}, {}, CheckStatus.PASS),  # an alias
        ({"connector": "NixlPushConnector"}, {}, CheckStatus.FAIL),
        ({"connector": None}, {"connector": None}, CheckStatus.SKIP),
        ({"connector": None}, {}, CheckStatus.SKIP),
    ],
)
def test_connectors_and_roles(prefill: dict[str, Any], decode: dict[str, Any], expected: CheckStatus) -> None:
    assert verdict(facts(view(P, setup(P, **prefill)), view(D, setup(D, **decode))), "pair.connector") is expected


def test_the_policy_of_failed_loads_is_reported() -> None:
    recompute = found(facts(view(D, setup(D, failure_policy="recompute"))), "pair.connector")
    assert recompute is not None
    assert recompute.seen.endswith("a failed load is recomputed")


def test_one_name_of_the_model_must_be_served_by_both() -> None:
    whole = facts(view(P, live=live(models=("a", "b"))), view(D, live=live(models=("b",))))
    assert verdict(whole, "pair.served") is CheckStatus.PASS
    assert verdict(facts(view(P, live=live(models=("a",))), view(D, live=live())), "pair.served") is CheckStatus.FAIL
    assert found(facts(view(P, live=live(models=()))), "pair.served") is None


def test_a_pair_with_an_unknown_side_is_not_reported() -> None:
    whole = facts()
    half = replace(whole, engines={D: whole.engine(D)})
    assert all(found(half, f"pair.{equal.name}") is None for equal in EQUAL)


# --- each engine alone ------------------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_answer_fails() -> None:
    dead = live(health=HttpAnswer(error="cannot connect: Connection refused"))
    finding = found(facts(view(P, url="http://10.0.0.7:8100", live=dead)), "engine.prefill")
    assert finding is not None
    assert (finding.verdict, finding.seen) == (
        CheckStatus.FAIL,
        "http://10.0.0.7:8100/health: cannot connect: Connection refused",
    )
    assert verdict(facts(view(P, live=live(health=HttpAnswer(status=503)))), "engine.prefill") is CheckStatus.FAIL
    assert verdict(facts(view(P, live=live())), "engine.prefill") is CheckStatus.PASS
    assert found(facts(), "engine.prefill") is None


@pytest.mark.parametrize(
    ("output", "across", "within"),
    [
        ("localhost", CheckStatus.FAIL, CheckStatus.PASS),
        ("127.0.0.1", CheckStatus.FAIL, CheckStatus.PASS),
        (None, CheckStatus.FAIL, CheckStatus.PASS),  # vLLM's default
        ("0.0.0.0", CheckStatus.FAIL, CheckStatus.FAIL),
        ("10.0.0.7", CheckStatus.PASS, CheckStatus.PASS),
    ],
)
def test_the_side_channel_host_must_be_reachable_for_peers(output: str | None, across: CheckStatus, within: CheckStatus) -> None:
    engine = view(P, setup(P, side_host=output))
    assert verdict(facts(engine), "engine.prefill.side_channel_host") is across
    assert verdict(same_host(engine), "engine.prefill.side_channel_host") is within


def test_what_is_set_where_the_engine_runs_is_not_called_unset() -> None:
    """Values that are set only where the engine runs count as set.

    Kubernetes fills in the pod's address (status.podIP) and whole maps of variables (envFrom).
    """
    names = frozenset({"VLLM_NIXL_SIDE_CHANNEL_HOST", "HANDRAIL_SOCKET"})
    for elsewhere in (names, frozenset({ANY})):
        whole = facts(view(P, setup(P, side_host=None, env={}, elsewhere=elsewhere, plugins=None)))
        assert verdict(whole, "engine.prefill.side_channel_host") is CheckStatus.SKIP
        assert verdict(whole, "engine.prefill.plugin") is CheckStatus.SKIP
    reported_facts = facts(view(P, setup(P, elsewhere=frozenset({ANY}))))
    assert verdict(reported_facts, "engine.prefill.side_channel_host") is CheckStatus.PASS
    assert verdict(reported_facts, "engine.prefill.plugin") is CheckStatus.PASS


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
        assert finding.verdict is CheckStatus.FAIL
        assert "VLLM_PLUGINS" in finding.seen

    def test_a_list_with_us_passes(self) -> None:
        assert verdict(self.of(plugins=("other", "handrail")), "engine.decode.plugin") is CheckStatus.PASS

    def test_without_a_socket_it_is_inert(self) -> None:
        assert verdict(self.of(env={}), "engine.decode.plugin") is CheckStatus.WARN

    def test_an_environment_that_is_not_known(self) -> None:
        assert verdict(self.of(env=None), "engine.decode.plugin") is CheckStatus.SKIP

    def test_a_sidecar_that_listens_elsewhere_fails(self) -> None:
        sidecar = SidecarSetup(by="sidecar.yaml", role="decode", plugin_socket="/run/other.sock")
        finding = found(replace(self.of(), sidecars=(sidecar,)), "engine.decode.plugin")
        assert finding is not None
        assert finding.verdict is CheckStatus.FAIL
        assert "/run/handrail/engine.sock" in finding.seen
        assert "/run/other.sock" in finding.seen
        same = replace(sidecar, plugin_socket=SOCKET["HANDRAIL_SOCKET"])
        assert verdict(replace(self.of(), sidecars=(same,)), "engine.decode.plugin") is CheckStatus.PASS
        of_prefill = replace(sidecar, role="prefill")
        assert verdict(replace(self.of(), sidecars=(of_prefill,)), "engine.decode.plugin") is CheckStatus.PASS


@pytest.mark.parametrize(
    ("more", "engine", "expected"),
    [
        pytest.param({}, live(), CheckStatus.PASS, id="good"),
        pytest.param({"log_stats": False}, live(), CheckStatus.FAIL, id="statistics-off"),
        pytest.param({}, live(metrics=HttpAnswer(status=404)), CheckStatus.FAIL, id="no-page"),
        pytest.param({}, live(families=frozenset({"go_info"})), CheckStatus.WARN, id="another-page"),
        pytest.param({"middleware": ()}, live(), CheckStatus.WARN, id="no-middleware"),
        pytest.param({"middleware": None}, live(), CheckStatus.PASS, id="flags-not-known"),
        pytest.param(
            {},
            live(health=HttpAnswer(error="dead"), metrics=HttpAnswer(error="dead")),
            CheckStatus.PASS,
            id="dead-says-engine.decode",
        ),
    ],
)
def test_telemetry(more: dict[str, Any], engine: Any, expected: CheckStatus) -> None:
    assert verdict(facts(view(D, setup(D, **more), live=engine)), "engine.decode.telemetry") is expected


def test_sources_that_disagree_are_named() -> None:
    page = Setup(by="http://d/metrics", group_block_size=32, kv_cache_dtype="fp8")
    finding = found(facts(view(D, page, setup(D))), "engine.decode.drift")
    assert finding is not None
    assert finding.verdict is CheckStatus.WARN
    assert "block_size is 32 by http://d/metrics and 16 by pair.yaml: decode" in finding.seen
    assert "kv_cache_dtype" not in finding.seen  # auto is what the engine made of it
    assert found(facts(), "engine.decode.drift") is None


def test_a_dead_engine_is_reported_as_dead_and_nothing_else() -> None:
    dead = replace(view(D, setup(D)), setups=(), live=live(health=HttpAnswer(error="cannot connect")))
    whole = facts(dead)
    assert verdict(whole, "engine.decode") is CheckStatus.FAIL
    assert found(whole, "engine.decode.telemetry") is None
