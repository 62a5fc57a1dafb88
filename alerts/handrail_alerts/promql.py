"""The PromQL linter for rules and panels.

It finds what a query reads, and what would make it silently wrong.
Prometheus accepts a query whose metric or label does not exist, and a quantile that forgot ``le``: it answers with nothing, or
with a wrong number. The linter finds such queries. It needs ``promql-parser``, which the tests install (extra ``dev``); nothing
at run time imports this module. Cases H03, H06, H08, H10, D19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, Final

import promql_parser as promql

from handrail.config.types import nearest


class Type(str, Enum):
    """The type of a metric's series."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class PromMetric:
    """One metric family, as Prometheus types it.

    ``labels``: those that the process exposes. The labels that a scrape adds are known here.
    """

    type: Type
    labels: frozenset[str] = frozenset()


Catalogue = Mapping[str, PromMetric]
"""Families by the name in a query.

A counter's name has ``_total``; a histogram's has no ``_bucket``, ``_sum`` or ``_count``.
"""

TARGET_LABELS: Final = frozenset({"instance", "job", "cluster", "namespace", "pod", "container", "node", "service", "endpoint"})
"""Labels that a scrape, its relabelling and external labels may add to any series."""

PROMETHEUS: Final[Catalogue] = {
    "up": PromMetric(Type.GAUGE),
    "scrape_duration_seconds": PromMetric(Type.GAUGE),
    "scrape_samples_scraped": PromMetric(Type.GAUGE),
    "ALERTS": PromMetric(Type.GAUGE, frozenset({"alertname", "alertstate", "severity"})),
    "ALERTS_FOR_STATE": PromMetric(Type.GAUGE, frozenset({"alertname", "severity"})),
}
"""The series that Prometheus itself makes."""

SCRAPES_IN_A_WINDOW: Final = 4
"""The least number of scrapes in a rate's window.

A rate needs two samples. With this many scrapes a window survives one that is late and one that fails (case H06).
"""

# Durations that nobody writes replace Grafana's variables while the query is parsed.
RATE_INTERVAL: Final = timedelta(hours=1, minutes=7, seconds=11)
RANGE: Final = timedelta(hours=1, minutes=7, seconds=13)
INTERVAL: Final = timedelta(hours=1, minutes=7, seconds=17)
_VARIABLES: Final[Mapping[str, timedelta]] = {"__rate_interval": RATE_INTERVAL, "__range": RANGE, "__interval": INTERVAL}
_VARIABLE: Final = re.compile(r"\$(?:\{(__\w+)\}|(__\w+))")
_SUFFIXES: Final = ("_bucket", "_count", "_sum")
_OF_COUNTERS: Final = frozenset({"rate", "irate", "increase", "resets"})
_OF_EXISTENCE: Final = frozenset(
    {"absent", "absent_over_time", "present_over_time", "last_over_time", "timestamp", "count_over_time"}
)
_COUNTING: Final = frozenset({"count", "group"})
_MIXING: Final = frozenset({"avg", "sum", "stddev", "stdvar"})


def metrics(expr: str) -> frozenset[str]:
    """Return the names of the series that a query reads, as it writes them.

    Raises ``ValueError`` when ``expr`` is not PromQL.
    """
    found: set[str] = set()
    for selector in selectors(parse(expr)):
        found.update(names(selector))
    return frozenset(found)


def problems(expr: str, catalogue: Catalogue, *, scrape_s: float = 15, grafana: bool = False) -> tuple[str, ...]:
    """Return every problem of a query, in words; empty where there is none.

    ``scrape_s``: the interval between scrapes, for the windows of a rule. ``grafana``: the query is a panel's. Its windows must
    follow the zoom (``$__rate_interval``, or ``$__range`` for a total), and none may be fixed.
    """
    try:
        tree = parse(expr)
    except ValueError as error:
        return (f"is no PromQL: {error}",)
    lint = _Lint({**PROMETHEUS, **catalogue}, scrape_s, grafana)
    lint.visit(tree, _Above())
    return tuple(dict.fromkeys(lint.found))


