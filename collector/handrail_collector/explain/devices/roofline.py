"""Decide whether arithmetic or memory limits a pool's GPUs (roofline model).

Pure.
*Measured*: the tensor pipes' share over the memory interface's share is the arithmetic intensity over the ridge's, whatever the
GPU is. Above 1 arithmetic is nearer to its limit, below 1 memory. Idle time adds nothing to either.
*Estimated*, where GPUs report neither: a step reads the weights once and does two operations for each parameter and token, so its
intensity is at most 2 x tokens / bytes a parameter; the model's size cancels out. KV reads, and experts that a token does not
use, lower it. So "memory-bound" is certain, "compute-bound" only where the estimate is well above the ridge.
Source: Williams, Waterman, Patterson, Roofline, CACM 52(4), 2009; NVML's GPM metrics define the shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail_collector.explain.devices.peaks import peak_of
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
            f"{shared} {are} sampled beside engines of more than one role, and nothing says which of these uses what "
            "(gpu.devices of each sidecar, or CUDA_VISIBLE_DEVICES in its environment, would)"
        )
    if not gpus:
        return "no samples of its GPUs"
    if rated:
        return f"its GPUs did next to nothing: {busy} busy samples, {LEAST_BUSY} are needed"
    lacking = "its GPUs give no tensor and DRAM activity (Hopper and later do)"
    if steps is None or steps.steps < LEAST_STEPS:
        return f"{lacking}, and without the plugin nothing says how many tokens a step has"
    unknown = f"{', '.join(strange) or 'a GPU without a name'}: what it can do at most is not known"
    return f"{lacking}, and {unknown}"
