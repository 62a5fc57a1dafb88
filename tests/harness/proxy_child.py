"""Run a proxy in its own process, for measurements from outside.

``python harness/proxy_child.py UPSTREAM_PORT ROLE``
Prints ``PORT n`` once it listens. On SIGTERM it drains and prints what it saw as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter

import uvloop

from handrail.records import Exchange, Observation, Process, Role
from handrail.runtime.process import freeze_gc
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.live_metrics.slo import RequestObjectives
from handrail_sidecar.proxy.settings import ProxySettings
from handrail_sidecar.sources.proxy import ProxySource


async def main(upstream_port: int, role: Role) -> None:
    outcomes: Counter[str] = Counter()
    events = 0

    def sink(record: Observation) -> None:
        nonlocal events
        assert isinstance(record, Exchange)
        outcomes[record.outcome.value] += 1
        events += record.events

    source = ProxySource(
        ProxySettings(
            listen_host="127.0.0.1",
            listen_port=0,
            upstream_host="127.0.0.1",
            upstream_port=upstream_port,
            role=role,
            process=Process(role=role, instance=f"127.0.0.1:{upstream_port}", host="h"),
        ),
        sink,
        live=LiveRequests(role, RequestObjectives(), wall=time.time_ns),
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await source.start()
    freeze_gc(young=5_000)  # as handrail_sidecar.app does
    print("PORT", source.address[1], flush=True)
    await stop.wait()
    await source.shutdown(5)
    stats = source.stats
    print(
        json.dumps(
            {
                "records": sum(outcomes.values()),
                "outcomes": outcomes,
                "events": events,
                "client_bytes": stats.client_bytes,
                "upstream_bytes": stats.upstream_bytes,
                "observer_errors": stats.observer_errors,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Role(sys.argv[2])))