@dataclass(frozen=True, slots=True)
class _Above:
    """The context of a node.

    It has the function directly above the node, and whether only the existence of a series matters.
    """

    function: str = ""
    exists: bool = False


@dataclass(slots=True)
class _Lint:
    catalogue: Catalogue
    scrape_s: float
    grafana: bool
    found: list[str] = field(default_factory=list)

    def visit(self, node: Any, above: _Above) -> None:
        if isinstance(node, promql.ParenExpr):
            self.visit(node.expr, above)
        elif isinstance(node, promql.VectorSelector):
            self._selector(node, above)
        elif isinstance(node, promql.MatrixSelector):
            self._window(node.range, above.function)
            self._selector(node.vector_selector, above)
        elif isinstance(node, promql.SubqueryExpr):
            self._window(node.range, above.function)
            self.visit(node.expr, _Above())
        elif isinstance(node, promql.UnaryExpr):
            self.visit(node.expr, _Above())
        elif isinstance(node, promql.AggregateExpr):
            self._aggregation(node, above)
        elif isinstance(node, promql.Call):
            self._call(node)
        elif isinstance(node, promql.BinaryExpr):
            self._binary(node, above)

    # --- one kind of node each

    def _selector(self, node: promql.VectorSelector, above: _Above) -> None:
        for name in names(node):
            metric = self._known(name)
            if metric is None:
                near = nearest(name, self._series())
                self.found.append(f"no metric is called {name}{f'; did you mean {near}?' if near else ''}")
                continue
            if metric.type is Type.HISTOGRAM and not name.endswith(_SUFFIXES):
                self.found.append(f"{name} is a histogram: its series are {name}_bucket, {name}_count and {name}_sum")
            labels = self._labels_of(name, metric)
            for matcher in matchers(node):
                if matcher.name != "__name__" and matcher.name not in labels:
                    has = ", ".join(sorted(labels - TARGET_LABELS)) or "none of its own"
                    self.found.append(f"{name} has no label {matcher.name}; it has {has}")
            if metric.type is not Type.GAUGE and above.function not in _OF_COUNTERS and not above.exists:
                self.found.append(f"{name} only ever grows, and again from 0 after a restart: put it under rate() or increase()")
            if metric.type is Type.GAUGE and above.function in _OF_COUNTERS:
                self.found.append(f"{name} is a gauge: {above.function}() takes every fall for a restart; use delta() or deriv()")
        if not names(node):
            self.found.append(f"{node} names no metric, so nothing can be checked: write the name")

    def _window(self, window: timedelta | None, function: str) -> None:
        if function not in _OF_COUNTERS or window is None:
            return
        if window == INTERVAL:
            self.found.append(f"{function}() over $__interval is empty when zoomed in: use $__rate_interval")
        elif self.grafana and window not in (RATE_INTERVAL, RANGE):
            self.found.append(f"{function}() over a fixed window of {window}: a panel's follows the zoom; use $__rate_interval")
        elif not self.grafana and window in (RATE_INTERVAL, RANGE):
            self.found.append(f"{function}() over a variable of Grafana in a rule")
        elif window.total_seconds() < SCRAPES_IN_A_WINDOW * self.scrape_s:
            least = SCRAPES_IN_A_WINDOW * self.scrape_s
            self.found.append(
                f"{function}() over {window} holds too few scrapes of {self.scrape_s:g} s: at least {least:g} s "
                f"({SCRAPES_IN_A_WINDOW} scrapes)"
            )

    def _aggregation(self, node: promql.AggregateExpr, above: _Above) -> None:
        operation = str(node.op)
        if node.modifier is not None:
            self._labels_exist(node.modifier.labels, node.expr, f"{operation} by")
        inner = bare(node.expr)
        if operation in _MIXING and isinstance(inner, promql.Call) and inner.func.name == "histogram_quantile":
            self.found.append(f"{operation} of quantiles is no quantile: sum by (le) the buckets first, then take the quantile")
        if operation == "sum" and isinstance(inner, promql.VectorSelector):
            for name in names(inner):
                if name.endswith(("_ratio", "_percent", "_celsius")):
                    self.found.append(f"sum of {name}: shares do not add up; use avg or max")
        self.visit(node.expr, _Above(exists=above.exists or operation in _COUNTING))

    def _call(self, node: promql.Call) -> None:
        name = node.func.name
        if name == "histogram_quantile":
            self._quantile(node.args[1])
        for argument in node.args:
            self.visit(argument, _Above(name, name in _OF_EXISTENCE))

    def _quantile(self, argument: Any) -> None:
        inner = bare(argument)
        if not any(name.endswith("_bucket") for selector in selectors(inner) for name in names(selector)):
            self.found.append("histogram_quantile of what is no bucket")
            return
        kept = isinstance(inner, promql.AggregateExpr) and str(inner.op) == "sum" and keeps(inner, "le")
        if not kept:
            self.found.append("histogram_quantile needs sum by (le, ...) around its rate: else it is of each series, or of none")

    def _binary(self, node: promql.BinaryExpr, above: _Above) -> None:
        operation, left, right = str(node.op), bare(node.lhs), bare(node.rhs)
        if operation == ">=" and isinstance(right, promql.NumberLiteral) and right.val == 0:
            self.found.append(">= 0 is always true of what cannot be negative")
        modifier = node.modifier
        if modifier is not None and modifier.matching is not None:
            for side in (left, right):
                self._labels_exist(modifier.matching.labels, side, "on")
        if modifier is not None and modifier.group_labels:
            many_left = modifier.card == promql.VectorMatchCardinality.ManyToOne
            self._labels_exist(modifier.group_labels, right if many_left else left, "group_left")
        sets = operation in ("and", "unless", "or")
        born = operation == "unless" and is_earlier(left, right)
        self.visit(node.lhs, _Above(exists=(above.exists and sets) or born))
        self.visit(node.rhs, _Above(exists=operation in ("and", "unless") or (above.exists and sets)))

    # --- names and labels

    def _known(self, name: str) -> PromMetric | None:
        metric = self.catalogue.get(name)
        if metric is not None:
            return metric
        for suffix in _SUFFIXES:
            if name.endswith(suffix):
                metric = self.catalogue.get(name[: -len(suffix)])
                if metric is not None and metric.type is Type.HISTOGRAM:
                    return metric
        return None

    def _series(self) -> Iterator[str]:
        for name, metric in self.catalogue.items():
            if metric.type is Type.HISTOGRAM:
                yield from (f"{name}{suffix}" for suffix in _SUFFIXES)
            else:
                yield name

    def _labels_of(self, name: str, metric: PromMetric) -> frozenset[str]:
        return metric.labels | TARGET_LABELS | ({"le"} if name.endswith("_bucket") else set())

    def _labels_exist(self, labels: Iterable[str], node: Any, what: str) -> None:
        available = self._available(node)
        for label in labels:
            if available is not None and label not in available:
                has = ", ".join(sorted(available - TARGET_LABELS)) or "none of its own"
                self.found.append(f"{what} ({label}): no such label there; it has {has}")

    def _available(self, node: Any) -> frozenset[str] | None:
        """Return the labels that a result may have; None where that is not known."""
        node = bare(node)
        if isinstance(node, promql.VectorSelector):
            known = [(name, self._known(name)) for name in names(node)]
            if not known or any(metric is None for _, metric in known):
                return None
            return frozenset().union(*(self._labels_of(name, metric) for name, metric in known if metric is not None))
        if isinstance(node, promql.MatrixSelector):
            return self._available(node.vector_selector)
        if isinstance(node, promql.SubqueryExpr | promql.UnaryExpr):
            return self._available(node.expr)
        if isinstance(node, promql.AggregateExpr):
            return self._available_of_aggregation(node)
        if isinstance(node, promql.Call):
            return self._available_of_call(node)
        if isinstance(node, promql.BinaryExpr):
            left, right = self._available(node.lhs), self._available(node.rhs)
            if left is None or right is None:
                return None
            return left | right
        return frozenset()

    def _available_of_aggregation(self, node: promql.AggregateExpr) -> frozenset[str] | None:
        if str(node.op) in ("topk", "bottomk"):
            return self._available(node.expr)
        if str(node.op) == "count_values":
            return None
        if node.modifier is None:
            return frozenset()
        if node.modifier.type == promql.AggModifierType.By:
            return frozenset(node.modifier.labels)
        inner = self._available(node.expr)
        return None if inner is None else inner - set(node.modifier.labels)

    def _available_of_call(self, node: promql.Call) -> frozenset[str] | None:
        if node.func.name in ("absent", "absent_over_time"):
            return frozenset(matcher.name for selector in selectors(node) for matcher in matchers(selector))
        found: frozenset[str] = frozenset()
        for argument in node.args:
            inner = self._available(argument)
            if inner is None:
                return None
            found |= inner
        if node.func.name in ("label_replace", "label_join"):
            found |= {node.args[1].val}
        return found


