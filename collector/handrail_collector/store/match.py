"""Whether a row is the request that an id in any form names, and how surely. Pure; ``read.py`` narrows down in SQL first."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from handrail.identity import candidate_keys
from handrail_collector.rows import RequestRow

MIN_PREFIX = 6
"""Fewest characters that may stand for the id that begins with them."""


class Match(IntEnum):
    """How an id fits a row, surest first."""

    EQUAL = 0  # it is one of the row's ids
    KEY = 1  # one of its keys is (``handrail.identity.candidate_keys``)
    PREFIX = 2  # one of the row's ids begins with it


def match(row: RequestRow, any_id: str, keys: tuple[str, ...]) -> Match | None:
    """How ``any_id``, whose candidate keys are ``keys``, fits ``row``; None when it does not."""
    others = [text for text in (row.client_request_id, row.request_key, row.response_id) if text]
    own = (row.trace_id, row.request_id)
    plain = any_id.lower()
    if any_id in others or plain in (*own, *row.other_trace_ids):
        return Match.EQUAL
    if row.request_key in keys or row.client_request_id in keys:
        return Match.KEY
    if len(any_id) >= MIN_PREFIX and (any(t.startswith(any_id) for t in others) or any(t.startswith(plain) for t in own)):
        return Match.PREFIX
    return None


def best(rows: Iterable[RequestRow], any_id: str) -> list[RequestRow]:
    """Of ``rows`` those that fit best, in their order."""
    keys = candidate_keys(any_id)
    fits = [(how, row) for row in rows if (how := match(row, any_id, keys)) is not None]
    surest = min((how for how, _ in fits), default=None)
    return [row for how, row in fits if how is surest]
