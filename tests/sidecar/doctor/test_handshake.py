"""What NIXL's handshake compares, by release, and pairs whose connectors, backends and transports match or do not."""

from __future__ import annotations

from typing import Any

import pytest

from builders.doctor_facts import D, P, facts, found, host, model, nixl, port, same_host, setup, verdict, view
from handrail_doctor.checks.result import CheckStatus
from handrail_doctor.connectors import Connector, connector_of
from handrail_doctor.facts import Facts, PairSide, Setup
from handrail_doctor.gather.deployment import engines_in
from handrail_doctor.nixl_handshake import HASHED, NEWEST, factor, release_of

PASS, WARN, FAIL, SKIP = CheckStatus.PASS, CheckStatus.WARN, CheckStatus.FAIL, CheckStatus.SKIP
NIXL = {"kv_connector": "NixlConnector"}
PUSH = {"kv_connector": "NixlPushConnector"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1"}
OFFLOAD = {"kv_connector": "OffloadingConnector"}


def wrapped(*children: dict[str, Any], name: str = "MultiConnector", **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_extra_config": {"connectors": list(children)}, **more}


def made(transfer: dict[str, Any]) -> Connector:
    connector = connector_of(transfer)
    assert connector is not None
    return connector


def pair(prefill: dict[str, Any], decode: dict[str, Any], **more: Any) -> Facts:
    return facts(view(P, setup(P, **prefill)), view(D, setup(D, **decode)), **more)


# --- the table --------------------------------------------------------------------------------------------------------------


def test_a_factor_counts_from_its_release_on() -> None:
    assert [factor("hybrid", each) is not None for each in ((0, 13), (0, 17), (0, 18), NEWEST)] == [False, False, True, True]
    assert [factor("cross_layers", each) is not None for each in ((0, 15), (0, 16), (0, 28), (0, 29))] == [
        False,
        True,
        True,
        False,
    ]
    assert [factor("speculation", each) is not None for each in ((0, 27), (0, 28))] == [False, True]
    assert all(each.source for each in HASHED.values())
    assert [release_of(text) for text in ("0.32.0+cu129", "v0.9.1", "nightly", "", None)] == [(0, 32), (0, 9), None, None, None]


@pytest.mark.parametrize(
    ("version", "changed", "check", "expected"),
    [
        ("0.17.1", {"hybrid": False}, "pair.hybrid", WARN),
        ("0.18.0", {"hybrid": False}, "pair.hybrid", FAIL),
        ("nightly", {"hybrid": False}, "pair.hybrid", FAIL),  # the newest rules, where the release is not known
        ("0.27.0", {"speculation": {"method": "eagle3"}}, "pair.speculation", FAIL),  # not compared, and D crashes
        ("0.32.0", {"speculation": {"method": "eagle3"}}, "pair.speculation", FAIL),
        ("0.32.0", {"speculation": {"model": "org/tiny"}}, "pair.speculation", WARN),  # a draft model: not in the hash
        ("0.32.0", {"speculation": {"method": "suffix"}}, "pair.speculation", PASS),
        ("0.32.0", {"speculation": {"method": "ngram", "num_speculative_tokens": 4}}, "pair.speculation", PASS),
        ("0.12.0", {"dtype": "float16"}, "pair.dtype", FAIL),
        ("0.12.0", {"attention_backend": "X"}, "pair.attention_backend", WARN),
        ("0.32.0", {"connector": nixl(kv_buffer_device="cpu")}, "pair.buffer_device", None),
        ("0.29.0", {"connector": nixl(kv_buffer_device="cpu")}, "pair.buffer_device", FAIL),
        ("0.32.0", {"connector": nixl(kv_buffer_device="cpu"), "block_size": 32}, "pair.block_size", FAIL),
        ("0.13.0", {"tp": 1}, "pair.tp", FAIL),
        ("0.14.0", {"tp": 1}, "pair.tp", PASS),
    ],
)
def test_rules_follow_the_release(version: str, changed: dict[str, Any], check: str, expected: CheckStatus | None) -> None:
    common = {"version": version, "tp": 2, "attention_backend": "FLASH_ATTN"}
    assert verdict(pair(common, {**common, **changed}), check) is expected


def test_a_handshake_that_does_not_enforce_refuses_nothing() -> None:
    open_ = nixl(extra={"enforce_handshake_compat": False})
    assert verdict(pair({}, {"version": "0.31.0"}), "pair.version") is FAIL
    assert verdict(pair({}, {"version": "0.31.0", "connector": open_}), "pair.version") is WARN
    assert verdict(pair({"connector": open_}, {"version": "0.31.0"}), "pair.version") is FAIL  # D asks, not P


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "expected"),
    [
        ("dtype", {"dtype": "half"}, {"dtype": "float16"}, PASS),
        ("dtype", {"dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}, PASS),
        ("kv_layout", {"kv_layout": None}, {"kv_layout": "HND"}, PASS),  # NIXL asks for it
        ("kv_layout", {"kv_layout": "HND"}, {"kv_layout": "LBHNC"}, PASS),  # its newer name
        ("kv_layout", {"kv_layout": "HND"}, {"kv_layout": "NHD", "connector": nixl(enable_permute_local_kv=True)}, PASS),
        ("version", {"version": "0.32.0"}, {"version": "0.32.0-cu129"}, WARN),
        ("version", {"version": "0.32.0"}, {"version": "0.32.1"}, FAIL),
        ("attention_backend", {"attention_backend": "FLASH_ATTN"}, {}, SKIP),  # the other may choose the same
        ("attention_backend", {}, {}, PASS),
        ("speculation", {"speculation": {"method": "mtp"}}, {"speculation": {"method": "deepseek_mtp"}}, PASS),
        (
            "speculation",
            {"speculation": {"method": "eagle3", "model": "a", "num_speculative_tokens": 2}},
            {"speculation": {"method": "eagle3", "model": "a", "num_speculative_tokens": 5}},
            PASS,
        ),
        (
            "speculation",
            {"speculation": {"method": "eagle3", "model": "a"}},
            {"speculation": {"method": "eagle3", "model": "b"}},
            FAIL,
        ),
        ("block_size", {"block_size": None}, {"block_size": 16}, SKIP),
        ("block_size", {"group_block_size": 4}, {"group_block_size": 4}, PASS),
        ("block_size", {"group_block_size": 4}, {"group_block_size": 8}, WARN),
        ("dcp", {"dcp": 2}, {"dcp": 4}, PASS),
        ("dcp", {"dcp": 2}, {"dcp": 3}, FAIL),
    ],
)
def test_a_pair_that_works_is_not_failed(
    name: str, prefill: dict[str, Any], decode: dict[str, Any], expected: CheckStatus
) -> None:
    assert verdict(pair(prefill, decode), f"pair.{name}") is expected


def test_a_kv_dtype_that_one_engine_has_resolved_is_not_held_against_a_flag() -> None:
    page = Setup(by="http://p/metrics", kv_cache_dtype="fp8_ds_mla")
    whole = facts(view(P, page, setup(P, kv_cache_dtype="fp8")), view(D, setup(D, kv_cache_dtype="fp8")))
    assert verdict(whole, "pair.kv_cache_dtype") is SKIP


# --- connectors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (NIXL, NIXL, PASS),
        (wrapped(NIXL, LMCACHE), NIXL, PASS),
        (NIXL, wrapped(OFFLOAD, NIXL), PASS),
        (wrapped(wrapped(NIXL)), NIXL, PASS),
        (wrapped({"kv_connector": "DynamoConnector"}, NIXL, name="PdConnector", kv_connector_module_path="kvbm.x"), NIXL, PASS),
        (wrapped(NIXL, name="TheirWrapper", kv_connector_module_path="their.wrapper"), NIXL, PASS),
        (NIXL, PUSH, FAIL),
        (wrapped(PUSH), NIXL, FAIL),
        (NIXL, {"kv_connector": "MooncakeConnector"}, FAIL),
        (wrapped(LMCACHE), NIXL, FAIL),
        (LMCACHE, LMCACHE, SKIP),  # LMCache's own configuration says how
        ({"kv_connector": "TheirConnector", "kv_connector_module_path": "their.c"}, NIXL, SKIP),
        ({"kv_connector": "TheirConnector"}, {"kv_connector": "TheirConnector"}, SKIP),
        ({"kv_connector": "NixlConnector", "kv_connector_module_path": "their.nixl"}, NIXL, SKIP),  # another class of that name
        (wrapped(name="MultiConnector"), NIXL, SKIP),  # what it wraps is not told
    ],
)
def test_a_wrapper_counts_as_what_it_wraps(prefill: dict[str, Any], decode: dict[str, Any], expected: CheckStatus) -> None:
    whole = pair({"connector": made(prefill)}, {"connector": made(decode)})
    finding = found(whole, "pair.connector")
    assert finding is not None
    assert finding.verdict is expected
    assert all(transfer["kv_connector"] in finding.seen for transfer in (prefill, decode))


