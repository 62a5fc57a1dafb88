"""List every metric on the collector's /metrics page.

Its own work comes first, then the metrics of joined requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from handrail.metrics.catalogue import CatalogueMetric, metrics_of
from handrail.metrics.registry import AnyMetricDef
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.runtime.connections import connection_rows
from handrail.security.file_reload import ReloadingFile
from handrail.security.metrics import security_rows
from handrail.security.tokens import Authenticator
from handrail_collector.config import CollectorConfig, CollectorListener
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
    joined = joined_rows(pipeline.counting, pipeline.stitcher.clocks, links)
    return [*own_rows(running, links), *joined, *security_rows(watched, guards), *connection_rows(running.gates)]


def collector_metrics() -> list[CatalogueMetric]:
    """List every metric that a collector may expose, in the order of its page.

    The list is that of a collector that forwards. Nothing is started.
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
        )
        found = metrics_of(page_rows(running, SlowLinks(StoreReader(root / "store")), (), ()), COLLECTOR)
        publisher.close()
    return found
