"""The cases as promtool's test files, ``alerts/tests/*.yaml``.

Anyone who changes a rule can run them without Python.
promtool compares annotations too. promtool itself writes their texts when the files are made (``pytest --update``), and a
reviewer reads them in the diff.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from alert_cases import handoff, itself, pools, slo
from alert_cases.case import LONG, Case
from handrail_alerts.alert import Alert
from handrail_alerts.groups import files
from handrail_alerts.render import to_yaml
from handrail_alerts.slo import load

CASES: Final = (*slo.CASES, *handoff.CASES, *pools.CASES, *itself.CASES)
EVERY: Final = {"slo": "1m", LONG: "10m"}
"""The evaluation interval of a suite's rules, where it is not 15 s."""

HEAD: Final = "# promtool test rules alerts/tests/*.yaml. Made of tests/alert_cases: 'pytest --update' writes it.\n"

Annotations = Mapping[tuple[str, tuple[tuple[str, str], ...]], Mapping[str, str]]
"""Annotations by case and labels."""

_GOT: Final = re.compile(r"Labels:(\{.*\})\s+Annotations:(\{.*\})")
_PAIR: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@cache
def rule_files() -> dict[str, str]:
    """Map each alert to the name of the file that has its rules."""
    return {alert.name: name for name, groups in files(load()).items() for group in groups for alert in group.alerts}


@cache
def rules_of(alert: str) -> tuple[Alert, ...]:
    """Return the rules of that name."""
    return tuple(rule for groups in files(load()).values() for group in groups for rule in group.alerts if rule.name == alert)


@cache
def suites() -> dict[str, list[Case]]:
    """Return the cases of each test file."""
    where, found = rule_files(), dict[str, list[Case]]()
    for case in CASES:
        found.setdefault(case.suite or where[case.alert], []).append(case)
    return found


def key(case: Case, labels: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    return case.name, tuple(sorted(labels.items()))


def labels_of(case: Case, instance: Mapping[str, str]) -> dict[str, str]:
    """Return the labels with those of the rule; promtool wants all of them."""
    rules = rules_of(case.alert)
    if len(rules) == 1:
        labels = {"severity": rules[0].severity.value, **rules[0].labels, **instance}
    else:
        labels = {"severity": rules[0].severity.value, **instance}
    return {name: value for name, value in labels.items() if value}


def test_file(suite: str, cases: Iterable[Case], statement: Annotations, rules: Path) -> str:
    """Return one test file; ``rules``: the folder of the rule files as it sees it."""
    cases = list(cases)
    names = sorted({rule_files()[case.alert] for case in cases})
    content = {
        "rule_files": [str(rules / f"{name}.yaml") for name in names],
        "evaluation_interval": EVERY.get(suite, "15s"),
        "tests": [_test(case, statement) for case in cases],
    }
    return HEAD + to_yaml(content)


test_file.__test__ = False  # type: ignore[attr-defined]


def _test(case: Case, statement: Annotations) -> dict[str, Any]:
    expected = [labels_of(case, instance) for instance in case.fires]
    return {
        "name": f"{case.alert}: {case.name}",
        "interval": case.every,
        "input_series": [{"series": name, "values": values} for name, values in case.given.items()],
        "alert_rule_test": [
            {
                "eval_time": case.at,
                "alertname": case.alert,
                "exp_alerts": [
                    {"exp_labels": labels, "exp_annotations": dict(statement.get(key(case, labels), {}))} for labels in expected
                ],
            }
        ],
    }


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; the output is both streams."""
    return subprocess.run(
        ["promtool", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300
    )


def annotations_of(output: str, cases: Iterable[Case]) -> dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, str]]:
    """Return the annotations that promtool got, by case and labels.

    They are in its complaint that it expected none.
    """
    found: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, str]] = {}
    by_name = {f"{case.alert}: {case.name}": case for case in cases}
    for part in re.split(r"\n\s*name: ", output)[1:]:
        case = next((by_name[name] for name in by_name if part.startswith(name)), None)
        _, _, got = part.partition("got:")
        for labels, words in _GOT.findall(got) if case else ():
            of = _pairs(labels)
            of.pop("alertname", None)
            found[key(case, of)] = _pairs(words)  # type: ignore[arg-type]
    return found


def _pairs(text: str) -> dict[str, str]:
    return {name: value.encode().decode("unicode_escape").encode("latin-1").decode() for name, value in _PAIR.findall(text)}


def kept(text: str, cases: Iterable[Case]) -> dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, str]]:
    """Return the annotations that a test file has."""
    import yaml

    tests = {each["name"]: each for each in yaml.safe_load(text)["tests"]}
    found = {}
    for case in cases:
        test = tests.get(f"{case.alert}: {case.name}")
        for alert in test["alert_rule_test"][0]["exp_alerts"] if test else ():
            found[key(case, alert["exp_labels"])] = alert["exp_annotations"]
    return found