@pytest.mark.parametrize(
    ("transfer", "release", "expected"),
    [
        (NIXL, (0, 32), True),
        (NIXL, (0, 21), False),  # any connector switched it off
        (LMCACHE, (0, 32), False),
        (wrapped(NIXL, OFFLOAD), (0, 32), True),
        (wrapped(NIXL, LMCACHE), (0, 32), False),
        (wrapped(NIXL, {"kv_connector": "ExampleConnector"}), (0, 32), False),
        (wrapped(NIXL, {"kv_connector": "LMCacheMPConnector"}), (0, 32), None),
        (wrapped(LMCACHE, {"kv_connector": "LMCacheMPConnector"}), (0, 32), False),
        ({"kv_connector": "TheirConnector"}, (0, 32), None),
        (wrapped(NIXL, name="TheirWrapper"), (0, 32), None),
        ({"kv_connector": "MoRIIOConnector"}, (0, 29), False),
        ({"kv_connector": "MoRIIOConnector"}, (0, 30), True),
    ],
)
def test_the_connector_decides_on_the_hybrid_manager(
    transfer: dict[str, Any], release: tuple[int, int], expected: bool | None
) -> None:
    on, reason = made(transfer).hybrid(release)
    assert on is expected
    assert reason


@pytest.mark.parametrize("name", ["attention_backend", "hybrid", "dtype"])
def test_what_another_connector_compares_is_not_claimed(name: str) -> None:
    other = {"attention_backend": "B", "hybrid": False, "dtype": "float16"}[name]
    mooncake = {"connector": Connector(name="MooncakeConnector"), "attention_backend": "A"}
    assert verdict(pair(mooncake, {**mooncake, name: other}), f"pair.{name}") is WARN


