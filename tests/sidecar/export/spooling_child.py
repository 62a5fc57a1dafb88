"""A process that spools exchanges until it is killed.

It prints how many exchanges the spool has. test_exporter_kill.py starts it.
Arguments: spool folder, endpoint, sender id, number of the first exchange, how many to send before a clean end (0: until killed).
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from builders.exchanges import PROCESS, exchange
from handrail.otlp.client import OtlpClient
from handrail.otlp.retry import Backoff
from handrail.otlp.settings import ClientSettings
from handrail.wire.exchange import resource_of
from handrail_sidecar.export.exporter import Exporter, ExportSettings


async def main(folder: str, endpoint: str, sender: str, first: int, count: int) -> None:
    settings = ExportSettings(folder=folder, batch_spans=20, flush_interval_s=0.002, backoff=Backoff(initial_s=0.005, max_s=0.02))
    exporter = Exporter(
        settings, resource_of(replace(PROCESS, sender=sender)), lambda: OtlpClient(ClientSettings(endpoint=endpoint))
    )
    await exporter.start()
    number = statement = 0
    while number < count or not count:
        exporter.sink(exchange(first + number))
        number += 1
        if number % 7 == 0:
            await asyncio.sleep(0.0005)  # lets the tasks run; the test counts the output, and does not time it
        if exporter.stats.spans_spooled > statement:
            statement = exporter.stats.spans_spooled
            print(statement, flush=True)
    await exporter.shutdown(60)
    print(exporter.stats.spans_spooled, exporter.waiting_bytes, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
