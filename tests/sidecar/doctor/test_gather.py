"""Gather all facts: which source wins, where the engines run, what doctor tries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped,unused-ignore]

from builders.doctor_facts import CONFIGS, D, P, found, verdict
from doubles.doctor import NO_NVML, l40s, pair_yaml
from doubles.doctor_servers import listening, serving
from handrail_doctor.checks.all_checks import findings
from handrail_doctor.checks.result import CheckStatus
from handrail_doctor.facts import SIDES, DoctorOptions, Facts, GpusFacts, PairSide, Placement, Reach, SidecarSetup
from handrail_doctor.gather.deployment import Started, engines_in
from handrail_doctor.gather.gather import Wanted, gather
from handrail_doctor.kv_size.size import Serving


def started(**how: Any) -> tuple[Started, ...]:
    return tuple(engines_in(list(yaml.safe_load_all(pair_yaml(**how))), "pair.yaml"))


async def look(root: Path, environment: Mapping[str, str] | None = None, **wanted: Any) -> Facts:
    given: dict[str, Any] = {"options": DoctorOptions(tokens=8000), "root": root, "timeout_s": 10.0}
    return await gather(Wanted(**{**given, **wanted}), NO_NVML.reader(), environment or {})


async def test_nothing_at_all(tmp_path: Path) -> None:
    facts = await look(tmp_path)
    assert facts.placement is Placement.UNKNOWN
    assert facts.sizes is None
    assert facts.no_sizes == "no model config (--model)"
    assert facts.side_channels == ()
    assert facts.host.here == frozenset()


async def test_what_runs_wins_over_what_the_file_says(tmp_path: Path) -> None:
    page = b'vllm:cache_config_info{block_size="64",cache_dtype="fp8",engine="0"} 1.0\n'
    async with serving({"/health": "", "/metrics": page}) as url:
        given: dict[str, Any] = {"urls": {D: url}, "started": started(decode_flags="--block-size 32")}
        unknown = await look(tmp_path, **given)
        facts = await look(tmp_path, **given, model=CONFIGS / "qwen2.5-7b.json")
    engine = facts.engine(D)
    assert verdict(unknown, "engine.decode.drift") is CheckStatus.SKIP  # a model of several groups shows the smallest block
    assert (engine.value("group_block_size"), engine.value("kv_cache_dtype"), engine.value("tp")) == (64, "fp8", 1)
    assert verdict(facts, "engine.decode.drift") is CheckStatus.WARN


async def test_placement_is_known_from_the_addresses(tmp_path: Path) -> None:
    async with serving({"/health": ""}) as prefill, serving({"/health": ""}) as decode:
        here = await look(tmp_path, urls={P: prefill, D: decode})
        facts = await look(tmp_path, urls={P: prefill, D: decode}, placement=Placement.ACROSS_HOSTS, on=frozenset({D}))
    assert (here.placement, here.placement_by, here.host.here) == (Placement.SAME_HOST, "by their addresses", frozenset(SIDES))
    assert (facts.placement, facts.placement_by, facts.host.here) == (Placement.ACROSS_HOSTS, "--placement", frozenset({D}))


async def test_two_names_of_this_host_are_one_host_though_neither_engine_is_here(tmp_path: Path) -> None:
    async with serving({"/health": ""}) as url:
        named = url.replace("127.0.0.1", "localhost")
        facts = await look(tmp_path, urls={P: url, D: named}, on=frozenset())
    assert facts.placement is Placement.SAME_HOST


class Untouched:
    """GPUs that fail the test when they are read."""

    def read(self) -> GpusFacts:
        raise AssertionError("this host's GPUs were read")


@pytest.mark.parametrize(
    "wanted",
    [
        {"on": frozenset(), "placement": Placement.SAME_HOST},
        {"urls": {P: "http://192.0.2.1:1", D: "http://192.0.2.1:2"}, "timeout_s": 0.2},
    ],
    ids=["given", "by-address"],
)
async def test_the_gpus_of_a_host_that_runs_neither_engine_are_not_judged(tmp_path: Path, wanted: dict[str, Any]) -> None:
    facts = await gather(
        Wanted(**{"options": DoctorOptions(tokens=8000), "root": tmp_path, "timeout_s": 10.0, **wanted}), Untouched(), {}
    )
    judged = [each for each in findings(facts)["GPUs"] if each.verdict is not CheckStatus.SKIP]
    assert judged == []
    nvml = found(facts, "gpu.nvml")
    assert nvml is not None
    assert "neither engine runs here" in nvml.seen


async def test_a_side_channel_is_tried_by_the_surest_address(tmp_path: Path) -> None:
    async def greet(reader: Any, writer: Any) -> None:
        writer.write(b"\xff" + bytes(8) + b"\x7f")

    async with listening(greet) as port:
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        reported_facts = await look(tmp_path, started=started(prefill_env=env), on=frozenset(SIDES))
        elsewhere = await look(tmp_path, started=started(prefill_env=env), on=frozenset({D}))
        given = await look(tmp_path, side_channels={P: ("127.0.0.1", port)}, on=frozenset(SIDES))
    assert [(each.side, each.reach) for each in reported_facts.side_channels] == [(P, Reach.OPEN)]
    assert verdict(reported_facts, "path.prefill_side_channel") is CheckStatus.PASS
    finding = found(elsewhere, "path.prefill_side_channel")
    assert finding is not None
    assert (finding.verdict, finding.seen) == (
        CheckStatus.SKIP,
        f"127.0.0.1:{port} (pair.yaml: prefill) is an address of its own host",
    )
    assert given.side_channels[0].by == "--prefill-side-channel"


async def test_a_connector_without_a_side_channel_is_not_tried(tmp_path: Path) -> None:
    async with serving({"/health": ""}) as url:
        facts = await look(
            tmp_path,
            urls={D: url},
            started=started(
                decode_flags='--kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer"}\''
            ),
        )
    assert facts.side_channels == ()


async def test_the_environment_of_this_pod_fills_in_what_the_file_leaves_out(tmp_path: Path) -> None:
    text = pair_yaml(decode_env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "${POD_IP}"})
    engines = tuple(engines_in(list(yaml.safe_load_all(text)), "pair.yaml"))
    own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "1", "UCX_TLS": "rc", "HOME": "/root"}
    without = await look(tmp_path, own, started=engines, on=frozenset({D}))
    assert verdict(without, "engine.decode.side_channel_host") is CheckStatus.SKIP
    facts = await look(tmp_path, own, started=engines, on=frozenset({D}), own_environment=True)
    sourced_value = facts.engine(D).setting("side_host")
    assert sourced_value is not None
    assert (sourced_value.value, sourced_value.by) == ("127.0.0.1", "this environment")
    assert facts.engine(D).variable("HOME") is None
    assert not facts.engine(D).set_elsewhere("UCX_NET_DEVICES")
    assert facts.engine(P).variable("UCX_TLS") is None


async def test_the_size_is_of_the_model_as_it_is_served(tmp_path: Path) -> None:
    engines = started(
        tp=4, decode_flags="--kv-cache-dtype fp8 --block-size 32", prefill_flags="--kv-cache-dtype fp8 --block-size 32"
    )
    reported_facts = await look(tmp_path, model=CONFIGS / "qwen2.5-7b.json", started=engines)
    assert reported_facts.sizes is not None
    assert (reported_facts.sizes.serving.tp, reported_facts.sizes.serving.block_size, reported_facts.sizes.kv_dtype) == (
        4,
        32,
        "fp8",
    )
    facts = await look(tmp_path, model=CONFIGS / "qwen2.5-7b.json", started=engines, serving=Serving(tp=2, kv_dtype="bfloat16"))
    assert facts.sizes is not None
    assert (facts.sizes.serving.tp, facts.sizes.kv_dtype) == (2, "bfloat16")


async def test_a_model_that_lies_on_this_host_is_read_without_being_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CONFIGS / "qwen2.5-7b.json").read_bytes())
    facts = await look(tmp_path, started=started(model=str(tmp_path)))
    assert facts.sizes is not None
    absent = await look(tmp_path, started=started(model="Qwen/Qwen2.5-7B"))
    assert absent.sizes is None


async def test_a_model_that_cannot_be_served_so_is_a_reason(tmp_path: Path) -> None:
    facts = await look(tmp_path, model=CONFIGS / "qwen2.5-7b.json", started=started(tp=3))
    assert facts.sizes is None
    assert "4 KV heads do not divide among 3 ranks" in facts.no_sizes


async def test_every_otlp_endpoint_is_tried_once(tmp_path: Path) -> None:
    async with serving({"/v1/traces": b""}) as url:
        sidecar = SidecarSetup(by="sidecar.yaml", role="decode", collector=url)
        engines = started(decode_flags="--otlp-traces-endpoint grpc://127.0.0.1:1")
        facts = await look(tmp_path, otlp=(("--otlp", url),), sidecars=(sidecar,), started=engines, on=frozenset({P}))
    assert [(each.name, each.problem, each.why_not) for each in facts.otlp] == [
        ("--otlp", "", ""),
        ("the decode engine's exporter (pair.yaml: decode)", "", "it is an address of decode's own host"),
    ]


async def test_a_missing_collector_is_reported(tmp_path: Path) -> None:
    facts = await look(tmp_path, api="http://127.0.0.1:1")
    assert "no collector answers at http://127.0.0.1:1" in facts.no_clocks
    assert verdict(facts, "path.clock") is CheckStatus.SKIP


async def test_the_clock_of_an_engine_elsewhere_is_bounded_by_its_date(tmp_path: Path) -> None:
    async with serving({"/health": ""}) as url:
        facts = await look(tmp_path, urls={D: url}, on=frozenset({P}))
        near = await look(tmp_path, urls={D: url}, on=frozenset({D}))
    assert [(each.source, each.target, each.by) for each in facts.clocks] == [("this host", "decode's host", "its HTTP Date")]
    assert near.clocks == ()


@pytest.mark.parametrize("side", SIDES)
async def test_one_side_alone_is_looked_at(side: PairSide, tmp_path: Path) -> None:
    nvml = l40s(tmp_path)
    async with serving({"/health": ""}) as url:
        wanted = Wanted(options=DoctorOptions(tokens=1), urls={side: url}, root=tmp_path, timeout_s=10.0)
        facts = await gather(wanted, nvml.reader(), {})
    assert verdict(facts, f"engine.{side.value}") is CheckStatus.PASS
    assert len(facts.host.gpus.devices) == 2


async def test_a_port_that_nobody_named_is_vllms_default(tmp_path: Path) -> None:
    async with serving({"/health": ""}) as url:
        facts = await look(tmp_path, urls={P: url}, on=frozenset({D}))
    assert [(each.host, each.port, each.by) for each in facts.side_channels if each.side is P] == [
        ("127.0.0.1", 5600, "vLLM's default port")
    ]
