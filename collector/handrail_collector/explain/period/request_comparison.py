"""Decide whether one request was slow for its size, and which phase grew where.

It is compared with the requests around it. The API and the command line add the result to the request.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from handrail_collector.explain.period.attribution import cause_of
from handrail_collector.explain.period.baseline import LEAST_REQUESTS, fit
from handrail_collector.explain.period.request_columns import RequestColumns
from handrail_collector.explain.period.tail import requests_in
from handrail_collector.rows import RequestRow
from handrail_collector.store.queries.neighbours import around
from handrail_collector.store.read import StoreReader


class RequestVerdict(str, Enum):
    """What can be concluded about the request's TTFT."""

    SLOW = "slow"
    NOT_SLOW = "not_slow"
    CANNOT_TELL = "cannot_tell"  # too few requests around it


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """One request against the ``compared`` ones of its scope and model in that time.

    ``baseline_ttft_ns``: typical of prompts with as many tokens to compute.
    ``phase``: the phase that likely grew most, by ``excess_ns`` at ``place`` (a host, a link ``P>D``, "router", or ""). None:
    none grew, or one of those in ``ambiguous`` may have grown most.
    ``significant``: such growths are much more frequent at that place and time than elsewhere.
    """

    verdict: RequestVerdict
    since_unix_ns: int
    until_unix_ns: int
    compared: int
    needed: int = LEAST_REQUESTS
    uncached_tokens: int | None = None
    baseline_ttft_ns: int | None = None
    late_ns: int | None = None
    phase: str | None = None
    place: str = ""
    excess_ns: int = 0
    ambiguous: tuple[str, ...] = ()
    may_be: tuple[str, ...] = ()
    significant: bool = False


def against(row: RequestRow, others: RequestColumns, since_unix_ns: int, until_unix_ns: int) -> BaselineComparison | None:
    """Compare ``row`` with ``others``.

    None for a request whose phases do not sum to a TTFT: there is nothing to compare.
    """
    if row.phase_of != "ttft" or row.ttft_token_ns is None:
        return None
    typical = fit(others)
    nothing = BaselineComparison(
        verdict=RequestVerdict.CANNOT_TELL, since_unix_ns=since_unix_ns, until_unix_ns=until_unix_ns, compared=len(others)
    )
    if typical is None:
        return nothing
    cause = cause_of(row, typical)
    assert cause.late_ns is not None
    return replace(
        nothing,
        verdict=RequestVerdict.SLOW if cause.slow else RequestVerdict.NOT_SLOW,
        uncached_tokens=None if row.prompt_tokens is None else row.prompt_tokens - (row.cached_tokens or 0),
        baseline_ttft_ns=row.ttft_token_ns - cause.late_ns,
        late_ns=cause.late_ns,
        phase=cause.phase.value if cause.phase is not None else None,
        place=cause.place,
        excess_ns=cause.excess_ns,
        ambiguous=tuple(phase.value for phase in cause.ambiguous),
        may_be=tuple(phase.value for phase in cause.may_be),
        significant=cause.significant,
    )


def to_json(found: BaselineComparison | None) -> dict[str, Any] | None:
    """Return the comparison as docs/http-api.md defines it."""
    return None if found is None else asdict(found) | {"verdict": found.verdict.value}


def compared(reader: StoreReader, row: RequestRow) -> dict[str, Any] | None:
    """Return the comparison as JSON; None where there is nothing to compare.

    Raises ``StoreDamagedError``.
    """
    if row.phase_of != "ttft" or row.ttft_token_ns is None:
        return None
    found = around(reader, row)
    return to_json(against(row, requests_in(found.rows), found.since_unix_ns, found.until_unix_ns))