def test_unknown_wrappers_side_channel_is_a_skip() -> None:
    whole = pair({"connector": made({"kv_connector": "TheirConnector"}), "side_host": "127.0.0.1"}, {})
    assert verdict(whole, "engine.prefill.side_channel_host") is SKIP


# --- backends and transports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (None, None, PASS),
        (("UCX", "GDS"), None, PASS),
        (("LIBFABRIC",), ("LIBFABRIC",), PASS),
        (("LIBFABRIC",), None, FAIL),
        (("LIBFABRIC", "UCX"), ("UCX",), PASS),
        (("GDS",), ("GDS",), FAIL),  # storage leads to no engine
    ],
)
def test_backends_of_both_sides_must_meet(prefill: Any, decode: Any, expected: CheckStatus) -> None:
    assert verdict(pair({"backends": prefill}, {"backends": decode}), "pair.backends") is expected


@pytest.mark.parametrize(
    ("prefill", "decode", "across", "within"),
    [
        ({}, {}, PASS, PASS),
        ({"UCX_TLS": "rc,cuda_copy"}, {"UCX_TLS": "tcp,cuda_copy"}, FAIL, FAIL),
        ({"UCX_TLS": "rc,cuda_copy"}, {}, PASS, PASS),
        ({"UCX_TLS": "tcp,cuda_copy"}, {}, WARN, PASS),
        ({"UCX_TLS": "srd,cuda_copy"}, {"UCX_TLS": "rc,cuda_copy"}, FAIL, FAIL),
        ({"UCX_TLS": "srd,cuda_copy"}, {}, PASS, PASS),
        ({"UCX_TLS": "sm,cuda_copy"}, {"UCX_TLS": "sm,cuda_copy"}, FAIL, PASS),
        ({"UCX_TLS": "cuda_ipc,cuda_copy,tcp"}, {"UCX_TLS": "cuda_ipc,cuda_copy,rc"}, WARN, PASS),
        ({"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "eth0"}, {"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "mlx5_0:1"}, FAIL, FAIL),
        ({"UCX_NET_DEVICES": "mlx5_0:1,eth0"}, {"UCX_NET_DEVICES": "mlx5_0:1"}, PASS, PASS),
        ({"UCX_TLS": "^ib"}, {"UCX_TLS": "^tcp"}, WARN, PASS),
    ],
)
def test_transports_of_both_sides_must_meet(
    prefill: dict[str, str], decode: dict[str, str], across: CheckStatus, within: CheckStatus
) -> None:
    sides = view(P, setup(P, env=prefill)), view(D, setup(D, env=decode))
    assert verdict(facts(*sides), "pair.transports") is across
    assert verdict(same_host(*sides), "pair.transports") is within


