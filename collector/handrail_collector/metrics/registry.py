"""List every metric on the collector's /metrics page.

Its own work comes first, then the metrics of joined requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from opentelemetry.sdk.resources import Resource

from handrail import conventions as names
from handrail.config.telemetry import OwnTracesConfig
from handrail.config.types import Url
from handrail.metrics.catalogue import CatalogueMetric, metrics_of
from handrail.metrics.registry import AnyMetricDef
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.runtime.connections import connection_rows
from handrail.security.file_reload import ReloadingFile
from handrail.security.metrics import security_rows
from handrail.security.tokens import Authenticator
from handrail.telemetry.metrics import OtlpMetricsStats, otlp_metrics_rows
from handrail.telemetry.traces import own_traces, own_traces_rows
from handrail_collector.config import CollectorConfig, CollectorListener
from handrail_collector.counters import KEPT
from handrail_collector.journal.journal import Journal, JournalSettings
from handrail_collector.metrics.collector_metrics import own_rows
from handrail_collector.metrics.request_metrics import joined_rows
from handrail_collector.metrics.slow_links import SlowLinks
from handrail_collector.pipeline import Pipeline
from handrail_collector.sinks.otlp import ForwardSettings, OtlpForward
from handrail_collector.status import Running, collector_gates
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader

COLLECTOR: Final = "collector"


def page_rows(
    running: Running, links: SlowLinks, watched: Sequence[ReloadingFile[Any]], guards: Sequence[Authenticator]
) -> list[AnyMetricDef]:
    """List all metrics of a running collector.

    ``watched``: certificates and tokens. ``guards``: authenticators of the listeners.
    """
    pipeline = running.pipeline
    rows: list[AnyMetricDef] = [
        *own_rows(running, links),
        *(otlp_metrics_rows(running.pushed, names.METRIC_COLLECTOR) if running.pushed is not None else ()),
        *(own_traces_rows(running.traces.stats, names.METRIC_COLLECTOR) if running.traces is not None else ()),
        *joined_rows(pipeline.counting, pipeline.stitcher.clocks, links),
        *security_rows(watched, guards),
        *connection_rows(running.gates),
    ]
    return [replace(row, kept=KEPT in row.help) for row in rows]


def collector_metrics() -> list[CatalogueMetric]:
    """List every metric that a collector may expose, in the order of its page.

    The list is that of a collector that forwards and reports about itself. Nothing is started.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        publisher = StorePublisher(root / "store")
        recovered = publisher.open()
        journal = Journal(JournalSettings(folder=root / "journal").open_log())
        gates = collector_gates(CollectorConfig())
        for listener in CollectorListener:
            gates.gate(listener.value)
        running = Running(
            journal,
            Pipeline(journal, publisher, recovered),
            OtlpServer(journal, grpc=None, http=("127.0.0.1", 0), loopback_only=True),
            (OtlpForward(ForwardSettings(client=ClientSettings(endpoint="http://127.0.0.1:4318"))),),
            Upkeep(publisher, UpkeepSettings()),
            0,
            gates,
            OtlpMetricsStats(),
            own_traces(OwnTracesConfig(endpoint=Url("http://127.0.0.1:4318")), Resource({}))[0],
        )
        found = metrics_of(page_rows(running, SlowLinks(StoreReader(root / "store")), (), ()), COLLECTOR)
        publisher.close()
    return found
