"""Settings of the metrics and traces of Handrail's own processes.

Nothing is sent by default, whatever the environment says (``handrail/telemetry/exporters.py``).
"""

# ruff: noqa: RUF009 - setting() returns dataclasses.field(), which is what a default should be
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from handrail.config.schema import setting
from handrail.config.types import Duration, Url
from handrail.otlp.settings import ClientSettings, Names


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpMetricsConfig:
    """A backend that takes the figures of /metrics as OTLP metrics.

    Handrail's own collector does not need them.
    """

    endpoint: Url | None = setting(
        None,
        help="OTLP endpoint of the backend: http(s) for OTLP/HTTP, grpc(s) for OTLP/gRPC",
        example="http://otelcol:4318",
        unset="not sent",
        schemes=("http", "https", "grpc", "grpcs"),
    )
    headers: Mapping[str, str] = setting(
        default_factory=dict,
        help="headers of each request, such as a token",
        example='{authorization: "Bearer ..."}',
        flag="--otlp-metrics-header",
        secret=True,
        unset="none",
    )
    interval: Duration = setting(
        Duration(60 * 10**9),
        help="time between two exports",
        example="15s",
        at_least=10**9,
    )
    ca_file: Path | None = setting(
        None,
        help="PEM file with the authorities that check the backend's certificate; read again when it changes",
        example="/etc/handrail/ca.pem",
        unset="the system's",
    )

    def client(self, endpoint: str) -> ClientSettings:
        """Settings for the client of this endpoint."""
        names = Names("otlp_metrics.", frozenset({"headers", "ca_file"}))
        return ClientSettings(endpoint=endpoint, headers=self.headers, ca_file=self.ca_file, names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTracesConfig:
    """A backend that takes traces of Handrail's own work.

    They are no requests: Handrail's collector neither joins nor stores them.
    """

    endpoint: Url | None = setting(
        None,
        help="OTLP endpoint of the backend that gets traces of this process's own work: http(s) for OTLP/HTTP, grpc(s) for "
        "OTLP/gRPC",
        example="http://tempo:4318",
        unset="no traces",
        schemes=("http", "https", "grpc", "grpcs"),
    )
    headers: Mapping[str, str] = setting(
        default_factory=dict,
        help="headers of each request, such as a token",
        example='{authorization: "Bearer ..."}',
        flag="--own-traces-header",
        secret=True,
        unset="none",
    )
    ca_file: Path | None = setting(
        None,
        help="PEM file with the authorities that check the backend's certificate; read again when it changes",
        example="/etc/handrail/ca.pem",
        unset="the system's",
    )
    sample_ratio: float = setting(
        0.1,
        help="share of frequent operations that is traced (journal commits, entries, batches, late samples); rare ones such as "
        "publishes, compaction and queries are always traced",
        example="1",
        at_least=0,
        at_most=1,
    )

    def client(self, endpoint: str) -> ClientSettings:
        """Settings for the client of this endpoint."""
        names = Names("own_traces.", frozenset({"headers", "ca_file"}))
        return ClientSettings(endpoint=endpoint, headers=self.headers, ca_file=self.ca_file, names=names)
