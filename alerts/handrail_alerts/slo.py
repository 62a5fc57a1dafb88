"""The file of objectives and limits, ``slo.yaml``.

It has the objectives of models and pools, and the limits of the other alerts.
Every problem of a file is reported at once, each with its line, what is valid and the nearest known key.
"""

# ruff: noqa: RUF009 - setting() and section() return dataclasses.field(), which is what a default should be
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from handrail.config.schema import (
    ConfigError,
    Given,
    Key,
    Problem,
    keys,
    not_yaml,
    parse,
    read_text,
    section,
    setting,
    unknown_key,
)
from handrail.config.types import Duration, nearest
from handrail.records import Role
from handrail_alerts.limits import AlertLimits
from handrail_alerts.objective import ObjectiveSignal, ServiceObjective
from handrail_alerts.selector import LABEL, refused

DEFAULT: Final = Path(__file__).with_name("slo.yaml")
_OBJECTIVES: Final = "objectives"
_EXAMPLE: Final = "objectives: [{signal: ttft, role: edge, threshold: 2s, target_percent: 99}]"


MOST_SCRAPE_NS: Final = 120 * 10**9
"""The longest scrape interval.

Prometheus drops a series 5 minutes after its last sample, so this leaves room for a scrape or two that fail.
"""

_OWN_LABELS: Final = {
    *("cause", "device", "engine", "finding", "gpu", "instance", "job", "kind", "le", "listener", "met", "model_name", "outcome"),
    *("peer", "phase", "reason", "role", "scope", "slo", "source", "target", "use"),
}
"""Labels of Handrail's series or of the target itself.

Rules group by these where they need to.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """How Prometheus scrapes the metrics and evaluates the rules."""

    selector: str = setting(
        "",
        help="matchers that every series of Handrail's has, as PromQL writes them",
        example="""'job="handrail"'""",
        unset="none",
    )
    group_by: tuple[str, ...] = setting(
        ("cluster",), help="labels of a target that tell one fleet from another", example="[cluster, namespace]"
    )
    scrape_interval: Duration = setting(
        Duration(15 * 10**9),
        help="every window of a rule is at least four of these",
        example="30s",
        at_least=10**9,
        at_most=MOST_SCRAPE_NS,
    )
    evaluation_interval: Duration = setting(
        Duration(15 * 10**9), help="how often the rules are evaluated", example="30s", at_least=10**9
    )

    def problems(self) -> Iterator[Problem]:
        """Yield the problems for which Prometheus would refuse the rules."""
        if self.selector and (rule := refused(self.selector)):
            example = """selector: 'job="handrail"'"""
            yield Problem(path="prometheus.selector", value=self.selector, rule=rule, example=example)
        for label in self.group_by:
            if not LABEL.fullmatch(label):
                rule = "must be names of labels: letters, digits and _"
            elif label in _OWN_LABELS:
                rule = "must be labels that Prometheus gives to a whole fleet, not those of one series or target"
            else:
                continue
            yield Problem(path="prometheus.group_by", value=label, rule=rule, example="group_by: [cluster, namespace]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Top:
    window: Duration = setting(
        Duration(30 * 86400 * 10**9),
        help="of the error budgets",
        example="28d",
        at_least=7 * 86400 * 10**9,
        at_most=366 * 86400 * 10**9,
    )
    min_requests: int = setting(
        30, help="a burn rate over fewer requests (gaps, fetches) in its long window says nothing", example="100", at_least=1
    )
    min_failures: int = setting(3, help="nor does one over fewer failures", example="5", at_least=1)
    limits: AlertLimits = section(AlertLimits)
    prometheus: Prometheus = section(Prometheus)

    def cross_check(self) -> Iterator[Problem]:
        """Yield the problems that no single field shows."""
        yield from self.prometheus.problems()


@dataclass(frozen=True, slots=True, kw_only=True)
class SloFile:
    """The content of a valid file."""

    objectives: tuple[ServiceObjective, ...]
    window: Duration
    min_requests: int
    min_failures: int
    limits: AlertLimits
    prometheus: Prometheus

    def others(self, objective: ServiceObjective) -> tuple[str, ...]:
        """Return the models that other objectives of its signal and role name.

        An objective without models does not cover these.
        """
        same = [each for each in self.objectives if (each.signal, each.role) == (objective.signal, objective.role)]
        return () if objective.models else tuple(dict.fromkeys(model for each in same for model in each.models))


def load(file: Path = DEFAULT) -> SloFile:
    """Load a file. Raises ``ConfigError`` with every problem of the file."""
    return read(read_text(file), str(file))


def read(text: str, name: str) -> SloFile:
    """Parse the text of a file called ``name``, as ``load`` does."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError([not_yaml(error, name)], name) from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError([Problem(path=name, rule="must be a mapping of keys to values", example=_EXAMPLE)], name)
    problems: list[Problem] = []
    given = _given(root, "", list(keys(_Top)), name, problems)
    top = _parsed(_Top, given, "", name, problems)
    objectives = _objectives(root, name, problems)
    if top is not None and not problems:
        problems += _together(objectives, top)
    if problems or top is None:
        raise ConfigError(problems, name)
    return SloFile(
        objectives=tuple(objective for objective, _ in objectives),
        window=top.window,
        min_requests=top.min_requests,
        min_failures=top.min_failures,
        limits=top.limits,
        prometheus=top.prometheus,
    )


