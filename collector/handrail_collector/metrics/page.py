"""The collector's page: its own work, then what it knows of joined requests; and every metric on it as data."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from handrail.auth import Guard
from handrail.catalogue import Metric, metrics_of
from handrail.connectionmetrics import connection_rows
from handrail.otlp.server import OtlpServer
from handrail.otlp.settings import ClientSettings
from handrail.securitymetrics import security_rows
from handrail.selfmetrics import AnyRow
from handrail.watched import Watched
from handrail_collector.config import CollectorConfig, CollectorListener
from handrail_collector.journal.journal import Journal, JournalSettings
from handrail_collector.metrics.joined import joined_rows
from handrail_collector.metrics.own import own_rows
from handrail_collector.metrics.slow_links import SlowLinks
from handrail_collector.pipeline import Pipeline
from handrail_collector.running import Running, collector_gates
from handrail_collector.sinks.otlp import ForwardSettings, OtlpForward
from handrail_collector.store.publish import Publisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.upkeep import Upkeep, UpkeepSettings

COLLECTOR: Final = "collector"


def page_rows(running: Running, links: SlowLinks, watched: Sequence[Watched[Any]], guards: Sequence[Guard]) -> list[AnyRow]:
    """All of them. ``watched``: certificates and tokens; ``guards``: of what listens."""
    pipeline = running.pipeline
    joined = joined_rows(pipeline.counting, pipeline.stitcher.clocks, links)
    return [*own_rows(running, links), *joined, *security_rows(watched, guards), *connection_rows(running.gates)]


def collector_metrics() -> list[Metric]:
    """Every metric that a collector may expose, in the order of its page: of one that forwards. Nothing of it is started."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        publisher = Publisher(root / "store")
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
