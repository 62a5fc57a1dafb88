"""Run one load through one configuration and keep both sides' data.

The sides are the tests' own and Handrail's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handrail_collector.rows import RequestRow
from handrail_collector.store.read import StoreReader
from handrail_collector.store.tables.spans import SpanRow
from vllm.client import Request, Result, load, mixed
from vllm.proxy import Handoff
from vllm.stack import Bed, Configuration, Stack, running_stack

REQUESTS = 100
CONCURRENCY = 4
WORKING = frozenset({"prefill", "decode"})


def roles(row: RequestRow) -> set[str]:
    """Return the roles that gave evidence."""
    return {join.evidence.partition(":")[0] for join in row.joins}


def is_joined(row: RequestRow) -> bool:
    """Tell whether a row has the client's side and evidence of P and of D."""
    return row.scope == "edge" and roles(row) >= WORKING


def evidence(row: RequestRow) -> frozenset[str]:
    return frozenset(join.evidence for join in row.joins)


def is_whole(row: RequestRow, configuration: Configuration) -> bool:
    """Tell whether a row is joined and decided, with all attached evidence.

    Version 0 is what the API reports for a request still open.
    """
    return is_joined(row) and row.version > 0 and row.complete and evidence(row) >= configuration.evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was sent, what came back, and what Handrail made of it."""

    configuration: Configuration
    results: Sequence[Result]
    handoffs: Sequence[Handoff]
    rows: Sequence[RequestRow]
    spans: Mapping[str, SpanRow]  # by span id, of all rows

    def row(self, result: Result) -> RequestRow:
        """Return the row of one client request; fail when there is none or more than one."""
        found = [row for row in self.rows if row.client_request_id == result.request.request_id]
        assert len(found) == 1, f"{len(found)} rows for {result.request.request_id}"
        return found[0]


def observe(stack: Stack, requests: Sequence[Request], concurrency: int) -> tuple[list[Result], list[RequestRow]]:
    """Send ``requests`` through the edge and wait for as many new whole rows.

    It waits no longer than the timeout.
    """
    before = {row.request_id for row in stack.api.rows()}
    results = load(stack.edge_url, requests, concurrency)

    def new(rows: Sequence[RequestRow]) -> list[RequestRow]:
        return [row for row in rows if row.request_id not in before]

    def all_whole(rows: Sequence[RequestRow]) -> bool:
        return sum(is_whole(row, stack.configuration) for row in new(rows)) >= len(requests)

    rows = stack.wait_rows(all_whole)
    return results, new(rows)


def stored_spans(data: Path, rows: Sequence[RequestRow]) -> dict[str, SpanRow]:
    """Return the spans of ``rows`` in a collector's folder, by span id."""
    reader = StoreReader(data / "store")
    try:
        return {span.span_id: span for row in rows for span in reader.spans(row)}
    finally:
        reader.close()


def run(bed: Bed, configuration: Configuration, folder: Path) -> Run:
    """Send 100 mixed requests through ``configuration``.

    Everything around the engines starts for it and stops after.
    """
    with running_stack(bed, configuration, folder) as stack:
        requests = mixed(REQUESTS, configuration.id, context=configuration.client_context)
        results, rows = observe(stack, requests, CONCURRENCY)
        handoffs = stack.handoffs()
    return Run(
        configuration=configuration,
        results=results,
        handoffs=handoffs,
        rows=rows,
        spans=stored_spans(folder / "data", rows),
    )


@dataclass(slots=True)
class Runs:
    """The runs of a session: each configuration runs once, at its first use.

    If it failed, it fails for every later use.
    """

    bed: Bed
    folder: Path
    _done: dict[str, Run | Exception] = field(default_factory=dict)

    def of(self, configuration: Configuration) -> Run:
        if configuration.id not in self._done:
            try:
                self._done[configuration.id] = run(self.bed, configuration, self.folder / configuration.id)
            except Exception as error:
                self._done[configuration.id] = error
                raise
        done = self._done[configuration.id]
        if isinstance(done, Exception):
            raise RuntimeError(f"the run of {configuration.id} failed for the test that asked first") from done
        return done
