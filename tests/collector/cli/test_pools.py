"""Pools of GPUs in ``handrail explain``."""

from __future__ import annotations

from dataclasses import asdict, replace

from handrail_cli.render.period import pool_lines
from handrail_collector.explain.devices.roofline import pools
from handrail_collector.store.queries.utilization import GpuUse, StepUse

P = GpuUse(
    role="prefill", instance="p0:8000", host="p0", device="GPU-0", engine="", product="NVIDIA H100 80GB HBM3", samples=600,
    rated=600, busy=500, tensor=0.712, dram=0.3,
)  # fmt: skip
D = replace(P, role="decode", host="d0", instance="d0:8000", product="NVIDIA L40S", rated=0, busy=0, tensor=None, dram=None)


def rendered_pools(*gpus: GpuUse, width: int = 120, **steps: StepUse) -> list[str]:
    return [line.plain for line in pool_lines([asdict(pool) for pool in pools(gpus, steps)], width)]


def test_each_pool_says_what_holds_it_up_and_how_that_is_known() -> None:
    title, p, measured, d, *estimated = rendered_pools(
        P, replace(P, device="GPU-1", host="p1"), D, decode=StepUse(steps=1000, tokens=64_000)
    )
    assert (title, p, measured) == (
        "Pools of GPUs",
        "  prefill     compute-bound  2 × NVIDIA H100 80GB HBM3 on 2 hosts",
        "              measured: tensor 71 %, DRAM 30 % while busy, busy 83 % of the time",
    )
    assert d == "  decode      memory-bound  1 × NVIDIA L40S on 1 host"
    assert " ".join(line.strip() for line in estimated) == (
        "estimated: 64 tokens a step are at most 64 operations a byte, the GPU's ridge is at 419 "
        "(dense weights of 2 bytes, KV reads left out)"
    )


def test_what_is_not_known_says_why_and_without_gpus_there_is_no_section() -> None:
    _, first, *rest = rendered_pools(D)
    assert first == "  decode      unknown whether compute-bound or memory-bound  1 × NVIDIA L40S on 1 host"
    assert " ".join(line.strip() for line in rest) == (
        "its GPUs report no tensor and DRAM activity (Hopper and later do), and without the plugin the tokens of a step are "
        "unknown"
    )
    assert all(len(line) <= 80 for line in rendered_pools(P, width=80))
    assert rendered_pools(prefill=StepUse(steps=100, tokens=100)) == []
    assert rendered_pools() == []


def test_gpus_that_may_belong_to_either_role_are_shown_with_the_missing_evidence() -> None:
    shared = [replace(P, role=role, instance=f"p0:{port}") for role, port in (("prefill", 8000), ("decode", 9000))]
    text = " ".join(line.strip() for line in rendered_pools(*shared))
    assert text.count("1 GPU is sampled beside engines of more than one role") == 2
    assert "gpu.devices" in text
    assert "2 GPUs are sampled" in " ".join(
        line.strip() for line in rendered_pools(*shared, *(replace(one, device="GPU-1") for one in shared))
    )
