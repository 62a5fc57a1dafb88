"""Compare one request with those around it, from a store.

The API and the command line add the result to the request.
"""

from __future__ import annotations

from typing import Any

from handrail_collector.explain.period.request_comparison import against, to_json
from handrail_collector.explain.period.tail import requests_in
from handrail_collector.rows import RequestRow
from handrail_collector.store.queries.neighbours import around
from handrail_collector.store.read import StoreReader


def compared(reader: StoreReader, row: RequestRow) -> dict[str, Any] | None:
    """Return the comparison as JSON; None where there is nothing to compare.

    Raises ``StoreDamagedError``.
    """
    if row.phase_of != "ttft" or row.ttft_token_ns is None:
        return None
    found = around(reader, row)
    return to_json(against(row, requests_in(found.rows), found.since_unix_ns, found.until_unix_ns))
