"""What GPUs can do at most: dense 16-bit tensor throughput and memory bandwidth, from NVIDIA's published data sheets.

Where a data sheet gives only the figure with sparsity it is halved. A product that is not here gives no estimate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Peak:
    """``flops``: multiplications and additions a second in 16 bits, dense; ``bytes``: of device memory, a second."""

    flops: float
    bytes: float

    @property
    def ridge(self) -> float:
        """Operations a byte from which on arithmetic is the limit and not memory."""
        return self.flops / self.bytes


_T: Final = 1e12

PEAKS: Final[tuple[tuple[str, Peak], ...]] = (
    (r"GH200", Peak(989 * _T, 4.0 * _T)),
    (r"B200", Peak(2250 * _T, 8.0 * _T)),
    (r"H200 NVL", Peak(835 * _T, 4.8 * _T)),
    (r"H200", Peak(989 * _T, 4.8 * _T)),
    (r"H100 PCIe", Peak(756 * _T, 2.0 * _T)),
    (r"H100 NVL", Peak(835 * _T, 3.9 * _T)),
    (r"H100", Peak(989 * _T, 3.35 * _T)),
    (r"H800 PCIe", Peak(756 * _T, 2.0 * _T)),
    (r"H800", Peak(989 * _T, 3.35 * _T)),
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
    (r"V100", Peak(125 * _T, 0.9 * _T)),
)
"""By what NVML calls the product, as a whole word; the first that fits."""

_PATTERNS: Final = tuple((re.compile(rf"\b{pattern}\b", re.IGNORECASE), peak) for pattern, peak in PEAKS)


def peak_of(product: str) -> Peak | None:
    """Of a product by NVML's name; None for one that is not known, and for a MIG slice, which has a part of it."""
    if "MIG" in product:
        return None
    return next((peak for pattern, peak in _PATTERNS if pattern.search(product)), None)
