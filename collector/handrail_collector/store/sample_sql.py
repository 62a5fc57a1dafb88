"""Build the SQL queries of samples.

``sql.py`` does the same for requests. The columns of the files tell which series exist.
"""

from __future__ import annotations

from collections.abc import Collection

from handrail_collector.store.sample_filter import SampleFilter
from handrail_collector.store.samples import SAMPLED
from handrail_collector.store.schema import Table
from handrail_collector.store.series import SERIES_COLUMNS, is_series, name_of
from handrail_collector.store.sql import Parameter, SqlQuery

KNOWN = SqlQuery("SELECT * FROM {table} LIMIT 0", {})
"""Query whose result has the columns of the files and no rows."""


def samples(table: Table, wanted: SampleFilter, known: Collection[str]) -> SqlQuery:
    """Select the samples that match; those delivered twice appear once.

    ``known``: the columns of the files.
    """
    kind = SAMPLED[table]
    parameters: dict[str, Parameter] = {"since": wanted.since_unix_ns, "until": wanted.until_unix_ns}
    where = "at_unix_ns >= $since AND at_unix_ns < $until"
    if wanted.hosts is not None:
        parameters["hosts"] = sorted(wanted.hosts)
        where += " AND (list_contains($hosts, host) OR list_contains($hosts, host_name))"
    own = [column.name for column in (*kind.own, *SERIES_COLUMNS) if column.name in known]
    series = [name for name in known if is_series(name) and (wanted.names is None or name_of(name) in wanted.names)]
    once = f"QUALIFY row_number() OVER (PARTITION BY {_listed((*kind.by, 'at_unix_ns'))}) = 1"
    read = f"SELECT {_listed([*own, *series])} FROM {{table}} WHERE {where} {once}"
    if not wanted.every_ns:
        return SqlQuery(read, parameters)
    parameters["every"] = wanted.every_ns
    grouped = [name for name in own if name not in ("at_unix_ns", "took_ns", "more")]
    figures = ["max(at_unix_ns) AS at_unix_ns", "max(took_ns) AS took_ns"]
    figures += [f"{'max' if name.startswith('c.') else 'avg'}({_quoted(name)}) AS {_quoted(name)}" for name in series]
    return SqlQuery(
        f"SELECT {', '.join([*map(_quoted, grouped), *figures])} FROM ({read})"
        f" GROUP BY {_listed(grouped)}, (at_unix_ns - $since) // $every",
        parameters,
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(_quoted, names))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
