"""A pool's place under the roofline: measured, estimated or unknown.

The tests also cover what is read from the store for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.dataclass_rows import flat_row
from builders.device_samples import START_UNIX_NS, S, gauge, gpu, process, sample
from handrail import conventions as names
from handrail.records import Role
from handrail.records.devices import DeviceSample, runs
from handrail_collector.explain.devices.roofline import PEAKS, How, Pool, RooflineBound, peak_of, pools
from handrail_collector.explain.period.answer import answered
from handrail_collector.explain.period.question import Question
from handrail_collector.rows import IterationRow
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries import utilization
from handrail_collector.store.queries.utilization import GpuUse, StepUse, gpu_uses, step_uses
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

ONE = GpuUse(
    role="prefill",
    instance="p0:8000",
    host="p0",
    device="GPU-0",
    engine="",
    product="NVIDIA H100 80GB HBM3",
    samples=600,
    rated=600,
    busy=500,
    tensor=0.7,
    dram=0.3,
)
BLIND = replace(ONE, rated=0, busy=0, tensor=None, dram=None, product="NVIDIA L40S")


def pool(*gpus: GpuUse, **steps: StepUse) -> Pool:
    (found,) = pools(gpus, steps)
    return found


@pytest.mark.parametrize(
    ("tensor", "dram", "bound"),
    [
        (0.72, 0.31, RooflineBound.COMPUTE),
        (0.06, 0.64, RooflineBound.MEMORY),
        (0.5, 0.45, RooflineBound.BALANCED),
        (0.12, 0.03, RooflineBound.COMPUTE),
        (0.0, 0.5, RooflineBound.MEMORY),
    ],
)
def test_the_share_that_is_nearer_to_its_limit_is_the_bound(tensor: float, dram: float, bound: RooflineBound) -> None:
    found = pool(replace(ONE, tensor=tensor, dram=dram), prefill=StepUse(steps=5, tokens=10))
    assert (found.bound, found.how, found.tensor, found.dram) == (bound, How.MEASURED, tensor, dram)
    assert found.busy == pytest.approx(500 / 600)


def test_shares_of_several_gpus_count_by_how_long_they_were_busy() -> None:
    found = pool(ONE, replace(ONE, device="GPU-1", busy=100, tensor=0.1, dram=0.9))
    assert (found.gpus, found.hosts) == (2, 1)
    assert found.tensor == pytest.approx(0.6)
    assert found.dram == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("tokens", "bound"),
    [(64, RooflineBound.MEMORY), (400, RooflineBound.BALANCED), (8192, RooflineBound.COMPUTE)],
)
def test_without_activity_tokens_a_step_are_held_against_the_gpus_ridge(tokens: int, bound: RooflineBound) -> None:
    found = pool(BLIND, prefill=StepUse(steps=100, tokens=100 * tokens))
    assert (found.bound, found.how, found.intensity) == (bound, How.ESTIMATED, tokens)
    assert found.ridge == pytest.approx(362 / 0.864)


def test_of_gpus_of_two_kinds_the_estimate_is_held_against_the_ridge_that_is_nearer() -> None:
    mixed = (BLIND, replace(BLIND, device="GPU-1", product="NVIDIA A100-SXM4-80GB"))
    few, many = (pool(*mixed, prefill=StepUse(steps=100, tokens=100 * tokens)) for tokens in (10, 100_000))
    assert few.ridge == pytest.approx(312 / 2.039)
    assert many.ridge == pytest.approx(362 / 0.864)


@pytest.mark.parametrize(
    ("gpus", "steps", "why"),
    [
        ((), {"prefill": StepUse(steps=100, tokens=100)}, "no samples of its GPUs"),
        ((replace(ONE, busy=3),), {}, "its GPUs were almost idle: 3 busy samples, 20 are needed"),
        ((BLIND,), {}, "without the plugin the tokens of a step are unknown"),
        ((replace(BLIND, product="Foo 9000"),), {"prefill": StepUse(steps=100, tokens=100)}, "Foo 9000: its peak rates"),
        (
            (replace(BLIND, product=""),),
            {"prefill": StepUse(steps=100, tokens=100)},
            "a GPU without a name: its peak rates are unknown",
        ),
        ((BLIND,), {"prefill": StepUse(steps=3, tokens=3)}, "the tokens of a step are unknown"),
        ((), {"prefill": StepUse(steps=0, tokens=0)}, "no samples of its GPUs"),
    ],
    ids=["no_gpus", "idle", "no_steps", "strange", "nameless", "few_steps", "no_step"],
)
def test_unknown_figures_are_reported_with_the_reason(gpus: tuple[GpuUse, ...], steps: dict[str, StepUse], why: str) -> None:
    found = pool(*gpus, **steps)
    assert (found.bound, found.how) == (RooflineBound.UNKNOWN, How.NONE)
    assert why in found.why


def test_a_gpu_that_two_sidecars_sample_is_its_engines_or_nobodys() -> None:
    at_p = [replace(ONE, device=f"GPU-{n}") for n in range(2)]
    at_d = [replace(gpu, role="decode", instance="p0:9000", tensor=0.05, dram=0.6) for gpu in at_p]
    for unnamed in pools([*at_p, *at_d], {}):  # their pool is unknown, and the answer says so
        assert (unnamed.gpus, unnamed.shared, unnamed.bound, unnamed.how) == (0, 2, RooflineBound.UNKNOWN, How.NONE)
        assert "2 GPUs are sampled beside engines of more than one role" in unnamed.why
    assert [each.role for each in pools([*at_p, *at_d], {})] == ["prefill", "decode"]
    named = [replace(gpu, engine="p0:9000" if gpu.device == "GPU-1" else "p0:8000") for gpu in (*at_p, *at_d)]
    found = pools(named, {})
    assert [(each.role, each.gpus, each.bound) for each in found] == [
        ("prefill", 1, RooflineBound.COMPUTE),
        ("decode", 1, RooflineBound.MEMORY),
    ]


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_a_pool_is_never_both_and_never_bound_by_what_it_used_less(shares: list[tuple[int, float, float]]) -> None:
    gpus = [replace(ONE, device=str(at), busy=busy, rated=1000, tensor=t, dram=d) for at, (busy, t, d) in enumerate(shares)]
    found = pool(*gpus)
    if found.bound is RooflineBound.COMPUTE:
        assert (found.tensor or 0) > (found.dram or 0)
    elif found.bound is RooflineBound.MEMORY:
        assert (found.dram or 0) > (found.tensor or 0)


@pytest.mark.parametrize(
    ("product", "tera_operations", "tera_bytes"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA H200", 989, 4.8),
        ("NVIDIA H20", 148, 4.0),
        ("NVIDIA A100-SXM4-80GB", 312, 2.039),
        ("NVIDIA A100-PCIE-40GB", 312, 1.555),
        ("NVIDIA L40S", 362, 0.864),
        ("NVIDIA L4", 121, 0.3),
        ("Tesla T4", 65, 0.32),
        ("NVIDIA GH200 480GB", 989, 4.0),
        ("NVIDIA GB200", 2500, 8.0),
        ("NVIDIA B200", 2250, 7.7),
        ("NVIDIA H100 NVL", 835, 3.9),
        ("NVIDIA H20-3e", 148, 4.8),
        ("Tesla V100-PCIE-16GB", 112, 0.9),
        ("Tesla V100-SXM2-32GB", 125, 0.9),
        ("Tesla V100S-PCIE-32GB", 130, 1.134),
    ],
)
def test_products_by_nvmls_names(product: str, tera_operations: float, tera_bytes: float) -> None:
    peak = peak_of(product)
    assert peak is not None
    assert (peak.flops / 1e12, peak.bytes / 1e12) == pytest.approx((tera_operations, tera_bytes))


def test_products_that_are_not_known_and_slices_have_no_peak() -> None:
    other = (
        "NVIDIA A10G",
        "NVIDIA A16",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA L40G",
        "Tesla V100-SXM3-32GB",
        "NVIDIA GH200 144G HBM3e",
        "",
    )
    for product in other:
        assert peak_of(product) is None, product
    for part in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40S-16Q", "GRID A100-20C", "NVIDIA A40-48Q"):
        assert peak_of(part) is None, part
    assert all(30 < peak.ridge < 500 for _, peak in PEAKS)


# --- from a store ---------------------------------------------------------------------------------------------------------


def a_minute(host: str, role: Role, tensor: float, dram: float, gpus: int = 2) -> list[DeviceSample]:
    """Return a minute of samples, half of it idle."""
    of = process(host, role)
    return [
        sample(
            gpu(index, host),
            START_UNIX_NS + tick * S // 10,
            gauge(names.GPU_TENSOR_ACTIVE, tensor if tick % 2 else 0.0),
            gauge(names.GPU_DRAM_ACTIVE, dram if tick % 2 else 0.001),
            of=of,
        )
        for tick in range(600)
        for index in range(gpus)
    ]


def iterations(role: str, steps: int, tokens: int) -> list[IterationRow]:
    row = flat_row(
        Table.ITERATIONS, 1, START_UNIX_NS, role=role, steps=steps, prefill_tokens=tokens, decode_tokens=steps, full=False
    )
    reported_again = replace(row, key="f" * 16, full=True, steps=1, prefill_tokens=10**9)
    return [row, reported_again]


@pytest.fixture
def reader(tmp_path: Path) -> StoreReader:
    publisher = StorePublisher(tmp_path)
    publisher.open()
    flat: dict[Table, list[Any]] = {
        Table.GPU_SAMPLES: runs([*a_minute("p0", Role.PREFILL, 0.7, 0.2), *a_minute("d0", Role.DECODE, 0.05, 0.6)]),
        Table.ITERATIONS: [*iterations("prefill", 10, 40_000), *iterations("decode", 1000, 0)],
    }
    publisher.publish(0, 10, 0, [], [], flat=flat)
    publisher.close()
    return StoreReader(tmp_path)


def test_the_figures_of_a_period_are_means_of_the_busy_samples(reader: StoreReader) -> None:
    found = gpu_uses(reader, START_UNIX_NS, START_UNIX_NS + 60 * S)
    assert [(each.host, each.samples, each.rated, each.busy) for each in found] == [
        ("id-of-d0", 600, 600, 300),
        ("id-of-d0", 600, 600, 300),
        ("id-of-p0", 600, 600, 300),
        ("id-of-p0", 600, 600, 300),
    ]
    assert (found[0].tensor, found[0].dram) == pytest.approx((0.05, 0.6))
    assert gpu_uses(reader, 0, START_UNIX_NS) == []
    assert step_uses(reader, START_UNIX_NS, START_UNIX_NS + 60 * S) == {
        "prefill": StepUse(steps=10, tokens=40_010),
        "decode": StepUse(steps=1000, tokens=1000),
    }
    reader.close()


def test_explain_tells_the_pools_also_where_there_is_no_request(reader: StoreReader) -> None:
    answer = answered(reader, Question(since_unix_ns=START_UNIX_NS, until_unix_ns=START_UNIX_NS + 60 * S), START_UNIX_NS)
    assert [(each["role"], each["bound"], each["how"], each["tokens_a_step"]) for each in answer["pools"]] == [
        ("prefill", "compute_bound", "measured", 4001.0),
        ("decode", "memory_bound", "measured", 1.0),
    ]
    reader.close()


def test_of_very_many_samples_files_evenly_over_the_time_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = StorePublisher(tmp_path)
    publisher.open()
    for part in range(6):
        device_samples = [
            one for one in a_minute("p0", Role.PREFILL, 0.7, 0.2, 1) if (one.at_unix_ns - START_UNIX_NS) // (10 * S) == part
        ]
        publisher.publish(part, part + 1, 0, [], [], flat={Table.GPU_SAMPLES: runs(device_samples)})
    publisher.close()
    monkeypatch.setattr(utilization, "MOST_READ", 300)
    reader = StoreReader(tmp_path)
    (found,) = gpu_uses(reader, START_UNIX_NS, START_UNIX_NS + 60 * S)
    assert (found.samples, found.busy) == (300, 150)
    reader.close()
