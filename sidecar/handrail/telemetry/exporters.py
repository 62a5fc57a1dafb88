"""The SDK's OTLP exporters, set up by Handrail's configuration alone.

The SDK fills in from ``OTEL_*`` variables what nobody gave, and merges ``OTEL_EXPORTER_OTLP_HEADERS`` even into headers that
somebody gave. In a pod these variables may be the engine's, so an engine's token would go to another backend.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

from handrail.otlp.client import OtlpClient
from handrail.otlp.endpoint import WireProtocol, parse_endpoint
from handrail.otlp.security import ClientSecurity
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Signal

HONOURED: Final = frozenset({"OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"})
"""Variables that describe the process; the configuration alone decides about everything else."""

_CHANNEL: Final = (("grpc.primary_user_agent", "handrail"), ("grpc.enable_http_proxy", 0))


class Closable(Protocol):
    """What both kinds of exporter have."""

    def shutdown(self) -> None: ...


E = TypeVar("E", bound=Closable)


class Outlet(Generic[E]):
    """One backend for one signal, and the SDK's exporter to it.

    ``make``: ``span_exporter`` or ``metric_exporter``. The SDK reads certificates at construction only, so the exporter is made
    again after they have changed. ``current`` and ``close`` belong to one thread at a time.
    """

    def __init__(
        self,
        make: Callable[[ClientSettings, ClientSecurity], E],
        client: ClientSettings,
        security: ClientSecurity,
        signal: Signal,
    ) -> None:
        self.endpoint = client.endpoint
        self._make = make
        self._client = client
        self._security = security
        self._signal = signal
        self._made_with = security.context
        self._exporter = make(client, security)

    @property
    def current(self) -> E:
        """The exporter; a new one after a change of the certificates."""
        context = self._security.context
        if context is not self._made_with:
            self._exporter.shutdown()
            self._made_with, self._exporter = context, self._make(self._client, self._security)
        return self._exporter

    def close(self) -> None:
        """End running retries and close connections."""
        self._exporter.shutdown()

    async def why(self) -> str:
        """Return why the backend accepts nothing.

        The SDK's exporter reports only that it failed.
        """
        checker = OtlpClient(self._client, self._security)
        try:
            return await checker.check(self._signal) or "it answers again"
        finally:
            await checker.close()


def span_exporter(client: ClientSettings, security: ClientSecurity) -> SpanExporter:
    """Make the SDK's exporter of spans; OTLP/gRPC or OTLP/HTTP, as the endpoint says."""
    ignore_environment()
    if parse_endpoint(client.endpoint).protocol is WireProtocol.GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(**_grpc(client, security))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(**_http(client, Signal.TRACES))


def metric_exporter(client: ClientSettings, security: ClientSecurity) -> MetricExporter:
    """Make the SDK's exporter of metrics, as ``span_exporter``."""
    ignore_environment()
    if parse_endpoint(client.endpoint).protocol is WireProtocol.GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter(**_grpc(client, security))
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

    return HttpExporter(**_http(client, Signal.METRICS))


def ignore_environment() -> None:
    """Remove ``OTEL_*`` variables from this process and SDK messages from its log.

    No argument of the HTTP exporter keeps the variables' headers and client certificate away. A backend that is down would
    write two lines for each batch; the callers write one when trouble begins and one when it ends.
    """
    for name in [name for name in os.environ if name.startswith("OTEL_") and name not in HONOURED]:
        del os.environ[name]
    logging.getLogger("opentelemetry").propagate = False
    if not logging.getLogger("opentelemetry").handlers:
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())


def _http(client: ClientSettings, signal: Signal) -> dict[str, Any]:
    import requests
    from opentelemetry.exporter.otlp.proto.http import Compression

    session = requests.Session()
    session.trust_env = False  # a proxy or a .netrc of the environment is not ours either
    authorities = client.ca_file or ssl.get_default_verify_paths().cafile  # requests would use a list of its own
    return {
        "endpoint": parse_endpoint(client.endpoint).url(signal),
        "headers": dict(client.headers),
        "timeout": client.timeout_s,
        "compression": Compression.Gzip,
        "certificate_file": None if authorities is None else os.fspath(authorities),
        "session": session,
    }


def _grpc(client: ClientSettings, security: ClientSecurity) -> dict[str, Any]:
    import grpc

    endpoint = parse_endpoint(client.endpoint)
    return {
        "endpoint": endpoint.authority,
        "insecure": not endpoint.secure,
        "credentials": security.credentials,
        "headers": tuple((name.lower(), value) for name, value in client.headers.items()),
        "timeout": client.timeout_s,
        "compression": grpc.Compression.Gzip,
        "channel_options": _CHANNEL,
    }
