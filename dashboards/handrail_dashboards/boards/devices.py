"""The board of GPUs and links: their work, their limits and their traffic."""

from __future__ import annotations

from typing import Final

from handrail_dashboards.panel import GREEN, ORANGE, RED, Board, PanelQuery, PanelRow, series, stat, table
from handrail_dashboards.query import (
    RANGE,
    counted,
    each_of,
    highest,
    least,
    lowest,
    mean,
    named,
    of_line_rate,
    own,
    pooled,
    rate,
    renamed,
    total,
    worst,
)

_NO_GPU: Final = "no GPU is sampled"
_NO_GPM: Final = "no GPU gives it: performance monitoring (GPM) comes with Hopper"
_GPU: Final = "{{instance}} GPU {{gpu}}"
_EACH: Final = ("cluster", "job", "instance", "gpu")
_ONCE: Final = "uuid"
"""The label that identifies a GPU wherever it is read.

With NVML in Kubernetes every sidecar of a node reads all GPUs of the node.
"""
_HELD: Final = 'reason=~"hw_slowdown|sw_thermal|hw_thermal|power_brake|reliability"'
_SM: Final = 'domain="sm"'
_NONE: Final = ((0, GREEN), (0.5, RED))


def _gpu(name: str, *more: str) -> str:
    return own(f"handrail_gpu_{name}", *more)


def _each(values: str) -> str:
    return worst(values, "instance", "gpu")


def _of_line(rates: str, line: str) -> str:
    both = total(rates, *_EACH, "direction")
    return highest(each_of(both, worst(line, *_EACH), *_EACH))


def _errors(name: str, label: str, what: str) -> str:
    found = total(counted(_gpu(name)), "instance", "gpu", label) + " > 0"
    return named(total(renamed(found, label, "which"), "instance", "gpu", "which"), "what", what)


_ERRORS: Final = (
    _errors("xid_errors_total", "xid", "Xid"),
    _errors("ecc_errors_total", "kind", "ECC"),
    _errors("nvlink_errors_total", "kind", "NVLink"),
    named(total(counted(_gpu("pcie_replays_total")), "instance", "gpu") + " > 0", "what", "PCIe replays"),
)


def _over(how: str, name: str) -> str:
    """Aggregate over the whole range, by role.

    ``how``: the mean of all GPUs, or the highest of any.
    """
    return f"{how} by (role) ({pooled(f'{how}_over_time({_gpu(name)}[{RANGE}])')})"


