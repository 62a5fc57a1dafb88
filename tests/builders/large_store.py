"""A store of many generated requests over hours of a day, written by columns.

Ten million requests take about two minutes.
The requests of ``tests/builders/store_rows.py`` repeat, each with new ids, another start, and all of its phases scaled by one
random factor.
In one hour a part of the requests of one prefill host waits; the analysis must find it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from builders.store_rows import START_UNIX_NS, moved, request_rows
from handrail.phases import Phase
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.schema import UNATTRIBUTED_DECODE, UNATTRIBUTED_PREFILL, phase_column
from handrail_collector.store.tables.requests import requests_table

FIRST_HOUR = START_UNIX_NS // HOUR_NS + 1
_TIMES = (*(phase_column(phase.value) for phase in Phase), UNATTRIBUTED_PREFILL, UNATTRIBUTED_DECODE)
_QUEUE = phase_column(Phase.PREFILL_QUEUE.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The number of requests and the hours that they cover.

    In ``bad_hour`` a share of the requests of ``bad_host`` waits ``wait_ns`` for P.
    """

    requests: int
    hours: int = 24
    kinds: int = 20_000
    bad_hour: int = 13
    bad_host: str = "p0"
    bad_share: float = 0.7
    wait_ns: int = 3_000_000_000

    @property
    def first_unix_ns(self) -> int:
        """Start of the first hour."""
        return FIRST_HOUR * HOUR_NS

    @property
    def end_unix_ns(self) -> int:
        """End of the last hour."""
        return (FIRST_HOUR + self.hours) * HOUR_NS


def fill(folder: Path, made: Made) -> tuple[str, str]:
    """Publish the requests, one file per hour.

    Returns the client id and the request id of a request in the middle.
    """
    kinds = _with_hosts(requests_table(request_rows(made.kinds)))
    random = np.random.default_rng(11)
    known = ("", "")
    publisher = StorePublisher(folder)
    publisher.open()
    each = made.requests // made.hours
    for hour in range(made.hours):
        parts = []
        for at in range(0, each, made.kinds):
            part = moved(kinds.slice(0, min(made.kinds, each - at)), 0, seed=hour * made.requests + at)
            parts.append(_varied(part, random, made, hour))
        table = pa.concat_tables(parts).sort_by("started_unix_ns").combine_chunks()
        publisher.publish(hour, hour + 1, hour + 1, [], table)
        if hour == made.hours // 2:
            row = table.slice(each // 2, 1).to_pylist()[0]
            known = str(row["client_request_id"]), row["request_id"].hex()
    publisher.close()
    return known


def _with_hosts(table: pa.Table) -> pa.Table:
    """Assign the hosts p0, p1, … and d0, d1, … to the engine instances.

    The last number of the instance's address is the host's number.
    """
    for role in ("prefill", "decode"):
        name = f"{role}_host"
        hosts = pc.replace_substring_regex(table[f"{role}_instance"], r".*\.(\d+):.*", rf"{role[0]}\1")
        table = table.set_column(table.column_names.index(name), name, hosts)
    return table


def _varied(table: pa.Table, random: np.random.Generator, made: Made, hour: int) -> pa.Table:
    rows = table.num_rows
    factor = random.lognormal(0, 0.25, rows)
    changed = {name: _times(table[name], factor) for name in _TIMES}
    if hour == made.bad_hour:
        bad = np.array(pc.equal(table["prefill_host"], made.bad_host).to_numpy(), bool) & (random.random(rows) < made.bad_share)
        changed[_QUEUE] = pc.add(changed[_QUEUE], pa.array(np.where(bad, made.wait_ns, 0)))
    total = pa.array(np.zeros(rows, np.int64))
    for phase in Phase:
        total = pc.add(total, pc.fill_null(changed[phase_column(phase.value)], 0))
    changed |= {
        "ttft_token_ns": total,
        "ttft_text_ns": total,
        "ttfb_ns": total,
        "gap_max_ns": _times(table["gap_max_ns"], factor),
    }
    started = (FIRST_HOUR + hour) * HOUR_NS + random.integers(0, HOUR_NS, rows)
    changed |= {
        "duration_ns": pc.add(total, _times(table["duration_ns"], factor)),
        "started_unix_ns": pa.array(started),
    }
    for name, values in changed.items():
        table = table.set_column(table.column_names.index(name), name, values)
    return table


def _times(values: pa.ChunkedArray, factor: np.ndarray[tuple[int], np.dtype[np.float64]]) -> pa.Array:
    known = np.asarray(values.is_valid().to_numpy(), bool)
    plain = pc.fill_null(values, 0).to_numpy()
    return pa.array((plain * factor).astype(np.int64), mask=~known)
