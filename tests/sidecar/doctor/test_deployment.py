"""Read engines from the files and commands that start them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml  # type: ignore[import-untyped,unused-ignore]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles.doctor import pair_yaml
from handrail_doctor.facts import ALL_PLUGINS, ANY, PairSide
from handrail_doctor.gather.deployment import Started, engines_in

KUBERNETES = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat-prefill}
spec:
  template:
    metadata: {labels: {app: chat}}
    spec:
      containers:
        - name: server
          image: registry.local/vllm/vllm-openai:v0.32.0-cu129
          command: [/bin/sh, -c]
          args:
            - |
              set -e
              exec vllm serve /models/qwen \\
                --port 8100 --block-size=32 --tensor-parallel-size 4 --kv-cache-dtype fp8 --dtype bfloat16 \\
                --revision 0123abc --max-model-len 32768 --disable-hybrid-kv-cache-manager \\
                --otlp-traces-endpoint grpc://127.0.0.1:4327 --middleware a.B --middleware handrail.plugin.middleware.Handrail \\
                --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute",
                  "kv_connector_extra_config":{"kv_lease_duration":120,"backends":["UCX","GDS"]}}'
          env:
            - {name: VLLM_NIXL_SIDE_CHANNEL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
            - {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: "5601"}
            - {name: VLLM_PLUGINS, value: "lora,handrail"}
            - {name: UCX_NET_DEVICES, value: "mlx5_0:1"}
            - {name: CUDA_VISIBLE_DEVICES, value: $(GPUS)}
        - name: sidecar
          command: [handrail, sidecar, --role, prefill]
---
apiVersion: v1
kind: Service
metadata: {name: chat-prefill}
"""


def read(text: str) -> list[Started]:
    return engines_in(list(yaml.safe_load_all(text)), "pair.yaml")


def test_a_kubernetes_manifest() -> None:
    (engine,) = read(KUBERNETES)
    setup = engine.setup
    assert (engine.name, engine.side, engine.port, setup.by) == (
        "chat-prefill/server",
        PairSide.PREFILL,  # kv_both does not show the role, the name does
        8100,
        "pair.yaml: chat-prefill/server",
    )
    assert (setup.model, setup.revision, setup.dtype, setup.kv_cache_dtype) == ("/models/qwen", "0123abc", "bfloat16", "fp8")
    assert (setup.block_size, setup.tp, setup.max_model_len, setup.hybrid) == (32, 4, 32768, False)
    assert setup.connector is not None
    assert (setup.connector.name, setup.kv_role, setup.failure_policy, setup.lease_s) == (
        "NixlConnector",
        "kv_both",
        "recompute",
        120.0,
    )
    assert setup.backends == ("UCX", "GDS")
    assert setup.otlp_endpoint == "grpc://127.0.0.1:4327"
    assert setup.middleware == ("a.B", "handrail.plugin.middleware.Handrail")
    assert setup.version == "0.32.0-cu129"
    assert (setup.side_host, setup.side_port) == (None, 5601)  # its host is filled in later
    assert setup.plugins == ("lora", "handrail")
    assert setup.elsewhere == {"VLLM_NIXL_SIDE_CHANNEL_HOST", "CUDA_VISIBLE_DEVICES"}
    assert setup.env == {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5601", "VLLM_PLUGINS": "lora,handrail", "UCX_NET_DEVICES": "mlx5_0:1"}


def test_a_compose_file() -> None:
    prefill, decode = read(pair_yaml(decode_env={"VLLM_PLUGINS": ""}))
    assert [(each.name, each.side) for each in (prefill, decode)] == [("prefill", PairSide.PREFILL), ("decode", PairSide.DECODE)]
    assert (prefill.setup.model, prefill.setup.tp, prefill.setup.version) == ("Qwen/Qwen2.5-7B", 1, "0.32.0")
    assert prefill.setup.plugins == ALL_PLUGINS
    assert decode.setup.plugins == ("",)  # an empty value allows none


@pytest.mark.parametrize(
    ("command", "model"),
    [
        (["vllm", "serve", "a/b"], "a/b"),
        (["/opt/bin/vllm", "serve", "--port", "1", "a/b"], "a/b"),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "a/b"], "a/b"),
        ("vllm serve a/b --enforce-eager", "a/b"),
        (["bash", "-lc", "pip list; vllm serve a/b && echo done"], "a/b"),
        (["vllm", "serve", "$MODEL"], None),
        (["vllm", "serve", "{{ .Values.model }}"], None),
    ],
)
def test_the_ways_to_start_one(command: Any, model: str | None) -> None:
    (engine,) = engines_in([{"name": "decode", "command": command}], "f")
    assert (engine.setup.model, engine.side) == (model, PairSide.DECODE)


