"""Decide whether an id in any form names the request of a row, and how surely.

This module has no side effects. ``read.py`` narrows the candidates in SQL first.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from handrail.identity import candidate_keys
from handrail_collector.rows import RequestRow

MIN_PREFIX = 6
"""Shortest prefix that may stand for an id, characters."""


class Match(IntEnum):
    """How an id matches a row, surest first."""

    EQUAL = 0  # the id is one of the row's ids
    KEY = 1  # a key of the id is one of the row's keys (``handrail.identity.candidate_keys``)
    PREFIX = 2  # one of the row's ids begins with the id


def match(row: RequestRow, any_id: str, keys: tuple[str, ...]) -> Match | None:
    """Return how ``any_id`` matches ``row``; None when it does not.

    ``keys``: the candidate keys of ``any_id``.
    """
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
    """Select the rows with the surest match, in their order."""
    keys = candidate_keys(any_id)
    fits = [(how, row) for row in rows if (how := match(row, any_id, keys)) is not None]
    surest = min((how for how, _ in fits), default=None)
    return [row for how, row in fits if how is surest]
