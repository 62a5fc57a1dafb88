"""Make the rows of a request's hand-offs, each with its outcome."""

from __future__ import annotations

from handrail.records import KvFetch, KvPublish
from handrail_collector.explain.request.kv_outcome import JudgedHandoff, RequestHandoffs
from handrail_collector.rows import FetchRow
from handrail_collector.stitch.group import RequestGroup


def fetch_rows(group: RequestGroup, handed: RequestHandoffs, version: int, client_request_id: str | None) -> tuple[FetchRow, ...]:
    """Return the rows of the hand-offs, in order and numbered."""
    trace_id, request_id = group.identity
    first, last = min(e.offset for e in group.evidence), max(e.offset for e in group.evidence)
    return tuple(
        _row(one, trace_id, request_id, version, number, client_request_id, first, last)
        for number, one in enumerate(handed.every)
    )


def _row(
    judged: JudgedHandoff, trace_id: str, request_id: str, version: int, number: int, client: str | None, first: int, last: int
) -> FetchRow:
    handoff, verdict = judged.handoff, judged.verdict
    fetch, publish = handoff.fetch, handoff.publish
    record = fetch or publish
    assert record is not None
    started = fetch.known_unix_ns if fetch is not None else publish.published_unix_ns if publish is not None else 0
    transfer, bound, posted_unix_ns = _transfer(fetch, publish)
    return FetchRow(
        started_unix_ns=started,
        trace_id=trace_id,
        request_id=request_id,
        version=version,
        number=number,
        span_id=record.ids.span_id,
        client_request_id=client,
        direction=record.direction.value if record.direction is not None else None,
        mode=record.mode,
        connector=record.connector,
        consumer_instance=handoff.consumer.instance if handoff.consumer is not None else None,
        producer_instance=handoff.producer.instance if handoff.producer is not None else None,
        consumer_host=handoff.consumer.host if handoff.consumer is not None else None,
        producer_host=handoff.producer.host if handoff.producer is not None else None,
        consumer_engine_id=fetch.engine_id if fetch is not None else None,
        producer_engine_id=publish.engine_id if publish is not None else fetch.peer_engine_id if fetch is not None else None,
        consumer_request=fetch.request_id if fetch is not None else None,
        producer_request=publish.request_id if publish is not None else fetch.peer_request_id if fetch is not None else None,
        producer_address=f"{fetch.peer_host}:{fetch.peer_port}" if fetch is not None and fetch.peer_host else None,
        outcome=verdict.outcome.value,
        reason=verdict.reason or None,
        error=(fetch.failure_error if fetch is not None else None) or (publish.failure_error if publish is not None else None),
        evidence=verdict.evidence,
        tainted=verdict.tainted,
        open=verdict.open,
        duration_ns=_duration(fetch, publish),
        wait_ns=_wait(fetch),
        handshake_ns=_handshake(fetch),
        posted_ns=posted_unix_ns - started if posted_unix_ns is not None else None,
        transfer_ns=transfer,
        transfer_bound_ns=bound,
        notice_ns=_between(fetch.done_ns, fetch.noticed_ns) if fetch is not None else None,
        held_ns=max(0, judged.evidence.wait_ns[0]) if judged.evidence.wait_ns[0] is not None else None,
        clock_bound_ns=_width(judged.evidence.wait_ns),
        lease_ns=judged.evidence.lease_ns,
        late_ns=verdict.late_ns,
        lost_ns=verdict.lost_ns,
        tokens=fetch.tokens_wanted if fetch is not None else publish.tokens if publish is not None else None,
        tokens_local=fetch.tokens_local if fetch is not None else None,
        blocks=record.blocks,
        block_bytes=record.block_bytes,
        bytes_expected=fetch.bytes_expected if fetch is not None else publish.kv_bytes if publish is not None else None,
        bytes_moved=_moved(fetch, publish),
        descriptors=record.descriptors,
        ranks=fetch.ranks if fetch is not None else None,
        first_offset=first,
        last_offset=last,
    )


def _moved(fetch: KvFetch | None, publish: KvPublish | None) -> int | None:
    """Return the bytes moved, as counted by the side that moved them (P for a push)."""
    for record in (publish, fetch) if fetch is not None and fetch.mode == "push" else (fetch, publish):
        if record is not None and record.bytes_moved is not None:
            return record.bytes_moved
    return None


def _transfer(fetch: KvFetch | None, publish: KvPublish | None) -> tuple[int | None, int | None, int | None]:
    """Return the transfer's duration, its bound, and when it was posted.

    All by the clock of the side that moved the bytes.
    """
    for record in (publish, fetch) if fetch is None or fetch.mode == "push" else (fetch,):
        if (
            record is not None
            and record.posted_ns is not None
            and (took := _between(record.posted_ns, record.done_ns)) is not None
        ):
            began = record.known_unix_ns if isinstance(record, KvFetch) else record.published_unix_ns
            return took, record.done_bound_ns, began + record.posted_ns
    return None, None, None


def _wait(fetch: KvFetch | None) -> int | None:
    """Return the time until the transfer was posted or the handshake began.

    As the phase ``kv_wait``.
    """
    if fetch is None or (fetch.handshake_begin_ns is None and fetch.posted_ns is not None):
        return fetch.posted_ns if fetch is not None else None
    return fetch.load_started_ns


def _handshake(fetch: KvFetch | None) -> int | None:
    """Return the time of the handshake, until the engine posted the waiting transfer.

    As the phase ``kv_handshake``.
    """
    if fetch is None:
        return None
    if fetch.handshake_begin_ns is None:
        return 0 if fetch.posted_ns is not None or fetch.done_ns is not None else None
    began = fetch.load_started_ns if fetch.load_started_ns is not None else fetch.handshake_begin_ns
    return _between(began, fetch.posted_ns if fetch.posted_ns is not None else fetch.handshake_end_ns)


def _duration(fetch: KvFetch | None, publish: KvPublish | None) -> int | None:
    if fetch is not None:
        return next((at for at in (fetch.noticed_ns, fetch.ended_ns, fetch.done_ns, fetch.seen_ns) if at is not None), None)
    if publish is None:
        return None
    ends = (publish.freed_ns, publish.expired_ns, publish.read_ns, publish.seen_ns)
    return next((at for at in ends if at is not None), None)


def _between(begin_ns: int | None, end_ns: int | None) -> int | None:
    return max(0, end_ns - begin_ns) if begin_ns is not None and end_ns is not None else None


def _width(held_ns: tuple[int | None, int | None]) -> int | None:
    least, most = held_ns
    return most - least if least is not None and most is not None and most != least else None