# --- the tree of promql-parser --------------------------------------------------------------------------------------------


def parse(expr: str) -> promql.Expr:
    """Parse a query that may contain Grafana's window variables.

    Raises ``ValueError`` when ``expr`` is not PromQL.
    """
    return promql.parse(_VARIABLE.sub(_duration, expr))


def _duration(variable: re.Match[str]) -> str:
    known = _VARIABLES.get(variable[1] or variable[2])
    return variable[0] if known is None else promql.display_duration(known)


def bare(node: Any) -> Any:
    while isinstance(node, promql.ParenExpr):
        node = node.expr
    return node


def selectors(tree: Any) -> list[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def look(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        elif isinstance(node, promql.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql.Call):
            for argument in node.args:
                look(argument)
        elif isinstance(node, promql.BinaryExpr):
            look(node.lhs)
            look(node.rhs)
        elif isinstance(node, promql.ParenExpr | promql.UnaryExpr | promql.AggregateExpr | promql.SubqueryExpr):
            look(node.expr)

    look(tree)
    return found


def matchers(node: promql.VectorSelector) -> list[promql.Matcher]:
    return [*node.matchers.matchers, *(each for group in node.matchers.or_matchers for each in group)]


def names(node: promql.VectorSelector) -> list[str]:
    """Return the name, or the names in a ``__name__`` matcher that only lists some.

    Returns an empty list where the names are not known.
    """
    if node.name:
        return [node.name]
    for matcher in matchers(node):
        if matcher.name == "__name__" and matcher.op == promql.MatchOp.Equal:
            return [matcher.value]
        if matcher.name == "__name__" and matcher.op == promql.MatchOp.Re:
            listed = matcher.value.split("|")
            return listed if all(name.replace("_", "").replace(":", "").isalnum() for name in listed) else []
    return []


def keeps(node: promql.AggregateExpr, label: str) -> bool:
    if node.modifier is None:
        return False
    by = node.modifier.type == promql.AggModifierType.By
    return (label in node.modifier.labels) is by


def is_earlier(now: Any, before: Any) -> bool:
    """Test for ``x`` and ``x offset ...``, which find series that are new since then.

    This is the one place where a counter may stand without a rate (case H01).
    """
    if not (isinstance(now, promql.VectorSelector) and isinstance(before, promql.VectorSelector)):
        return False
    return now.name == before.name and before.offset is not None and now.offset is None


__all__ = ["PROMETHEUS", "TARGET_LABELS", "Catalogue", "PromMetric", "Type", "metrics", "problems"]
