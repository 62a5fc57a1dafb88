"""Every metric as data, made from the rows that expose it: for docs/metrics.md, and to check that the names of a query exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from handrail.records import Role
from handrail.selfmetrics import AnyRow, HistogramRow
from handrail.settings import GpuConfig, LogConfig, MetricsConfig, OtlpMetricsConfig, Sampling, SidecarConfig
from handrail.units import unit_of
from handrail.values import Address, Url

SIDECAR: Final = "sidecar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. ``name`` is as PromQL names it (a histogram's without its suffixes); ``unit`` is UCUM, '' for a count.

    ``born``: its series are there from the process's start, counters at 0; others appear with what they count.
    """

    name: str
    type: str  # counter | gauge | histogram
    labels: tuple[str, ...]
    unit: str
    help: str
    process: str
    born: bool

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series in PromQL."""
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count")) if self.type == "histogram" else (self.name,)


def metrics_of(rows: Iterable[AnyRow], process: str) -> list[Metric]:
    """The metrics of these rows, whose parts have seen nothing yet."""
    found = []
    for row in rows:
        kind = "histogram" if isinstance(row, HistogramRow) else row.kind
        value = row.read()
        found.append(
            Metric(
                name=f"{row.name}_total" if kind == "counter" else row.name,
                type=kind,
                labels=row.labels,
                unit=unit_of(row.name),
                help=row.help,
                process=process,
                born=isinstance(value, int | float) or bool(value),
            )
        )
    return found


def sidecar_metrics() -> list[Metric]:
    """Every metric that a sidecar may expose, in the order of its page: of one with every source, and of one that reads DCGM."""
    from handrail.sidecar import make
    from handrail.sidecarmetrics import sidecar_rows

    found: dict[str, Metric] = {}
    dcgm = GpuConfig(sample=Sampling.ON, dcgm_url=Url("http://127.0.0.1:9400/metrics"))
    for config in (everything(), replace(everything(), gpu=dcgm)):
        for metric in metrics_of(sidecar_rows(make(config)), SIDECAR):
            found.setdefault(metric.name, metric)
    return list(found.values())


def everything() -> SidecarConfig:
    """A sidecar beside a decode, with every source. It is not meant to be started, so none of the addresses is used."""
    loopback = Address("127.0.0.1", 0)
    return SidecarConfig(
        role=Role.DECODE,
        listen=loopback,
        upstream=Url("http://127.0.0.1:8100"),
        otlp_grpc=loopback,
        plugin_socket=Path("engine.sock"),
        log=LogConfig(files=("engine.log",)),
        metrics=MetricsConfig(url=Url("http://127.0.0.1:8100/metrics")),
        gpu=GpuConfig(sample=Sampling.ON),
        otlp_metrics=OtlpMetricsConfig(endpoint=Url("http://127.0.0.1:4318")),
    ).resolved()