def test_ucx_is_not_checked_where_libfabric_carries_the_kv() -> None:
    env = {"UCX_TLS": "self", "UCX_NET_DEVICES": "gone0"}
    both = {"backends": ("LIBFABRIC",), "env": env}
    whole = pair(both, both, host=host(rdma=(port(),)))
    assert verdict(whole, "wire.ucx_devices") is SKIP
    assert found(whole, "wire.ucx_tls") is None
    assert found(whole, "pair.transports") is None


@pytest.mark.parametrize(("tls", "expected"), [("rc,cuda_copy", FAIL), ("srd,cuda_copy", PASS), ("all", PASS)])
def test_efa_carries_srd_alone(tls: str, expected: CheckStatus) -> None:
    adapter = port("rdmap0s6", link_layer="Unknown")
    env = {"env": {"UCX_TLS": tls}}
    whole = pair(env, env, host=host(rdma=(adapter,), modules=frozenset({"efa", "efa_nv_peermem"})))
    assert verdict(whole, "wire.ucx_tls") is expected


# --- command lines ----------------------------------------------------------------------------------------------------------


def read(*words: str, side: PairSide = D) -> Setup:
    (engine,) = engines_in([{"name": side.value, "command": ["vllm", "serve", "m", *words]}], "f")
    return engine.setup


def test_the_ways_to_write_a_setting() -> None:
    assert (read("-tp", "8").tp, read("--enforce-eager", "-tp", "8").tp, read("-dcp", "2").dcp) == (8, 8, 2)
    assert read("-ac", '{"backend": "flashinfer"}').attention_backend == "FLASHINFER"
    assert read("--attention-config.backend", "FLASH_ATTN").attention_backend == "FLASH_ATTN"
    assert read("--attention-backend", "auto").attention_backend is None
    assert read("-sc", '{"method": "mtp"}').speculation == {"method": "mtp"}
    assert read("--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "2").speculation == {
        "method": "mtp",
        "num_speculative_tokens": 2,
    }
    assert read("--spec-method", "eagle3", "--spec-model", "x").speculation == {"method": "eagle3", "model": "x"}
    connector = read("--kv-transfer-config.kv_connector", "NixlConnector", "--kv-transfer-config.kv_role", "kv_both").connector
    assert connector is not None
    assert connector.name == "NixlConnector"


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        ((), True),
        (("--config", "engine.yaml"), False),
        (("$EXTRA_ARGS",), False),
        (("--port", "$PORT"), True),
    ],
)
def test_a_command_line_with_a_hidden_part_has_no_defaults(words: tuple[str, ...], whole: bool) -> None:
    assert read(*words).whole is whole


def test_settings_of_nixl_are_read_where_a_wrapper_has_them() -> None:
    extra = '{"backends":["LIBFABRIC"],"kv_lease_duration":60}'
    child = f'{{"kv_connector":"NixlConnector","kv_connector_extra_config":{extra}}}'
    text = f'{{"kv_connector":"MultiConnector","kv_connector_extra_config":{{"connectors":[{child}]}}}}'
    found_setup = read("--kv-transfer-config", text)
    assert (found_setup.backends, found_setup.lease_s) == (("LIBFABRIC",), 60.0)


def test_block_sizes_of_several_kinds_of_layers() -> None:
    gemma = {"sizes": model("gemma-3-27b")}
    assert verdict(pair({"version": "0.27.0"}, {"version": "0.27.0", "block_size": 32}, **gemma), "pair.block_size") is FAIL
    assert verdict(pair({}, {"block_size": 32}, **gemma), "pair.block_size") is WARN
