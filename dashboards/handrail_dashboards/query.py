"""PromQL building blocks for the boards: selectors, time ranges and aggregations.

Each function returns an expression as text. ``$cluster``, ``$model``, ``$role`` and ``$instance`` are the boards' variables,
whose "all" is ``.*``: a series without the label matches as well. Rates are over ``$__rate_interval``, which Grafana keeps above
four scrapes; counts of a whole time range are over ``$__range`` and evaluated once.
"""

from __future__ import annotations

from typing import Final

from handrail import conventions as names
from handrail.kv_outcomes import FAILURES
from handrail_sidecar.live_metrics.slo import FAILURES as FAILED

RATE: Final = "$__rate_interval"
RANGE: Final = "$__range"
FEW: Final = 6
IDENTITY: Final = "cluster, job, instance"
"""The labels by which a scrape names a process.

``cluster`` is empty where nobody set it, and an empty label matches itself.
"""

PORT: Final = ("cluster", "job", "instance", "device", "kind")

FAILED_FETCHES: Final = 'outcome=~"' + "|".join(sorted(outcome.value for outcome in FAILURES)) + '"'
FAILED_REQUESTS: Final = 'outcome=~"' + "|".join(sorted(outcome.value for outcome in FAILED)) + '"'
"""Matcher of the failed requests.

It leaves out requests that a client gave up, and those with an unknown end.
"""

_CLIENT_SIDE: Final = ('role="edge"', 'role="router"', 'role=~"decode|collocated"')
"""Matchers of the roles that are nearest to the client, best first."""

_CLUSTER: Final = 'cluster=~"$cluster"'
_INSTANCE: Final = 'instance=~"$instance"'
_MODEL: Final = 'model_name=~"$model"'
_ROLE: Final = 'role=~"$role"'


def live(name: str, *more: str) -> str:
    """Select a sidecar's series that has the labels of model and role."""
    return _select(name, _CLUSTER, _INSTANCE, _MODEL, _ROLE, *more)


def role(name: str, *more: str) -> str:
    """Select a sidecar's series that has the label of the role, not of a model."""
    return _select(name, _CLUSTER, _INSTANCE, _ROLE, *more)


def own(name: str, *more: str) -> str:
    """Select a sidecar's series without model and role: of process, engine or host."""
    return _select(name, _CLUSTER, _INSTANCE, *more)


def joined(name: str, *more: str) -> str:
    """Select a collector's series.

    ``$instance`` and ``$role`` are those of sidecars, so they do not apply here.
    """
    return _select(name, _CLUSTER, *more)


def joined_model(name: str, *more: str) -> str:
    """Select a collector's series that has the label of the model."""
    return _select(name, _CLUSTER, _MODEL, *more)


def pooled(values: str) -> str:
    """Add the role of its sidecar to each of ``values``, which are made with ``own``.

    An engine's and a GPU's series have no role.
    """
    info = f"max by ({IDENTITY}, role) ({role(names.METRIC_SIDECAR + '_info')})"
    return f"{values} * on ({IDENTITY}) group_left (role) {info}"


def rate(series: str) -> str:
    """Return the rate a second."""
    return f"rate({series}[{RATE}])"


def increase(series: str) -> str:
    """Return the increase over the displayed time range, for queries that run once."""
    return f"increase({series}[{RANGE}])"


def counted(series: str) -> str:
    """Return the increase of a sidecar's counter, with new series in full (case H01).

    A new series is one that did not exist when the range began.
    ``increase`` sees no growth in one that begins at 1: a new peer, a new failure type, an Xid, a process that failed before its
    first scrape. Where a new series began again, the increase is the larger figure.
    Not for a collector's counters, which keep their value over restarts.
    """
    return f"((({series} unless {series} offset {RANGE}) > {increase(series)}) or {increase(series)})"


def total(values: str, *by: str) -> str:
    return f"sum{_by(by)} ({values})"


def worst(values: str, *by: str) -> str:
    return f"max{_by(by)} ({values})"


def least(values: str, *by: str) -> str:
    return f"min{_by(by)} ({values})"


def highest(values: str) -> str:
    """Keep the few highest series: nobody reads a hundred lines of a hundred hosts."""
    return f"topk({FEW}, {values})"


def lowest(values: str) -> str:
    return f"bottomk({FEW}, {values})"


def mean(values: str, *by: str) -> str:
    return f"avg{_by(by)} ({values})"


def ratio(part: str, whole: str) -> str:
    """Divide, so that the result is absent instead of NaN where ``whole`` is 0."""
    return f"{part} / ({whole} > 0)"


def each_of(parts: str, whole: str, *on: str) -> str:
    """Divide each of ``parts`` by the one ``whole`` that has the same labels ``on``."""
    return f"{parts} / on ({', '.join(on)}) group_left () ({whole} > 0)"


def of_line_rate(rates: str) -> str:
    """Return the share of its line rate that each direction of a port uses.

    Only the ports with the highest shares are kept.
    """
    return highest(each_of(rates, own("handrail_link_line_rate_bytes_per_second"), *PORT))


def quantile(share: float, buckets: str, *by: str) -> str:
    """Return a quantile over all processes together, never a mean of their quantiles.

    It is absent where nothing was counted, since NaN is not above 0.
    """
    return f"histogram_quantile({share:g}, {total(rate(buckets), 'le', *by)}) > 0"


def quantile_of_range(share: float, buckets: str, *by: str) -> str:
    """Return ``quantile`` over the whole time range, for queries that run once."""
    return f"histogram_quantile({share:g}, {total(increase(buckets), 'le', *by)}) > 0"


def client_ttft(share: float) -> str:
    """Return a quantile of time to first token, measured nearest to the client.

    That is at an edge, else from D's arrival on, else as D's scheduler reports it. The scopes are never added up.
    """
    scopes = (live("handrail_ttft_seconds_bucket", f'scope="{scope}"') for scope in ("edge", "router", "decode", "engine"))
    return " or on () ".join(f"({quantile(share, buckets, 'scope')})" for buckets in scopes)


def client_quantile(share: float, name: str) -> str:
    """Return a quantile, measured nearest to the client, for what has no scope."""
    return " or ".join(f"({quantile(share, live(f'{name}_bucket', who))})" for who in _CLIENT_SIDE)


def client_total(counter: str, *more: str) -> str:
    """Return requests a second, each counted once.

    For each model, the role nearest to the client counts.
    """
    found = (total(rate(live(counter, who, *more)), "cluster", "model_name") for who in _CLIENT_SIDE)
    return f"sum ({' or '.join(found)})"


def where(values: str, report: str) -> str:
    """Return ``values`` where ``report`` exists; absent, not 0, where nobody counts."""
    return f"({values}) and on () count({report})"


def client_counted(counter: str, *more: str) -> str:
    """Return the increase of failures over the whole time range, summed up.

    It runs once, over the whole time range. For each model, the role nearest to the client counts.
    """
    found = (total(counted(live(counter, who, *more)), "cluster", "model_name") for who in _CLIENT_SIDE)
    return f"sum ({' or '.join(found)})"


def named(values: str, label: str, value: str) -> str:
    """Add one more label, so that different values can be in one table."""
    return f'label_replace({values}, "{label}", "{value}", "", "")'


def renamed(values: str, label: str, new: str) -> str:
    return f'label_replace({values}, "{new}", "$1", "{label}", "(.*)")'


def _select(name: str, *matchers: str) -> str:
    return f"{name}{{{', '.join(matchers)}}}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
