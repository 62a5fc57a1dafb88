"""PromQL as the boards write it: who a series is of, over what time, and how it is put together.

Each function gives an expression as text. ``$cluster``, ``$model``, ``$role`` and ``$instance`` are the boards' variables, whose
"all" is ``.*``: a series without the label matches as well. Rates are over ``$__rate_interval``, which Grafana keeps above four
scrapes; counts of a whole time range are over ``$__range`` and asked once.
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
"""What a scrape says a process by. ``cluster`` is empty where nobody set it, which matches itself."""

PORT: Final = ("cluster", "job", "instance", "device", "kind")

FAILED_FETCHES: Final = 'outcome=~"' + "|".join(sorted(outcome.value for outcome in FAILURES)) + '"'
FAILED_REQUESTS: Final = 'outcome=~"' + "|".join(sorted(outcome.value for outcome in FAILED)) + '"'
"""Not those that a client gave up, nor those of which nobody knows how they ended."""

_CLIENT_SIDE: Final = ('role="edge"', 'role="router"', 'role=~"decode|collocated"')
"""Who is nearest to the client, best first."""

_CLUSTER: Final = 'cluster=~"$cluster"'
_INSTANCE: Final = 'instance=~"$instance"'
_MODEL: Final = 'model_name=~"$model"'
_ROLE: Final = 'role=~"$role"'


def live(name: str, *more: str) -> str:
    """A sidecar's series that tells the model and the role."""
    return _select(name, _CLUSTER, _INSTANCE, _MODEL, _ROLE, *more)


def role(name: str, *more: str) -> str:
    """A sidecar's series that tells the role, of no model."""
    return _select(name, _CLUSTER, _INSTANCE, _ROLE, *more)


def own(name: str, *more: str) -> str:
    """A sidecar's series that tells neither: of the process, its engine or its host."""
    return _select(name, _CLUSTER, _INSTANCE, *more)


def joined(name: str, *more: str) -> str:
    """A collector's series; ``$instance`` and ``$role`` are of sidecars and say nothing of it."""
    return _select(name, _CLUSTER, *more)


def joined_model(name: str, *more: str) -> str:
    """A collector's series that tells the model."""
    return _select(name, _CLUSTER, _MODEL, *more)


def pooled(values: str) -> str:
    """``values`` of ``own`` with the role of the sidecar that gave each: an engine's and a GPU's series do not tell it."""
    info = f"max by ({IDENTITY}, role) ({role(names.METRIC_SIDECAR + '_info')})"
    return f"{values} * on ({IDENTITY}) group_left (role) {info}"


def rate(series: str) -> str:
    """A second."""
    return f"rate({series}[{RATE}])"


def increase(series: str) -> str:
    """Over the time range that is looked at: for queries that are asked once."""
    return f"increase({series}[{RANGE}])"


def counted(series: str) -> str:
    """The like of a sidecar's failures: a series that was not there when the range began counts in full (case H01).

    ``increase`` sees nothing in one that begins at 1: a new peer, a new failure type, an Xid, a process that failed before
    its first scrape. Where a new one began anew the increase is the larger. Not for a collector's, which keep their value
    over restarts.
    """
    return f"((({series} unless {series} offset {RANGE}) > {increase(series)}) or {increase(series)})"


def total(values: str, *by: str) -> str:
    return f"sum{_by(by)} ({values})"


def worst(values: str, *by: str) -> str:
    return f"max{_by(by)} ({values})"


def least(values: str, *by: str) -> str:
    return f"min{_by(by)} ({values})"


def highest(values: str) -> str:
    """The few that stand out: of a hundred hosts nobody reads a hundred lines."""
    return f"topk({FEW}, {values})"


def lowest(values: str) -> str:
    return f"bottomk({FEW}, {values})"


def mean(values: str, *by: str) -> str:
    return f"avg{_by(by)} ({values})"


def ratio(part: str, whole: str) -> str:
    """Absent, not NaN, where there was nothing."""
    return f"{part} / ({whole} > 0)"


def each_of(parts: str, whole: str, *on: str) -> str:
    """Each of ``parts`` over the one ``whole`` that has the same labels ``on``."""
    return f"{parts} / on ({', '.join(on)}) group_left () ({whole} > 0)"


def of_line_rate(rates: str) -> str:
    """Of ports, each direction's share of what the port can carry, the fullest of them."""
    return highest(each_of(rates, own("handrail_link_line_rate_bytes_per_second"), *PORT))


def quantile(share: float, buckets: str, *by: str) -> str:
    """Of all processes together, never a mean of their quantiles. Absent where nothing was counted: NaN is not above 0."""
    return f"histogram_quantile({share:g}, {total(rate(buckets), 'le', *by)}) > 0"


def quantile_of_range(share: float, buckets: str, *by: str) -> str:
    """The like over the whole time range, for what is asked once."""
    return f"histogram_quantile({share:g}, {total(increase(buckets), 'le', *by)}) > 0"


def client_ttft(share: float) -> str:
    """As near to the client as it is seen: at an edge, else from D's arrival on, else as D's scheduler tells. Never added up."""
    scopes = (live("handrail_ttft_seconds_bucket", f'scope="{scope}"') for scope in ("edge", "router", "decode", "engine"))
    return " or on () ".join(f"({quantile(share, buckets, 'scope')})" for buckets in scopes)


def client_quantile(share: float, name: str) -> str:
    """The like for what has no scope."""
    return " or ".join(f"({quantile(share, live(f'{name}_bucket', who))})" for who in _CLIENT_SIDE)


def client_total(counter: str, *more: str) -> str:
    """Requests a second, each once: for each model, as counted by whoever is nearest to the client."""
    found = (total(rate(live(counter, who, *more)), "cluster", "model_name") for who in _CLIENT_SIDE)
    return f"sum ({' or '.join(found)})"


def where(values: str, report: str) -> str:
    """``values`` where ``told`` is there at all: absent, not 0, where nobody counts."""
    return f"({values}) and on () count({report})"


def client_counted(counter: str, *more: str) -> str:
    """The like over the whole time range, of failures: in all, asked once."""
    found = (total(counted(live(counter, who, *more)), "cluster", "model_name") for who in _CLIENT_SIDE)
    return f"sum ({' or '.join(found)})"


def named(values: str, label: str, value: str) -> str:
    """``values`` with one more label, so that different ones can stand in one table."""
    return f'label_replace({values}, "{label}", "{value}", "", "")'


def renamed(values: str, label: str, new: str) -> str:
    return f'label_replace({values}, "{new}", "$1", "{label}", "(.*)")'


def _select(name: str, *matchers: str) -> str:
    return f"{name}{{{', '.join(matchers)}}}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
