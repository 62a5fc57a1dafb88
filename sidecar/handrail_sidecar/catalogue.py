"""List every metric of the sidecar as data.

It serves docs/metrics.md and the check of the names in queries.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from handrail.config.telemetry import OtlpMetricsConfig, OwnTracesConfig
from handrail.config.types import Address, Url
from handrail.metrics.catalogue import CatalogueMetric, metrics_of
from handrail.records import Role
from handrail_sidecar.settings import GpuConfig, LogConfig, MetricsConfig, Sampling, SidecarConfig

SIDECAR: Final = "sidecar"


def sidecar_metrics() -> list[CatalogueMetric]:
    """List every metric that a sidecar may expose, in the order of its page.

    It covers a sidecar with every source, and one that reads DCGM.
    """
    from handrail_sidecar.components import make_sidecar

    found: dict[str, CatalogueMetric] = {}
    dcgm = GpuConfig(sample=Sampling.ON, dcgm_url=Url("http://127.0.0.1:9400/metrics"))
    for config in (everything(), replace(everything(), gpu=dcgm)):
        for metric in metrics_of(make_sidecar(config).metrics, SIDECAR):
            found.setdefault(metric.name, metric)
    return list(found.values())


def everything() -> SidecarConfig:
    """Build a sidecar beside a decode engine, with every source.

    It is not meant to be started, so none of the addresses is used.
    """
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
        own_traces=OwnTracesConfig(endpoint=Url("http://127.0.0.1:4318")),
    ).resolved()