def test_what_starts_something_else_is_no_engine() -> None:
    assert read("services: {web: {command: nginx -g daemon}, tool: {command: [vllm, bench, serve]}}") == []
    assert read("just text") == []
    assert read("[1, [2, {a: null}]]") == []


def test_arguments_beside_an_entrypoint() -> None:
    text = "services: {decode: {entrypoint: [vllm, serve], command: [a/b, --port, '8200'], environment: [UCX_TLS=rc, X]}}"
    (engine,) = read(text)
    assert (engine.setup.model, engine.port, engine.setup.env) == ("a/b", 8200, {"UCX_TLS": "rc"})
    assert engine.setup.elsewhere == {"X"}


@pytest.mark.parametrize("key", ["envFrom", "env_file"])
def test_variables_from_elsewhere_may_have_any_name(key: str) -> None:
    (engine,) = engines_in([{"name": "decode", "command": ["vllm", "serve", "x"], key: ["some"]}], "f")
    assert engine.setup.elsewhere == {ANY}
    assert engine.setup.plugins is None  # VLLM_PLUGINS among them


def test_a_side_that_neither_role_nor_name_tells() -> None:
    (engine,) = engines_in([{"name": "server", "command": ["vllm", "serve", "x"]}], "f")
    assert engine.side is None
    (both,) = engines_in([{"name": "prefill-decode", "command": ["vllm", "serve", "x"]}], "f")
    assert both.side is None


@pytest.mark.parametrize(
    "transfer",
    ["{", "[]", '{"kv_role": 3, "kv_connector_extra_config": []}', '{"kv_connector_extra_config": {"kv_lease_duration": "x"}}'],
)
def test_a_transfer_config_that_is_none(transfer: str) -> None:
    (engine,) = engines_in([{"name": "decode", "command": ["vllm", "serve", "x", "--kv-transfer-config", transfer]}], "f")
    assert (engine.setup.connector, engine.setup.kv_role, engine.setup.lease_s) == (None, None, None)


_yaml = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["vllm serve x", "--port", "command", "env", "'", "a=b"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["command", "args", "env", "environment", "name", "services", "metadata", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_yaml)
def test_any_yaml_is_read(document: Any) -> None:
    for engine in engines_in([document], "f"):
        assert engine.setup.whole


def test_documents_that_nest_by_aliases_are_walked_once() -> None:
    itself: dict[str, Any] = {"name": "a"}
    itself["x"] = itself
    assert engines_in([itself], "f") == []
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert read(laughs) == []
    assert read(laughs + "b: {command: *a11, args: *a11, image: *a11, env: *a11}\n") == []


def test_what_services_of_a_compose_file_are_made_of_is_no_engine_itself() -> None:
    text = "x-vllm: &vllm {entrypoint: [vllm, serve]}\nservices: {decode: {<<: *vllm, command: [a/b, --port, '8200']}}"
    (engine,) = read(text)
    assert (engine.name, engine.setup.model, engine.port) == ("decode", "a/b", 8200)


def test_two_services_may_be_one_by_an_alias() -> None:
    text = "services:\n  decode-0: &one {command: vllm serve x}\n  decode-1: *one\n"
    assert [engine.name for engine in read(text)] == ["decode-0", "decode-1"]


@pytest.mark.parametrize(
    ("name", "role", "side"),
    [
        ("decode", "kv_producer", PairSide.DECODE),  # copied from prefill: the check of roles must see it
        ("vllm-prefill-0", "kv_consumer", PairSide.PREFILL),
        ("engine", "kv_consumer", PairSide.DECODE),
        ("decode-of-prefill", "kv_producer", PairSide.PREFILL),
        ("decode", "kv_both", PairSide.DECODE),
        ("engine", "kv_both", None),
    ],
)
def test_a_name_that_says_one_side_counts_before_the_role(name: str, role: str, side: PairSide | None) -> None:
    transfer = f'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}'
    (engine,) = read(f"services:\n  {name}:\n    command: [vllm, serve, x, --kv-transfer-config, '{transfer}']\n")
    assert engine.side is side
