"""Decide whether arithmetic or memory limits a pool's GPUs (roofline model).

Pure.
*Measured*: the tensor pipes' share over the memory interface's share is the arithmetic intensity over the ridge's, whatever the
GPU is. Above 1 arithmetic is nearer to its limit, below 1 memory. Idle time adds nothing to either.
*Estimated*, where GPUs report neither: a step reads the weights once and does two operations for each parameter and token, so its
intensity is at most 2 x tokens / bytes a parameter; the model's size cancels out. KV reads, and experts that a token does not
use, lower it. So "memory-bound" is certain, "compute-bound" only where the estimate is well above the ridge.
Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009; NVML's GPM metrics define the shares.

Peaks: dense 16-bit tensor throughput and device memory bandwidth, from NVIDIA's published data sheets. Where a data sheet gives
only the figure with sparsity, it is halved. A product that is not listed gives no estimate.
Sheets, as compared with copies and with tables that others publish: "NVIDIA H100 Tensor Core GPU" (SXM, PCIe, NVL: 1979, 1513
and 1671 TFLOPS with sparsity; 3.35, 2 and 3.9 TB/s), "NVIDIA H200" (1979; 4.8), "NVIDIA Blackwell: GB200 NVL72 and HGX B200"
(5 and 4.5 PFLOPS with sparsity; 8 and 7.7 TB/s; the older sheet of DGX B200 has 8), "NVIDIA A100" (312; 1555, 1935, 2039 GB/s),
"NVIDIA A10", "NVIDIA A40", "NVIDIA L40", "NVIDIA L40S", "NVIDIA L4", "NVIDIA V100" (112, 125, 130), H800 and H20 as vendors list
them. T4: 65 TFLOPS; its product brief has 320 GB/s, its data sheet 300.
No copy was found to compare with for A30, GH200 (989; 4 TB/s with 96 GB), H200 NVL and H800 PCIe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail_collector.store.queries.utilization import GpuUse, StepUse

BALANCED: Final = 1.25
"""Factor below which two shares count as equal."""

SURE: Final = 2.0
"""Factor from the ridge at which an estimate counts as certain."""

LEAST_BUSY: Final = 20
"""Fewest samples of busy GPUs for a measured result: 2 s of one GPU at 10 Hz."""

LEAST_STEPS: Final = 20
BYTES_A_PARAMETER: Final = 2.0


class RooflineBound(str, Enum):
    """What limits the pool."""

    COMPUTE = "compute_bound"
    MEMORY = "memory_bound"
    BALANCED = "balanced"
    UNKNOWN = "unknown"


class How(str, Enum):
    """How the limit is known."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The GPUs of one role and what limits them.

    ``intensity`` and ``ridge``: operations per byte, for an estimate; ``why``: why the limit is unknown.
    ``busy``: share of the rated samples in which the GPUs did anything.
    ``shared``: GPUs that may be another role's; they are in no pool.
    """

    role: str
    hosts: int
    gpus: int
    products: tuple[str, ...]
    bound: RooflineBound
    how: How
    tensor: float | None = None
    dram: float | None = None
    busy: float | None = None
    tokens_a_step: float | None = None
    intensity: float | None = None
    ridge: float | None = None
    why: str = ""
    shared: int = 0


def pools(gpus: Iterable[GpuUse], steps: Mapping[str, StepUse], bytes_a_parameter: float = BYTES_A_PARAMETER) -> list[Pool]:
    """Return one pool for each role that has GPUs or steps.

    Also for a role whose sidecars sample GPUs that may be another role's.
    """
    used, shared = _each_once(gpus)
    of_roles: dict[str, list[GpuUse]] = {role: [] for role in (*steps, *shared)}
    for gpu in used:
        of_roles.setdefault(gpu.role, []).append(gpu)
    order = {"prefill": 0, "decode": 1, "collocated": 2}
    return [
        _pool(role, of_roles[role], steps.get(role), bytes_a_parameter, shared.get(role, 0))
        for role in sorted(of_roles, key=lambda role: (order.get(role, 3), role))
    ]


def _each_once(gpus: Iterable[GpuUse]) -> tuple[list[GpuUse], dict[str, int]]:
    """Return each GPU once, and the number of shared GPUs that each role samples.

    Reports of another engine's sidecar about a GPU are dropped, and so are GPUs that either of two roles may use (the shared
    ones).
    """
    by_device: dict[tuple[str, str], list[GpuUse]] = {}
    for gpu in gpus:
        if gpu.engine in ("", gpu.instance):
            by_device.setdefault((gpu.host, gpu.device), []).append(gpu)
    found: list[GpuUse] = []
    shared: dict[str, int] = {}
    for gpu_uses in by_device.values():
        named = [gpu for gpu in gpu_uses if gpu.engine]
        roles = {gpu.role for gpu in gpu_uses}
        if named or len(roles) == 1:
            found.append(max(named or gpu_uses, key=lambda gpu: gpu.samples))
        else:
            shared |= {role: shared.get(role, 0) + 1 for role in roles}
    return found, shared


def _pool(role: str, gpus: Sequence[GpuUse], steps: StepUse | None, bytes_a_parameter: float, shared: int) -> Pool:
    products = tuple(sorted({gpu.product for gpu in gpus if gpu.product}))
    hosts = len({gpu.host for gpu in gpus})
    tokens = steps.tokens / steps.steps if steps is not None and steps.steps else None
    rated = [gpu for gpu in gpus if gpu.busy and gpu.tensor is not None and gpu.dram is not None]
    busy = sum(gpu.busy for gpu in rated)
    of_all = sum(gpu.rated for gpu in gpus)
    if busy >= LEAST_BUSY:
        tensor = sum((gpu.tensor or 0.0) * gpu.busy for gpu in rated) / busy
        dram = sum((gpu.dram or 0.0) * gpu.busy for gpu in rated) / busy
        bound = _compared(tensor, dram, BALANCED)
        return Pool(
            role=role, hosts=hosts, gpus=len(gpus), products=products, bound=bound, how=How.MEASURED, tensor=tensor, dram=dram,
            busy=busy / of_all if of_all else None, tokens_a_step=tokens, shared=shared,
        )  # fmt: skip
    peaks = [peak_of(product) for product in products]
    known = [peak for peak in peaks if peak is not None]
    if steps is not None and steps.steps >= LEAST_STEPS and tokens is not None and known and len(known) == len(peaks):
        intensity = 2 * tokens / bytes_a_parameter
        lowest, highest = min(peak.ridge for peak in known), max(peak.ridge for peak in known)
        if intensity < lowest:
            bound, ridge = _compared(intensity, lowest, SURE), lowest
        else:
            bound, ridge = _compared(intensity, highest, SURE), highest
        return Pool(
            role=role, hosts=hosts, gpus=len(gpus), products=products, bound=bound, how=How.ESTIMATED, tokens_a_step=tokens,
            intensity=intensity, ridge=ridge, shared=shared,
        )  # fmt: skip
    why = _why(
        gpus, shared, busy, of_all, steps, [product for product, peak in zip(products, peaks, strict=True) if peak is None]
    )
    return Pool(
        role=role,
        hosts=hosts,
        gpus=len(gpus),
        products=products,
        bound=RooflineBound.UNKNOWN,
        how=How.NONE,
        tokens_a_step=tokens,
        why=why,
        shared=shared,
    )


def _compared(compute: float, memory: float, factor: float) -> RooflineBound:
    if compute > memory * factor:
        return RooflineBound.COMPUTE
    return RooflineBound.MEMORY if compute * factor < memory else RooflineBound.BALANCED


def _why(gpus: Sequence[GpuUse], shared: int, busy: int, rated: int, steps: StepUse | None, strange: Sequence[str]) -> str:
    if not gpus and shared:
        are = "GPUs are" if shared > 1 else "GPU is"
        return (
            f"{shared} {are} sampled beside engines of more than one role, and no evidence says which engine uses which "
            "(set gpu.devices of each sidecar, or CUDA_VISIBLE_DEVICES in its environment)"
        )
    if not gpus:
        return "no samples of its GPUs"
    if rated:
        return f"its GPUs were almost idle: {busy} busy samples, {LEAST_BUSY} are needed"
    lacking = "its GPUs report no tensor and DRAM activity (Hopper and later do)"
    if steps is None or steps.steps < LEAST_STEPS:
        return f"{lacking}, and without the plugin the tokens of a step are unknown"
    unknown = f"{', '.join(strange) or 'a GPU without a name'}: its peak rates are unknown"
    return f"{lacking}, and {unknown}"


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak rates of a GPU.

    ``flops``: dense 16-bit multiplications and additions a second; ``bytes``: device memory bytes a second.
    """

    flops: float
    bytes: float

    @property
    def ridge(self) -> float:
        """Operations per byte above which arithmetic is the limit, not memory."""
        return self.flops / self.bytes