BOARD: Final = Board(
    "gpu-links",
    "Handrail / GPU and links",
    "Compute-bound or memory-bound, utilisation, power, throttling, and the traffic of NVLink, PCIe, RDMA ports and NICs.",
    (
        PanelRow(
            "Is a device faulty?",
            (
                stat(
                    "GPUs",
                    "GPUs that answer. Each counts once, even if several sidecars read it. Each MIG device counts as one.",
                    "none",
                    f"count({worst(_gpu('memory_total_bytes'), _ONCE)})",
                    decimals=0,
                    no_value=_NO_GPU,
                ),
                stat(
                    "Lost",
                    "GPUs that do not answer: off the bus, or the driver hangs. A GPU counts once for each sidecar that"
                    " reads it.",
                    "none",
                    total(_gpu("lost")),
                    decimals=0,
                    steps=_NONE,
                    no_value=_NO_GPU,
                ),
                stat(
                    "Throttled now",
                    "GPUs that are throttled by heat, power brake or hardware slowdown. The power cap is not counted "
                    "here: at full load it is normal.",
                    "none",
                    f"count({worst(_gpu('throttled', _HELD), _ONCE)} > 0) or 0 * count({_gpu('throttled')})",
                    decimals=0,
                    steps=_NONE,
                    no_value=_NO_GPU,
                ),
                stat(
                    "Hottest",
                    "The hottest GPU.",
                    "celsius",
                    worst(_gpu("temperature_celsius", 'sensor="gpu"')),
                    decimals=0,
                    steps=((0, GREEN), (80, ORANGE), (88, RED)),
                    no_value=_NO_GPU,
                ),
                stat(
                    "Xid errors",
                    "Errors that drivers reported in this time range. The table lists them.",
                    "none",
                    total(worst(counted(_gpu("xid_errors_total")), _ONCE, "xid")),
                    once=True,
                    decimals=0,
                    steps=_NONE,
                    no_value=_NO_GPU,
                ),
                stat(
                    "Ports down",
                    "Sampled RDMA ports and NICs that cannot carry data.",
                    "none",
                    f"count({own('handrail_link_up')} == 0) or 0 * count({own('handrail_link_up')})",
                    decimals=0,
                    steps=_NONE,
                    no_value="no port is sampled",
                ),
            ),
        ),
        PanelRow(
            "Roofline: compute-bound or memory-bound",
            (
                series(
                    "Tensor pipes and memory bandwidth, by pool",
                    "Mean over the GPUs of a role. Tensor far above memory: compute-bound, as prefill should be. Memory"
                    " far above tensor: memory-bound, as decode usually is.",
                    "percentunit",
                    PanelQuery(mean(pooled(_gpu("tensor_active_ratio")), "role"), "{{role}} tensor"),
                    PanelQuery(mean(pooled(_gpu("dram_active_ratio")), "role"), "{{role}} memory"),
                    width=10,
                    low=0,
                    high=1,
                    no_value=_NO_GPM,
                ),
                table(
                    "Pools",
                    "Mean and peak of the range for each role, since a mean hides bursts. `handrail explain` shows what"
                    " bounds a pool, and how certain that is.",
                    {"role": "Role"},
                    PanelQuery(_over("avg", "tensor_active_ratio"), "Tensor mean", unit="percentunit"),
                    PanelQuery(_over("max", "tensor_active_ratio"), "Tensor peak", unit="percentunit"),
                    PanelQuery(_over("avg", "dram_active_ratio"), "Memory mean", unit="percentunit"),
                    PanelQuery(_over("max", "dram_active_ratio"), "Memory peak", unit="percentunit"),
                    PanelQuery(_over("avg", "sm_active_ratio"), "SMs mean", unit="percentunit"),
                    width=14,
                    no_value=_NO_GPM,
                ),
            ),
        ),
        PanelRow(
            "GPUs",
            (
                series(
                    "Streaming multiprocessors active",
                    "Share of a GPU's multiprocessors that were busy, by pool. Without performance monitoring: the "
                    "share of time in which any kernel ran, which shows less.",
                    "percentunit",
                    PanelQuery(mean(pooled(_gpu("sm_active_ratio")), "role"), "{{role}} mean"),
                    PanelQuery(worst(pooled(_gpu("sm_active_ratio")), "role"), "{{role}} highest"),
                    PanelQuery(least(pooled(_gpu("sm_active_ratio")), "role"), "{{role}} lowest"),
                    PanelQuery(
                        f"{mean(pooled(_gpu('utilization_ratio')), 'role')} unless on (role) "
                        f"{mean(pooled(_gpu('sm_active_ratio')), 'role')}",
                        "{{role}} any kernel",
                    ),
                    low=0,
                    high=1,
                    no_value=_NO_GPU,
                ),
                series(
                    "Power against its limit",
                    "The GPUs nearest to their enforced limit. At 100 %, the power cap throttles the clocks.",
                    "percentunit",
                    PanelQuery(
                        highest(each_of(worst(_gpu("power_watts"), *_EACH), worst(_gpu("power_limit_watts"), *_EACH), *_EACH)),
                        _GPU,
                    ),
                    low=0,
                    steps=((0, GREEN), (0.98, ORANGE)),
                    no_value=_NO_GPU,
                ),
                series(
                    "Throttling, by reason",
                    "Share of the time in which each policy throttled the clocks, for the worst GPU of each host.",
                    "percentunit",
                    PanelQuery(
                        highest(worst(rate(_gpu("throttled_seconds_total")), "instance", "policy") + " > 0"),
                        "{{instance}} {{policy}}",
                    ),
                    low=0,
                    high=1,
                    no_value="no GPU is known to be throttled",
                ),
                series(
                    "Memory in use",
                    "Share of device memory in use, the fullest GPUs. Engines reserve memory at start, so a flat line is normal.",
                    "percentunit",
                    PanelQuery(
                        each_of(worst(_gpu("memory_used_bytes"), *_EACH), worst(_gpu("memory_total_bytes"), *_EACH), *_EACH), _GPU
                    ),
                    low=0,
                    high=1,
                    no_value=_NO_GPU,
                ),
                series(
                    "Temperature",
                    "The hottest GPUs, the hottest sensor of each.",
                    "celsius",
                    PanelQuery(highest(_each(_gpu("temperature_celsius"))), _GPU),
                    steps=((0, GREEN), (80, ORANGE), (88, RED)),
                    no_value=_NO_GPU,
                ),
                series(
                    "Clock of the multiprocessors",
                    "The slowest GPUs, as a share of the highest clock of the product. A low clock while idle is normal.",
                    "percentunit",
                    PanelQuery(
                        lowest(
                            each_of(
                                worst(_gpu("clock_hertz", _SM), *_EACH),
                                worst(_gpu("clock_max_hertz", _SM), *_EACH),
                                *_EACH,
                            )
                        ),
                        _GPU,
                    ),
                    low=0,
                    high=1,
                    no_value=_NO_GPU,
                ),
            ),
        ),
        PanelRow(
            "Links of GPUs",
            (
                series(
                    "NVLink against its line rate",
                    "The fullest: share of what all NVLinks of a GPU can carry each way.",
                    "percentunit",
                    PanelQuery(
                        _of_line(rate(_gpu("nvlink_bytes_total")), _gpu("nvlink_line_bytes_per_second")),
                        f"{_GPU} {{{{direction}}}}",
                    ),
                    low=0,
                    high=1,
                    no_value="no NVLink, or its speed is not told",
                ),
                series(
                    "PCIe against its line rate",
                    "The fullest: share of what the lanes and generation of a GPU's PCIe can carry each way. The link "
                    "may be trained to a lower rate.",
                    "percentunit",
                    PanelQuery(
                        _of_line(rate(_gpu("pcie_bytes_total")), _gpu("pcie_line_bytes_per_second")), f"{_GPU} {{{{direction}}}}"
                    ),
                    low=0,
                    high=1,
                    no_value="no counter of PCIe bytes",
                ),
                table(
                    "Errors of this time range",
                    "Xid, ECC and NVLink errors and PCIe replays that happened.",
                    {"instance": "Sidecar", "gpu": "GPU", "what": "What", "which": "Which"},
                    PanelQuery(" or ".join(_ERRORS), "Times", unit="none", steps=((0, ORANGE),)),
                    sort="-Times",
                    no_value="no error is counted",
                ),
            ),
        ),
        PanelRow(
            "RDMA ports and NICs",
            (
                series(
                    "Carried",
                    "Bytes a second of the ports that carry most, mean of the step.",
                    "Bps",
                    PanelQuery(highest(rate(own("handrail_link_bytes_total"))), "{{instance}} {{device}} {{direction}}"),
                    low=0,
                    no_value="no port is sampled",
                ),
                series(
                    "Against the line rate: mean and peak second",
                    "The fullest ports. The peak is the highest second of the last minute: KV fetches come in bursts "
                    "that a mean hides.",
                    "percentunit",
                    PanelQuery(
                        of_line_rate(rate(own("handrail_link_bytes_total"))), "{{instance}} {{device}} {{direction}} mean"
                    ),
                    PanelQuery(
                        of_line_rate(own("handrail_link_peak_bytes_per_second")), "{{instance}} {{device}} {{direction}} peak"
                    ),
                    low=0,
                    high=1,
                    steps=((0, GREEN), (0.7, ORANGE), (0.9, RED)),
                    no_value="no port with a line rate (virtual ones have none)",
                ),
                series(
                    "Errors and congestion",
                    "Errors, drops, retransmissions and signs of congestion a second, by the driver's own names. Only "
                    "counters that grow are shown.",
                    "cps",
                    PanelQuery(highest(rate(own("handrail_link_errors_total")) + " > 0"), "{{instance}} {{device}} {{error}}"),
                    PanelQuery(
                        highest(rate(own("handrail_link_congestion_events_total")) + " > 0"), "{{instance}} {{device}} {{event}}"
                    ),
                    low=0,
                    no_value="no error and no congestion is counted",
                ),
            ),
        ),
    ),
)
