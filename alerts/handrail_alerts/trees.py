"""Walk a PromQL tree of ``promql-parser``.

It finds the series that the tree selects, and their names and matchers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import promql_parser as promql

# Durations that nobody writes replace Grafana's variables while the query is parsed.
RATE_INTERVAL: Final = timedelta(hours=1, minutes=7, seconds=11)
RANGE: Final = timedelta(hours=1, minutes=7, seconds=13)
INTERVAL: Final = timedelta(hours=1, minutes=7, seconds=17)
_VARIABLES: Final[Mapping[str, timedelta]] = {"__rate_interval": RATE_INTERVAL, "__range": RANGE, "__interval": INTERVAL}
_VARIABLE: Final = re.compile(r"\$(?:\{(__\w+)\}|(__\w+))")


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