_T: Final = 1e12

PEAKS: Final[tuple[tuple[str, Peak], ...]] = (
    (r"GH200 480GB", Peak(989 * _T, 4.0 * _T)),
    (r"GB200", Peak(2500 * _T, 8.0 * _T)),
    (r"B200", Peak(2250 * _T, 7.7 * _T)),
    (r"H200 NVL", Peak(835 * _T, 4.8 * _T)),
    (r"H200", Peak(989 * _T, 4.8 * _T)),
    (r"H100 PCIe", Peak(756 * _T, 2.0 * _T)),
    (r"H100 NVL", Peak(835 * _T, 3.9 * _T)),
    (r"H100", Peak(989 * _T, 3.35 * _T)),
    (r"H800 PCIe", Peak(756 * _T, 2.0 * _T)),
    (r"H800", Peak(989 * _T, 3.35 * _T)),
    (r"H20-3e", Peak(148 * _T, 4.8 * _T)),
    (r"H20", Peak(148 * _T, 4.0 * _T)),
    (r"A100.*40GB", Peak(312 * _T, 1.555 * _T)),
    (r"A100.*PCIe", Peak(312 * _T, 1.935 * _T)),
    (r"A100", Peak(312 * _T, 2.039 * _T)),
    (r"A40", Peak(149.7 * _T, 0.696 * _T)),
    (r"A30", Peak(165 * _T, 0.933 * _T)),
    (r"A10", Peak(125 * _T, 0.6 * _T)),
    (r"L40S", Peak(362 * _T, 0.864 * _T)),
    (r"L40", Peak(181 * _T, 0.864 * _T)),
    (r"L4", Peak(121 * _T, 0.3 * _T)),
    (r"T4", Peak(65 * _T, 0.32 * _T)),
    (r"V100S-PCIE", Peak(130 * _T, 1.134 * _T)),
    (r"V100-PCIE", Peak(112 * _T, 0.9 * _T)),
    (r"V100-SXM2", Peak(125 * _T, 0.9 * _T)),
)
"""Peaks by NVML's product name, matched as a whole word; the first match counts."""

_SHARED: Final = re.compile(r"\bMIG\b|-\d+[ABCQ]$")
"""A MIG slice, or a vGPU by its profile (``L40S-16Q``): an unknown part of a GPU."""

_PATTERNS: Final = tuple((re.compile(rf"\b{pattern}\b", re.IGNORECASE), peak) for pattern, peak in PEAKS)


def peak_of(product: str) -> Peak | None:
    """Return the peak of a product by NVML's name.

    None for an unknown product, and for a MIG slice or a vGPU, which has only a part of it.
    """
    if _SHARED.search(product):
        return None
    return next((peak for pattern, peak in _PATTERNS if pattern.search(product)), None)
