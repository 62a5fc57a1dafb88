"""Explain the slowest requests: phase growth, each one's cause, concentration.

*Slow* is from the 99th percentile on, *usual* from the first to the third quartile.
The phases of both sum to their TTFT, so the whole difference is reported: by phase, with the unattributed part by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from handrail.phases import Phase, Place
from handrail_collector.explain.period.attribution import Attribution, causes
from handrail_collector.explain.period.baseline import LEAST_REQUESTS, Baseline, fit
from handrail_collector.explain.period.concentration import LEAST_TIMES, Concentration
from handrail_collector.explain.period.host_pauses import PausedRequests, attribute_pauses
from handrail_collector.explain.period.request_columns import PHASES, RequestColumns
from handrail_collector.explain.stalls.evidence import StallCause
from handrail_collector.store.queries.period import PAUSED
from handrail_collector.store.schema import UNATTRIBUTED_DECODE, UNATTRIBUTED_PREFILL, phase_column
from handrail_collector.store.tables.requests import may_be

LEAST_SLOW: Final = 10
"""Fewest slow requests for any conclusion; that needs 100 times as many requests."""

LEAST_SHARE: Final = 0.05
"""Smallest share of the slow requests with one cause that is reported.

A smaller part is not worth an alert.
"""

LEAST_NAMED: Final = 8
"""Fewest requests with one cause that are named.

In healthy runs one burst, or a few of the longest prompts at one host, make as many as six alike.
"""

MORE_THAN_ORDINARY: Final = 0.5
"""Least attributable fraction of a cause where slow requests concentrate.

