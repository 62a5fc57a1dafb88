"""What is wrong with a query although Prometheus would answer it: found on the tree that ``promql-parser`` makes of it.

Each rule is a mistake that published dashboards made: a quantile of what was not summed by ``le``, a mean of quantiles, a
window that holds fewer than two samples when one zooms in, a counter read as it is, a rate of a gauge, a sum of shares, a name
or a label that nobody exports. Needs ``promql-parser`` (an extra of development); names come from ``handrail.catalogue``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal

import promql_parser as promql

TARGET_LABELS: Final = frozenset({"cluster", "job", "instance"})
"""Those that a scrape adds, whoever is scraped."""

_VARIABLES: Final = {"$__rate_interval": "4m1s", "$__range": "1h1m1s", "$__interval": "17s"}
_SECONDS: Final = {241.0: "$__rate_interval", 3661.0: "$__range", 17.0: "$__interval"}
_OVER_COUNTERS: Final = frozenset({"rate", "increase", "irate", "resets"})
_NEVER_OVER_GAUGES: Final = frozenset({"rate", "increase", "irate", "resets"})
_MEANS: Final = frozenset({"avg", "sum"})
_SETS: Final = frozenset({"and", "or", "unless"})
_SHARE: Final = re.compile(r"_(ratio|perc|percent|celsius)$")
_PARTS: Final = ("_bucket", "_count", "_sum")


class Rule(str, Enum):
    """What was broken."""

    SYNTAX = "syntax"
    BY_LE = "by_le"  # a quantile of buckets that were not summed by le
    MEAN_OF_QUANTILES = "mean_of_quantiles"
    WINDOW = "window"  # not $__rate_interval, or for what is asked once $__range
    COUNTER = "counter"  # a counter's value means nothing: it starts anew
    GAUGE = "gauge"  # a gauge has no rate
    SUM_OF_SHARES = "sum_of_shares"
    NAME = "name"
    LABEL = "label"
    JOB = "job"  # what a scrape is called is for whoever sets it up to say
    MATCHING = "matching"  # the sides have other labels: nothing matches


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule, and what breaks it."""

    rule: Rule
    what: str

    def __str__(self) -> str:
        return f"{self.rule.value}: {self.what}"


