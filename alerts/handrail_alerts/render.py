"""Render rules as YAML for Prometheus or for its operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final

from handrail_alerts.alert import Alert, Recording, RuleGroup, prometheus
from handrail_alerts.slo import SloFile

RUNBOOKS: Final = "docs/runbooks"
"""The default place of the runbook pages.

It is below the repository, or below the address that serves the documentation.
"""

HEAD: Final = "# Made by 'handrail alerts render': change slo.yaml, or handrail_alerts, not this file.\n"


class Format(str, Enum):
    """The target of the rules."""

    PROMETHEUS = "prometheus"
    PROMETHEUSRULE = "prometheusrule"  # the operator's object


def rule_file(groups: Iterable[RuleGroup], slo: SloFile, runbooks: str = RUNBOOKS) -> str:
    """Render one rule file of Prometheus."""
    return HEAD + to_yaml({"groups": [_group(group, slo, runbooks) for group in groups]})


def rule_object(files: Mapping[str, Iterable[RuleGroup]], slo: SloFile, runbooks: str = RUNBOOKS) -> str:
    """Render every group as one PrometheusRule."""
    groups = [_group(group, slo, runbooks) for each in files.values() for group in each]
    labels = {"app.kubernetes.io/name": "handrail", "app.kubernetes.io/component": "alerts"}
    return HEAD + to_yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "handrail", "labels": labels},
            "spec": {"groups": groups},
        }
    )


def runbook(alert: str, runbooks: str = RUNBOOKS) -> str:
    """Return the address of an alert's runbook page."""
    return f"{runbooks.rstrip('/')}/{alert}.md"


def to_yaml(value: Any) -> str:
    """Render plain data as YAML, with texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc,unused-ignore]
        """A dumper that writes blocks, and indents lists below their key."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def text(dumper: Any, data: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000))


def _group(group: RuleGroup, slo: SloFile, runbooks: str) -> dict[str, Any]:
    return {
        "name": group.name,
        "interval": prometheus(slo.prometheus.evaluation_interval),
        "rules": [_alert(rule, runbooks) if isinstance(rule, Alert) else _recording(rule) for rule in group.rules],
    }


def _recording(rule: Recording) -> dict[str, Any]:
    labels = {"labels": dict(rule.labels)} if rule.labels else {}
    return {"record": rule.record, "expr": rule.expr, **labels}


def _alert(alert: Alert, runbooks: str) -> dict[str, Any]:
    hold = {"keep_firing_for": prometheus(alert.hold)} if alert.hold else {}
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": prometheus(alert.wait),
        **hold,
        "labels": {"severity": alert.severity.value, **alert.labels},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "command": alert.command,
            "runbook_url": runbook(alert.name, runbooks),
        },
    }
