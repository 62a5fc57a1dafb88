"""The file of objectives and limits, ``slo.yaml``.

It has the objectives of models and pools, and the limits of the other alerts.
Every problem of a file is reported at once, each with its line, what is valid and the nearest known key.
"""

# ruff: noqa: RUF009 - setting() and section() return dataclasses.field(), which is what a default should be
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from handrail.config import schema
from handrail.config.schema import Problem, section, setting
from handrail.config.types import Duration
from handrail.records import Role
from handrail_alerts.burn_windows import unreachable_target
from handrail_alerts.limits import AlertLimits
from handrail_alerts.objective import ObjectiveSignal, ServiceObjective
from handrail_alerts.selector import LABEL, refused

DEFAULT: Final = Path(__file__).with_name("slo.yaml")

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
        help="matchers that every series of Handrail has, in PromQL",
        example="""'job="handrail"'""",
        unset="none",
    )
    group_by: tuple[str, ...] = setting(
        ("cluster",), help="labels of targets that separate one fleet from another", example="[cluster, namespace]"
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
class SloFile:
    """The content of a valid file."""

    objectives: tuple[ServiceObjective, ...] = setting(
        help="objectives of models and pools",
        example="[{signal: ttft, role: edge, threshold: 2s, target_percent: 99}]",
        at_least=1,
    )
    window: Duration = setting(
        Duration(30 * 86400 * 10**9),
        help="window of the error budgets",
        example="28d",
        at_least=7 * 86400 * 10**9,
        at_most=366 * 86400 * 10**9,
    )
    min_requests: int = setting(
        30, help="fewest requests (gaps, fetches) in a long window for a burn-rate alert", example="100", at_least=1
    )
    min_failures: int = setting(3, help="fewest failures in a long window for a burn-rate alert", example="5", at_least=1)
    limits: AlertLimits = section(AlertLimits)
    prometheus: Prometheus = section(Prometheus)

    def others(self, objective: ServiceObjective) -> tuple[str, ...]:
        """Return the models that other objectives of its signal and role name.

        An objective without models does not cover these.
        """
        same = [each for each in self.objectives if (each.signal, each.role) == (objective.signal, objective.role)]
        return () if objective.models else tuple(dict.fromkeys(model for each in same for model in each.models))

    def cross_check(self) -> Iterator[Problem]:
        """Yield the conflicts between objectives, and between an objective and the window."""
        yield from self.prometheus.problems()
        names: dict[str, str] = {}
        owners: dict[tuple[ObjectiveSignal, Role | None, str], str] = {}
        for index, objective in enumerate(self.objectives):
            path = f"objectives[{index}]"
            for model in objective.models or ("",):
                owner = owners.setdefault((objective.signal, objective.role, model), path)
                if owner != path:
                    rule = f"{owner} already promises {objective.signal.value} of {model or 'every other model'}"
                    yield Problem(path=f"{path}.models", rule=rule, example="each model in one objective only")
            if names.setdefault(objective.name, path) != path:
                rule = f"{names[objective.name]} already has the name {objective.name!r}: give each a name of its own"
                yield Problem(path=f"{path}.name", rule=rule, example=f"name: {objective.name}-2")
            least = unreachable_target(self.window)
            if objective.target_percent <= least:
                yield Problem(
                    path=f"{path}.target_percent",
                    value=f"{objective.target_percent:g}",
                    rule="leaves so much budget that the fastest page cannot fire, even when every request fails",
                    example=f"above {least:.4g}, or a threshold that more requests keep",
                )


def load(file: Path = DEFAULT) -> SloFile:
    """Load a file. Raises ``ConfigError`` with every problem of the file."""
    return schema.load(SloFile, file)


def read(text: str, name: str) -> SloFile:
    """Parse the text of a file called ``name``, as ``load`` does."""
    return schema.parse(SloFile, text, name)