@dataclass(frozen=True, slots=True)
class Known:
    """A metric as Prometheus shows it: a counter's name ends with ``_total``, a histogram's is without its parts."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: frozenset[str] = field(default_factory=frozenset)


Labels = frozenset[str] | None
"""Of each series of an expression; None of a number."""


def lint(expr: str, known: Mapping[str, Known], *, once: bool = False) -> tuple[Problem, ...]:
    """Problems of one query, none where it is sound. ``once``: it is asked for one time only, so ``$__range`` is allowed."""
    for variable, duration in _VARIABLES.items():
        expr = expr.replace(variable, duration)
    try:
        tree = promql.parse(expr)
    except ValueError as error:
        return (Problem(Rule.SYNTAX, str(error)),)
    walk = _Walk(known, once)
    walk.labels(tree, None)
    return tuple(dict.fromkeys(walk.problems))


class _Walk:
    """Goes down the tree once; ``labels`` says which labels a part's series have, and collects what is wrong on the way."""

    def __init__(self, known: Mapping[str, Known], once: bool) -> None:
        self.known = known
        self.once = once
        self.problems: list[Problem] = []

    def say(self, rule: Rule, what: str) -> None:
        self.problems.append(Problem(rule, what))

    def labels(self, node: Any, function: str | None) -> Labels:
        """``function``: the one that directly takes this part, which decides what a selector may be."""
        if isinstance(node, promql.VectorSelector):
            return self._selector(node, function)
        if isinstance(node, promql.MatrixSelector):
            self._window(node, function)
            return self._selector(node.vector_selector, function)
        if isinstance(node, promql.Call):
            return self._call(node)
        if isinstance(node, promql.AggregateExpr):
            return self._aggregate(node)
        if isinstance(node, promql.BinaryExpr):
            return self._binary(node)
        if isinstance(node, promql.ParenExpr | promql.UnaryExpr):
            return self.labels(node.expr, function)
        if isinstance(node, promql.SubqueryExpr):
            self.say(Rule.WINDOW, "a subquery's step is not the scrape's: record the inner query, or do without")
            return self.labels(node.expr, None)
        return None

    # --- series

    def _selector(self, node: Any, function: str | None) -> Labels:
        if not node.name:
            self.say(Rule.NAME, f"{node} names no metric")
            return TARGET_LABELS
        found, bucket = self._metric(node.name)
        if found is None:
            self.say(Rule.NAME, f"nobody exports {node.name}")
            return None
        labels = TARGET_LABELS | found.labels | ({"le"} if bucket else frozenset())
        for matcher in node.matchers.matchers:
            if matcher.name not in labels:
                self.say(Rule.LABEL, f"{node.name} has no label {matcher.name}")
            elif matcher.name == "job":
                self.say(Rule.JOB, f"{node.name}: a job's name is chosen by whoever scrapes")
        counts = found.kind != "gauge"
        if counts and function not in _OVER_COUNTERS:
            self.say(Rule.COUNTER, f"{node.name} counts: take its rate or increase")
        if not counts and function in _NEVER_OVER_GAUGES:
            self.say(Rule.GAUGE, f"{node.name} is a gauge: {function} of it means nothing")
        return labels

    def _metric(self, name: str) -> tuple[Known | None, bool]:
        if (found := self.known.get(name)) is not None:
            return (None if found.kind == "histogram" else found), False  # a classic histogram has no series of its own name
        for part in _PARTS:
            found = self.known.get(name.removesuffix(part))
            if name.endswith(part) and found is not None and found.kind == "histogram":
                return found, part == "_bucket"
        return None, False

    def _window(self, node: Any, function: str | None) -> None:
        window = _SECONDS.get(node.range.total_seconds(), f"{node.range.total_seconds():g}s")
        allowed = {"$__rate_interval"} if function in ("rate", "irate") else {"$__rate_interval", "$__range"}
        if window not in allowed:
            self.say(
                Rule.WINDOW, f"{function} over {window}: may hold fewer than two samples; use {' or '.join(sorted(allowed))}"
            )
        elif window == "$__range" and not self.once:
            self.say(Rule.WINDOW, f"{function} over $__range at every step: ask it once, or use $__rate_interval")

    # --- what is made of them

    def _call(self, node: Any) -> Labels:
        name = node.func.name
        found = [self.labels(argument, name) for argument in node.args]
        if name == "histogram_quantile":
            self._quantile(node.args[1])
            buckets = found[1]
            return None if buckets is None else buckets - {"le"}
        if name == "vector":
            return frozenset()
        return next((labels for labels in found if labels is not None), None)

    def _quantile(self, node: Any) -> None:
        if isinstance(node, promql.ParenExpr):
            self._quantile(node.expr)
        elif isinstance(node, promql.BinaryExpr) and str(node.op) == "or":
            self._quantile(node.lhs)
            self._quantile(node.rhs)
        elif not (
            isinstance(node, promql.AggregateExpr)
            and str(node.op) == "sum"
            and node.modifier is not None
            and node.modifier.type == promql.AggModifierType.By
            and "le" in node.modifier.labels
        ):
            self.say(Rule.BY_LE, "histogram_quantile needs sum by (le, …) of the rate of its buckets")

    def _aggregate(self, node: Any) -> Labels:
        below = self.labels(node.expr, None)
        operation = str(node.op)
        if operation in _MEANS and _has(node.expr, lambda each: _calls(each, "histogram_quantile")):
            self.say(Rule.MEAN_OF_QUANTILES, f"{operation} of quantiles is no quantile: sum the buckets, then take one")
        if operation == "sum" and (share := next(_bare_shares(node.expr), None)):
            self.say(Rule.SUM_OF_SHARES, f"sum of {share}: two at 40 % are not 80 %; take the mean or the highest")
        if operation in ("topk", "bottomk"):
            return below
        if node.modifier is None:
            return frozenset() if below is not None else None
        named = frozenset(node.modifier.labels)
        if below is None:
            return None
        if missing := named - below:
            self.say(Rule.LABEL, f"by or without {', '.join(sorted(missing))}: these series have {', '.join(sorted(below))}")
        return named if node.modifier.type == promql.AggModifierType.By else below - named

    def _binary(self, node: Any) -> Labels:
        left, right = self.labels(node.lhs, None), self.labels(node.rhs, None)
        if left is None or right is None:
            return left if right is None else right
        matching = node.modifier.matching if node.modifier is not None else None
        operation = str(node.op)
        if matching is None:
            if operation in _SETS:
                return left | right
            if left != right:
                self.say(
                    Rule.MATCHING,
                    f"{operation} of series by ({_named(left)}) and by ({_named(right)}): nothing matches; say on (…)",
                )
            return left
        on = frozenset(matching.labels)
        for side in (left, right):
            if matching.type == promql.LabelModifierType.Include and (missing := on - side):
                self.say(Rule.LABEL, f"on ({_named(missing)}): one side has only {_named(side)}")
        brought = frozenset(node.modifier.group_labels or ())
        if missing := brought - right:
            self.say(Rule.LABEL, f"group_left ({_named(missing)}): the other side has only {_named(right)}")
        if node.modifier.card == promql.VectorMatchCardinality.OneToOne and operation not in _SETS:
            return on if matching.type == promql.LabelModifierType.Include else left - on
        return left | brought


def _named(labels: frozenset[str]) -> str:
    return ", ".join(sorted(labels)) or "none"


def _calls(node: Any, name: str) -> bool:
    return isinstance(node, promql.Call) and node.func.name == name


def _has(node: Any, wanted: Any) -> bool:
    return wanted(node) or any(_has(each, wanted) for each in _below(node))


def _bare_shares(node: Any) -> Iterator[str]:
    """Gauges of shares whose values are added as they are: no function and no division stands between."""
    if isinstance(node, promql.VectorSelector):
        if node.name and _SHARE.search(node.name):
            yield node.name
    elif isinstance(node, promql.ParenExpr):
        yield from _bare_shares(node.expr)
    elif isinstance(node, promql.BinaryExpr):
        yield from _bare_shares(node.lhs)


def _below(node: Any) -> Iterator[Any]:
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (below := getattr(node, name, None)) is not None:
            yield below
    yield from getattr(node, "args", ())
