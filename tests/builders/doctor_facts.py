"""Builders of the facts that doctor judges.

Each builder makes a good case, and a test spoils it in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from handrail_doctor.checks.all_checks import findings
from handrail_doctor.checks.result import CheckResult, CheckStatus
from handrail_doctor.connectors import Connector, connector_of
from handrail_doctor.facts import (
    ALL_PLUGINS,
    SIDES,
    DoctorOptions,
    EngineView,
    Facts,
    GpuFacts,
    GpusFacts,
    HostFacts,
    HttpAnswer,
    LiveEngine,
    P2p,
    P2pStatus,
    PairSide,
    Placement,
    RdmaPort,
    Setup,
)
from handrail_doctor.kv_size.read import read_model
from handrail_doctor.kv_size.size import Serving, Sizes, sizes

CONFIGS = Path(__file__).parents[1] / "data/model_configs"
P, D = PairSide.PREFILL, PairSide.DECODE
SOCKET = {"HANDRAIL_SOCKET": "/run/handrail/engine.sock"}


def setup(side: PairSide, **more: Any) -> Setup:
    """Build an engine's command line without a mistake."""
    role = "kv_producer" if side is P else "kv_consumer"
    given: dict[str, Any] = {
        "by": f"pair.yaml: {side.value}",
        "whole": True,
        "model": "/models/qwen",
        "revision": "abc123",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "kv_layout": "HND",
        "tp": 1,
        "version": "0.32.0",
        "hybrid": True,
        "connector": "NixlConnector",
        "kv_role": role,
        "side_host": "10.0.0.7" if side is P else "10.0.0.8",
        "middleware": ("handrail.plugin.middleware.Handrail",),
        "plugins": ALL_PLUGINS,
        "env": SOCKET,
    }
    given |= more
    if isinstance(given["connector"], str):
        given["connector"] = Connector(name=given["connector"])
    return Setup(**given)


def nixl(name: str = "NixlConnector", *, extra: Mapping[str, Any] | None = None, **settings: Any) -> Connector:
    """Build a connector with settings of its own."""
    given = {"kv_connector": name, "kv_connector_extra_config": dict(extra or {}), **settings}
    made = connector_of(given)
    assert made is not None
    return made


def live(**more: Any) -> LiveEngine:
    """Build a running engine that answers every query."""
    families = frozenset({"vllm:num_requests_running", "vllm:time_to_first_token_seconds"})
    given = {"health": HttpAnswer(status=200), "metrics": HttpAnswer(status=200), "models": ("qwen",), "families": families}
    return LiveEngine(**{**given, **more})


def view(side: PairSide, *setups: Setup, **more: Any) -> EngineView:
    """Build one side of a pair from its setups; without setups, a good side."""
    return EngineView(side=side, setups=setups or (setup(side),), **more)


def gpus(count: int = 2, *, read: P2pStatus | None = P2pStatus.OK, nvlink: bool = False, **more: Any) -> GpusFacts:
    """Build equal GPUs that are all peers of each other."""
    linked = P2pStatus.OK if nvlink else P2pStatus.NOT_SUPPORTED
    pairs = [P2p(source=a, target=b, read=read, write=read, nvlink=linked) for a in range(count) for b in range(count) if a != b]
    given: dict[str, Any] = {"name": "NVIDIA X", "pcie_now": (4, 16), "pcie_most": (4, 16)}
    if nvlink:
        given |= {"nvlinks": (18, 18), "nvlink_bytes_per_s": 450_000_000_000}
    devices = tuple(GpuFacts(index=index, uuid=f"GPU-{index:04x}", **{**given, **more}) for index in range(count))
    return GpusFacts(driver="580.1", devices=devices, p2p=tuple(pairs))


def port(adapter: str = "mlx5_0", **more: Any) -> RdmaPort:
    """Build an RDMA port that is up."""
    given: dict[str, Any] = {
        "adapter": adapter,
        "port": 1,
        "state": "ACTIVE",
        "physical": "LinkUp",
        "bits_per_s": 400e9,
        "lanes": 4,
        "link_layer": "InfiniBand",
    }
    return RdmaPort(**{**given, **more})


def host(**more: Any) -> HostFacts:
    """Build D's host, without GPUs and adapters."""
    given: dict[str, Any] = {
        "here": frozenset({D}),
        "gpus": gpus(0),
        "rdma": (),
        "modules": frozenset({"nvidia"}),
        "kernel": (6, 8),
    }
    return HostFacts(**{**given, **more})


def model(name: str = "qwen2.5-7b", **serving: Any) -> Sizes:
    """Build a published model as an engine serves it."""
    return sizes(read_model(CONFIGS / f"{name}.json"), Serving(**serving))


def facts(*engines: EngineView, placement: Placement = Placement.ACROSS_HOSTS, **more: Any) -> Facts:
    """Build a pair across hosts with both sides known.

    ``engines`` replaces sides.
    """
    sides: Mapping[PairSide, EngineView] = {**{side: view(side) for side in SIDES}, **{each.side: each for each in engines}}
    given: dict[str, Any] = {"options": DoctorOptions(tokens=8000), "host": host(), "sizes": model()}
    return Facts(engines=sides, placement=placement, **{**given, **more})


def same_host(*engines: EngineView, **more: Any) -> Facts:
    """Build a pair with both engines on this host, on GPU 0 and GPU 1."""
    given: dict[str, Any] = {
        "host": host(here=frozenset(SIDES), gpus=gpus()),
        "options": DoctorOptions(tokens=8000, gpus={P: (0,), D: (1,)}),
    }
    return facts(*engines, placement=Placement.SAME_HOST, **{**given, **more})


def found(whole: Facts, check: str) -> CheckResult | None:
    """Return the finding of one check; None when the check does not apply.

    Fails when there are two findings.
    """
    listed: Sequence[CheckResult] = [each for group in findings(whole).values() for each in group if each.check == check]
    assert len(listed) <= 1, listed
    return listed[0] if listed else None


def verdict(whole: Facts, check: str) -> CheckStatus | None:
    """Return the verdict of one check."""
    finding = found(whole, check)
    return finding.verdict if finding is not None else None


def failures(whole: Facts) -> set[str]:
    """Return the checks that fail."""
    return {each.check for group in findings(whole).values() for each in group if each.verdict is CheckStatus.FAIL}