At a host where they concentrate, a cause below it does not count: the longest prompts may all go to one host, and a queue that is
as frequent everywhere is no cause.
"""

EXAMPLES: Final = 3

_ON_LINK: Final = [PHASES.index(p) for p in (Phase.KV_WAIT, Phase.KV_HANDSHAKE, Phase.KV_TRANSFER, Phase.UNATTRIBUTED)]
_UNATTRIBUTED: Final = phase_column(Phase.UNATTRIBUTED.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMore:
    """Mean of one phase in usual and in slow requests.

    ``place``: the process, for ``unattributed``.
    """

    phase: str
    place: str
    baseline_ns: int
    slow_ns: int
    share: float  # of the whole difference; negative where the phase was shorter

    @property
    def excess_ns(self) -> int:
        """How much longer the slow ones took."""
        return self.slow_ns - self.baseline_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TailCause:
    """Slow requests with one cause: ``phase`` at ``place``.

    ``place``: a host, a link ``P>D``, "router", or "" where unknown.
    ``why``: "host_pause" where the engine's process paused there, else "".
    ``phases``: the phases that grew most in these requests, most frequent first. Without ``why`` that is ``phase`` alone; with it
    there may be none.
    ``excess_ns``: how much longer that phase is than its baseline, on average; or how long the process paused.
    ``may_be``: the phases that ``unattributed`` may hide.
    ``first_unix_ns``, ``last_unix_ns``: nine in ten of them started between these.
    """

    why: str
    phase: str
    phases: tuple[str, ...]
    place: str
    requests: int
    share: float
    excess_ns: int
    baseline_ns: int
    may_be: tuple[str, ...]
    first_unix_ns: int
    last_unix_ns: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TailCauses:
    """The causes of the slow requests, decided one by one.

    ``named``: causes that are more frequent at that place and time than is ordinary, each of a large enough share.
    ``ambiguous``: requests in which two phases grew alike, so that none is named.
    ``at_base_rate``: requests without a cause that is out of the ordinary (the longest prompts, bursts), or with one of too few
    requests.
    ``by_size_ns``: mean time that longer prompts account for.
    """

    slow: int
    named: tuple[TailCause, ...]
    ambiguous: int
    at_base_rate: int
    by_size_ns: int
    examples: tuple[str, ...]  # of the ordinary ones


def phases_more(
    usual: Sequence[int], baseline_requests: int, slow: Sequence[int], slow_requests: int, names: Sequence[str]
) -> list[PhaseMore]:
    """Return mean phases from sums by column, largest growth first.

    ``names``: those of ``queries.period.PHASE_SUMS``, then the TTFT itself.
    """
    u, s = _parts(names, usual, baseline_requests), _parts(names, slow, slow_requests)
    longer = sum(s.values()) - sum(u.values())
    found = [
        PhaseMore(
            phase=phase,
            place=place,
            baseline_ns=round(u[phase, place]),
            slow_ns=round(s[phase, place]),
            share=(s[phase, place] - u[phase, place]) / longer if longer else 0.0,
        )
        for phase, place in u
        if u[phase, place] or s[phase, place]
    ]
    return sorted(found, key=lambda each: -each.excess_ns)


def _parts(names: Sequence[str], sums: Sequence[int], requests: int) -> dict[tuple[str, str], float]:
    """Return the mean by phase and place.

    What the phases leave of the TTFT is unattributed on the path.
    """
    by = dict(zip(names, sums, strict=True))
    total = by.pop("value_sum_ns")
    inside = {Place.PREFILL.value: by.pop(UNATTRIBUTED_PREFILL), Place.DECODE.value: by.pop(UNATTRIBUTED_DECODE)}
    by.pop(_UNATTRIBUTED)
    found = {(phase.value, ""): by[phase_column(phase.value)] for phase in Phase if phase is not Phase.UNATTRIBUTED}
    found |= {(Phase.UNATTRIBUTED.value, place): value for place, value in inside.items()}
    found[Phase.UNATTRIBUTED.value, Place.PATH.value] = total - sum(found.values())
    return {key: value / max(1, requests) for key, value in found.items()}


def causing(rows: pa.Table, places: Sequence[Concentration]) -> TailCauses | None:
    """Return the causes of the slow requests; None where too few give a baseline.

    ``rows``: ``tail_and_sample.sql`` of one scope.
    A slow request has a cause out of the ordinary where such growths are more frequent at that place and time
    (``attribution.py``), or
    where it is at one of ``places``: hosts and links where slow requests concentrate for the whole period.
    """
    sampled, slow = rows.filter(rows["sampled"]), rows.filter(rows["slow"])
    typical = fit(requests_in(sampled))
    if typical is None or slow.num_rows < LEAST_SLOW or sampled.num_rows < LEAST_REQUESTS:
        return None
    requests = requests_in(slow)
    found = causes(requests, typical)
    place, concentrated = _concentrated(slow, found, places)
    others = sampled.filter(pc.invert(sampled["slow"]))
    least = ceil(max(LEAST_NAMED, LEAST_SHARE * slow.num_rows))
    paused_requests = attribute_pauses(requests, _paused_ns(slow), found, requests_in(others), _paused_ns(others), least)
    out_of_ordinary = (
        (found.significant | concentrated & (found.surplus >= MORE_THAN_ORDINARY)) & (found.leading >= 0) & ~paused_requests.still
    )
    standing = out_of_ordinary & found.clear
    groups: dict[tuple[int, str], list[int]] = {}
    for at in np.flatnonzero(standing).tolist():
        groups.setdefault((int(found.leading[at]), str(place[at])), []).append(at)
    named = [
        _named(PHASES[phase], place, np.array(places), slow, found, requests, typical)
        for (phase, place), places in groups.items()
        if len(places) >= least
    ]
    named += [
        _paused(host, at, slow, paused_requests, paused_requests.phases(host, found), requests)
        for host, at in paused_requests.by_host()
    ]
    report = sum(each.requests for each in named)
    alike = int((out_of_ordinary & ~found.clear).sum())
    size = (
        typical.by_size_ns(requests.uncached_tokens).sum(axis=1).mean()
        - typical.by_size_ns(requests_in(_usual(sampled)).uncached_tokens).sum(axis=1).mean()
    )
    return TailCauses(
        slow=slow.num_rows,
        named=tuple(sorted(named, key=lambda each: (-each.requests, each.phase, each.place))),
        ambiguous=alike,
        at_base_rate=slow.num_rows - report - alike,
        by_size_ns=round(float(size)),
        examples=_ids(slow, _middle(requests.ttft_ns, np.flatnonzero(~standing & ~paused_requests.still))),
    )


def _concentrated(slow: pa.Table, found: Attribution, places: Sequence[Concentration]) -> tuple[Any, Any]:
    """Return each leading phase's place, and which requests concentrate there.

    They are slow by that phase. At a host that one phase made slow, requests slow by another phase are as ordinary as elsewhere.
    """
    hosts = {name: _texts(slow[name]) for name in ("prefill_host", "decode_host")}
    values = hosts | {"link": hosts["prefill_host"] + ">" + hosts["decode_host"]}
    place, concentrated = found.place.copy(), np.zeros(slow.num_rows, bool)
    for contrast in places:
        if contrast.dimension in values:
            here = values[contrast.dimension] == contrast.value
            inside = np.bincount(found.leading[here & (found.leading >= 0)], minlength=len(PHASES)) / _usual_share(contrast)
            outside = np.bincount(found.leading[~here & (found.leading >= 0)], minlength=len(PHASES)) + 0.5
            more = inside >= LEAST_TIMES * outside / (1 - _usual_share(contrast))
            here &= more[found.leading] & (found.leading >= 0)
            concentrated |= here
            if contrast.dimension == "link":
                place[here & np.isin(found.leading, _ON_LINK)] = contrast.value
    return place, concentrated


def _usual_share(contrast: Concentration) -> float:
    """Return the share of the usual requests with the value, kept off 0 and 1."""
    return min(0.99, max(0.01, contrast.controls_share))


def _usual(sampled: pa.Table) -> pa.Table:
    low, high = pc.quantile(sampled["ttft_ns"], [0.25, 0.75], interpolation="nearest").to_pylist()
    return sampled.filter(pc.and_(pc.greater_equal(sampled["ttft_ns"], low), pc.less_equal(sampled["ttft_ns"], high)))


def _named(
    phase: Phase, place: str, at: Any, slow: pa.Table, found: Attribution, requests: RequestColumns, typical: Baseline
) -> TailCause:
    column = PHASES.index(phase)
    first, last = _most_between(requests, at)
    shapes = pc.unique(slow["phase_shape"].take(pa.array(at))).to_pylist() if phase is Phase.UNATTRIBUTED else []
    inside, times = np.unique(requests.rest_at[at].astype(str), return_counts=True)
    return TailCause(
        why="",
        phase=phase.value,
        phases=(phase.value,),
        place=place,
        requests=len(at),
        share=len(at) / slow.num_rows,
        excess_ns=round(float(found.excess_ns[at].mean())),
        baseline_ns=round(float(typical.expected_ns(requests)[at, column].mean())),
        may_be=_hidden(shapes, str(inside[times.argmax()])),
        first_unix_ns=first,
        last_unix_ns=last,
        examples=_ids(slow, _middle(found.excess_ns, at)),
    )


def _paused(
    host: str, at: Any, slow: pa.Table, paused_requests: PausedRequests, phases: Sequence[str], requests: RequestColumns
) -> TailCause:
    first, last = _most_between(requests, at)
    return TailCause(
        why=StallCause.HOST_PAUSE.value,
        phase=phases[0] if phases else "",
        phases=tuple(phases),
        place=host,
        requests=len(at),
        share=len(at) / slow.num_rows,
        excess_ns=round(float(paused_requests.paused_ns[at].mean())),
        baseline_ns=0,
        may_be=(),
        first_unix_ns=first,
        last_unix_ns=last,
        examples=_ids(slow, _middle(paused_requests.paused_ns, at)),
    )


def _most_between(requests: RequestColumns, at: Any) -> tuple[int, int]:
    started = np.sort(requests.started_unix_ns[at])
    return int(started[len(at) // 20]), int(started[-1 - len(at) // 20])


def _hidden(shapes: Iterable[str], process: str) -> tuple[str, ...]:
    hidden = {name for shape in shapes for name in may_be(shape, process)}
    return tuple(phase.value for phase in Phase if phase.value in hidden)


def _middle(values: Any, at: Any) -> Any:
    """Return the indices of a few typical ones, around the median of the value."""
    ordered = at[np.argsort(values[at], kind="stable")]
    first = max(0, len(ordered) // 2 - EXAMPLES // 2)
    return ordered[first : first + EXAMPLES]


def _ids(rows: pa.Table, at: Any) -> tuple[str, ...]:
    chosen = rows.select(["client_request_id", "request_id"]).take(pa.array(at, pa.int64())).to_pylist()
    return tuple(each["client_request_id"] or each["request_id"].hex() for each in chosen)


def requests_in(rows: pa.Table) -> RequestColumns:
    """Return the columns of ``rows``.

    ``rows``: of ``tail_and_sample.sql``, or of ``queries/neighbours.py``.
    """
    inside = [_floats(rows[name]) for name in (UNATTRIBUTED_PREFILL, UNATTRIBUTED_DECODE)]
    rest = np.stack([*inside, _floats(rows[_UNATTRIBUTED]) - inside[0] - inside[1]], axis=1)
    places = np.array([Place.PREFILL.value, Place.DECODE.value, Place.PATH.value], object)
    return RequestColumns(
        started_unix_ns=_buffer(rows["started_unix_ns"].combine_chunks(), np.int64),  # never null
        ttft_ns=_floats(rows["ttft_ns"]),
        uncached_tokens=_nan_for_null(rows["uncached_tokens"]),
        cached_tokens=_floats(rows["cached_tokens"]),
        phases_ns=np.stack([_floats(rows[phase_column(phase.value)]) for phase in PHASES], axis=1),
        prefill_host=_texts(rows["prefill_host"]),
        decode_host=_texts(rows["decode_host"]),
        rest_at=np.where(rest.max(axis=1) > 0, places[rest.argmax(axis=1)], ""),
        moved=np.array(rows["moved"].to_pylist(), bool),
    )


def _paused_ns(rows: pa.Table) -> Any:
    """Return the pauses, requests x (P, D)."""
    return np.stack([_floats(rows[name]) for name in PAUSED], axis=1)


def _floats(values: pa.ChunkedArray) -> Any:
    return np.nan_to_num(_nan_for_null(values), nan=0.0)


def _nan_for_null(values: pa.ChunkedArray) -> Any:
    array = values.cast(pa.float64()).combine_chunks()
    found = _buffer(array, np.float64)
    if array.null_count:
        bits = np.unpackbits(np.frombuffer(array.buffers()[0], np.uint8), bitorder="little")
        found[bits[array.offset : array.offset + len(array)] == 0] = np.nan
    return found


def _buffer(array: pa.Array, kind: type) -> Any:
    """Copy a column's values without pandas.

    ``to_numpy`` would load pandas where it is installed: a quarter of a second that ``trace`` cannot afford.
    """
    data = array.buffers()[1]
    return np.frombuffer(data, kind)[array.offset : array.offset + len(array)].copy() if len(array) else np.zeros(0, kind)


def _texts(values: pa.ChunkedArray) -> Any:
    return np.array([value or "" for value in values.to_pylist()], object)
