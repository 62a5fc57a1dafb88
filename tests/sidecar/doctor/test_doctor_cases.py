"""Reported pairs, read as the doctor reads them: P02, P04, P09, P24 and P29 of the second case book."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped,unused-ignore]

from builders.doctor_facts import D, P, facts, failures, found, verdict
from doubles.doctor_servers import serving
from handrail_doctor.checks.all_checks import OWN_GROUP, counts, findings, own_counts
from handrail_doctor.checks.result import CheckStatus
from handrail_doctor.facts import EngineView, Facts, PairSide, Placement
from handrail_doctor.gather.deployment import engines_in
from handrail_doctor.gather.engines import ask_engine
from handrail_doctor.kv_size.keys import ModelConfigError
from handrail_doctor.kv_size.read import read_model

DATA = Path(__file__).parents[2] / "data/second"
PASS, WARN, FAIL, SKIP = CheckStatus.PASS, CheckStatus.WARN, CheckStatus.FAIL, CheckStatus.SKIP


def started(name: str) -> dict[PairSide, EngineView]:
    documents = list(yaml.safe_load_all((DATA / name).read_text("utf-8")))
    engines = engines_in(documents, name)
    return {side: EngineView(side=side, setups=tuple(each.setup for each in engines if each.side is side)) for side in (P, D)}


def read(name: str, placement: Placement = Placement.ACROSS_HOSTS, **more: Any) -> Facts:
    return facts(*started(name).values(), placement=placement, sizes=None, **more)


def seen(whole: Facts, check: str) -> str:
    finding = found(whole, check)
    assert finding is not None
    return finding.seen


def of_the_pair(whole: Facts) -> set[str]:
    return {check for check in failures(whole) if check.startswith(("pair.", "engine."))}


def test_P02_an_address_that_means_the_peers_own_host() -> None:
    across = read("P02/pair.yaml")
    hosts = {"engine.prefill.side_channel_host", "engine.decode.side_channel_host"}
    assert of_the_pair(across) == hosts
    for check in hosts:
        finding = found(across, check)
        assert finding is not None
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in finding.do
    assert of_the_pair(read("P02/pair.yaml", Placement.SAME_HOST)) == set()
    unplaced = read("P02/pair.yaml", Placement.UNKNOWN)
    assert {verdict(unplaced, check) for check in hosts} == {SKIP}  # neither right nor wrong without a placement


def test_P04_a_wrapper_that_switches_the_hybrid_manager_off_on_one_side() -> None:
    before, after = read("P04/pair_before.yaml"), read("P04/pair_after.yaml")
    assert of_the_pair(before) == {"pair.hybrid"}
    assert seen(before, "pair.hybrid").startswith("P off (DynamoConnector does not support it")
    assert ", D on (" in seen(before, "pair.hybrid")
    assert of_the_pair(after) == set()
    assert verdict(after, "pair.connector") is PASS  # PdConnector counts as what it wraps
    assert "PdConnector [DynamoConnector, NixlConnector]" in seen(after, "pair.connector")


@pytest.mark.parametrize(
    ("file", "placement", "failing"),
    [
        ("pair", Placement.SAME_HOST, set()),
        ("pair", Placement.ACROSS_HOSTS, {"engine.prefill.side_channel_host", "engine.decode.side_channel_host"}),
        ("pair_host_unset", Placement.ACROSS_HOSTS, {"engine.prefill.side_channel_host", "engine.decode.side_channel_host"}),
        ("pair_host_unset", Placement.SAME_HOST, set()),
        ("pair_multi_vs_plain", Placement.SAME_HOST, set()),
    ],
)
def test_P24_nixl_inside_a_multi_connector_is_checked_as_nixl(file: str, placement: Placement, failing: set[str]) -> None:
    whole = read(f"P24/{file}.yaml", placement)
    assert of_the_pair(whole) == failing
    assert verdict(whole, "pair.connector") is PASS
    assert verdict(whole, "pair.hybrid") is SKIP  # LMCacheMPConnector's class comes from the LMCache that is installed
    assert "LMCache" in seen(whole, "pair.hybrid")


def test_P29_speculation_and_attention_backend_are_in_the_hash() -> None:
    draft, attention = read("P29/pair.yaml"), read("P29/pair_attn.yaml")
    assert of_the_pair(draft) == {"pair.speculation"}
    assert seen(draft, "pair.speculation").startswith("P none (")
    assert "D eagle3" in seen(draft, "pair.speculation")
    assert of_the_pair(attention) == {"pair.attention_backend"}
    text = (
        (DATA / "P29/pair.yaml")
        .read_text("utf-8")
        .replace('"method":"eagle3","model":"org/EAGLE3-Llama-3.1-8B"', '"method":"ngram"')
    )
    engines = engines_in(list(yaml.safe_load_all(text)), "pair.yaml")
    views = [EngineView(side=side, setups=tuple(each.setup for each in engines if each.side is side)) for side in (P, D)]
    assert of_the_pair(facts(*views, sizes=None)) == set()


async def test_P09_the_page_shows_the_smallest_groups_block_not_the_flag() -> None:
    live: dict[PairSide, EngineView] = {}
    for side in (P, D):
        async with serving({"/health": "", "/metrics": (DATA / f"P09/{side.value}_metrics.txt").read_bytes()}) as url:
            live[side] = await ask_engine(side, url, timeout_s=10.0, headers={})
    both = {}
    for name in ("pair", "pair_differs"):
        views = [
            EngineView(side=side, live=live[side].live, setups=(*live[side].setups, *view.setups))
            for side, view in started(f"P09/{name}.yaml").items()
        ]
        both[name] = facts(*views, sizes=None)
    assert verdict(both["pair"], "pair.block_size") is PASS
    for name in ("prefill", "decode"):
        assert verdict(both["pair"], f"engine.{name}.drift") is SKIP
        assert "smallest block" in seen(both["pair"], f"engine.{name}.drift")
    assert verdict(both["pair_differs"], "pair.block_size") is WARN
    assert "P 256" in seen(both["pair_differs"], "pair.block_size")
    assert "D 64" in seen(both["pair_differs"], "pair.block_size")


def test_P09_a_cache_with_kinds_of_layers_that_are_not_known_is_refused_with_their_names() -> None:
    with pytest.raises(ModelConfigError, match="compress_ratios"):
        read_model(DATA / "P09/config.json")


def test_handrails_own_remarks_come_last_and_count_apart() -> None:
    whole = findings(read("P04/pair_after.yaml"))
    assert list(whole)[-1] == OWN_GROUP
    assert {each.check.rpartition(".")[2] for each in whole[OWN_GROUP]} == {"plugin", "telemetry"}
    assert own_counts(whole)[WARN] == 4
    assert counts(whole)[WARN] == 0
