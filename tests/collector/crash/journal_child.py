"""A child process with a collector's receiver and journal, started to be killed.

``test_journal_kill.py`` starts it with the journal folder as its argument.
It prints its HTTP port on stdout, then serves until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

from handrail.otlp.receiver.server import OtlpServer
from handrail_collector.journal.journal import Journal, JournalSettings


async def main(folder: str) -> None:
    journal = Journal(JournalSettings(folder=folder).open_log())
    await journal.start()
    server = OtlpServer(journal, http=("127.0.0.1", 0), loopback_only=True)
    await server.start()
    assert server.http_address is not None
    print(server.http_address[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