def _objectives(root: Any, name: str, problems: list[Problem]) -> list[tuple[ServiceObjective, str]]:
    """Parse the objectives, each with its place in the file."""
    import yaml

    found: list[tuple[ServiceObjective, str]] = []
    node = next((value for key, value in root.value if key.value == _OBJECTIVES), None)
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        where = f"{name}:{node.start_mark.line + 1}" if node is not None else ""
        problems.append(Problem(path=_OBJECTIVES, rule="must be a list of at least one objective", where=where, example=_EXAMPLE))
        return found
    known = list(keys(ServiceObjective))
    for index, item in enumerate(node.value):
        path, where = f"{_OBJECTIVES}[{index}]", f"{name}:{item.start_mark.line + 1}"
        if not isinstance(item, yaml.MappingNode):
            problems.append(Problem(path=path, rule="must be a mapping", where=where, example=_EXAMPLE))
            continue
        objective = _parsed(ServiceObjective, _given(item, f"{path}.", known, name, problems), f"{path}.", where, problems)
        if objective is not None:
            found.append((objective, where))
    return found


_Config = TypeVar("_Config")


def _parsed(cls: type[_Config], given: Mapping[str, Given], prefix: str, where: str, problems: list[Problem]) -> _Config | None:
    """Build one class from its values; problems get their full path."""
    try:
        return parse(cls, None, where, given)
    except ConfigError as error:
        problems += [
            dataclasses.replace(
                each,
                path=f"{prefix}{each.path}",
                rule=each.rule.partition(", in the file or as ")[0],  # there are no flags
                where=each.where or (where if prefix else ""),
            )
            for each in error.problems
        ]
        return None


def _given(node: Any, prefix: str, known: Sequence[Key], name: str, problems: list[Problem], inner: str = "") -> dict[str, Given]:
    """Collect the values of a mapping by their path below it.

    Unknown and repeated keys become problems.
    """
    import yaml

    found: dict[str, Given] = {}
    paths = {key.path for key in known}
    sections = {path.partition(".")[0] for path in paths if "." in path}
    seen: set[str] = set()
    for key_node, value in node.value:
        where, path = f"{name}:{key_node.start_mark.line + 1}", f"{inner}{key_node.value}"
        if path in seen:
            problems.append(Problem(path=f"{prefix}{path}", rule="is given twice", where=where))
        elif path in sections and isinstance(value, yaml.MappingNode):
            found |= _given(value, prefix, known, name, problems, f"{path}.")
        elif path in paths:
            found[path] = Given(_plain(value), where)
        elif not (path == _OBJECTIVES and not prefix):
            problem = unknown_key(path, known, where)
            if not prefix and nearest(path, (_OBJECTIVES,)):
                problem = dataclasses.replace(problem, nearest=_OBJECTIVES, example=_EXAMPLE)
            problems.append(dataclasses.replace(problem, path=f"{prefix}{path}"))
        seen.add(path)
    return found


def _plain(node: Any) -> str | list[str] | dict[str, str]:
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [str(each.value) if isinstance(each, yaml.ScalarNode) else "" for each in node.value]
    return {str(key.value): str(value.value) for key, value in node.value}


def _together(objectives: Sequence[tuple[ServiceObjective, str]], top: _Top) -> Iterator[Problem]:
    """Yield the conflicts between objectives, and between an objective and the window."""
    from handrail_alerts.burn_windows import unreachable_target

    names: dict[str, str] = {}
    owners: dict[tuple[ObjectiveSignal, Role | None, str], str] = {}
    for index, (objective, where) in enumerate(objectives):
        path = f"{_OBJECTIVES}[{index}]"
        for model in objective.models or ("",):
            owner = owners.setdefault((objective.signal, objective.role, model), path)
            if owner != path:
                rule = f"{objective.signal.value} of {model or 'every other model'} is promised by {owner} too"
                yield Problem(path=f"{path}.models", rule=rule, where=where, example="each model in one objective only")
        if names.setdefault(objective.name, path) != path:
            rule = f"{objective.name!r} is the name of {names[objective.name]} too: give each a name of its own"
            yield Problem(path=f"{path}.name", rule=rule, where=where, example=f"name: {objective.name}-2")
        least = unreachable_target(top.window)
        if objective.target_percent <= least:
            rule = "leaves so much budget that it can hardly be burnt fast enough for a page"
            yield Problem(
                path=f"{path}.target_percent",
                value=f"{objective.target_percent:g}",
                rule=rule,
                where=where,
                example=f"above {least:.4g}, or a threshold that more requests keep",
            )
