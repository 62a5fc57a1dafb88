"""List the peak throughput and memory bandwidth of GPUs.

Dense 16-bit tensor throughput and device memory bandwidth, from NVIDIA's published data sheets. Where a data sheet gives only
the figure with sparsity, it is halved. A product that is not listed gives no estimate.
Sheets, as compared with copies and with tables that others publish: "NVIDIA H100 Tensor Core GPU" (SXM, PCIe, NVL: 1979, 1513
and 1671 TFLOPS with sparsity; 3.35, 2 and 3.9 TB/s), "NVIDIA H200" (1979; 4.8), "NVIDIA Blackwell: GB200 NVL72 and HGX B200"
(5 and 4.5 PFLOPS with sparsity; 8 and 7.7 TB/s; the older sheet of DGX B200 has 8), "NVIDIA A100" (312; 1555, 1935, 2039 GB/s),
"NVIDIA A10", "NVIDIA A40", "NVIDIA L40", "NVIDIA L40S", "NVIDIA L4", "NVIDIA V100" (112, 125, 130), H800 and H20 as vendors list
them. T4: 65 TFLOPS; its product brief has 320 GB/s, its data sheet 300.
No copy was found to compare with for A30, GH200 (989; 4 TB/s with 96 GB), H200 NVL and H800 PCIe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


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
