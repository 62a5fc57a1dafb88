"""The rules as promtool sees them.

They are valid and up to date. Each fires where it should and stays silent elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alert_cases.promtool_files import CASES, annotations_of, kept, promtool, rule_files, suites, test_file
from handrail_alerts.alert import Alert
from handrail_alerts.groups import alerts, files
from handrail_alerts.render import rule_file
from handrail_alerts.slo import load
from harness.alert_tools import needs_promtool

ALERTS = Path(__file__).parents[2] / "alerts"
GENERATED, TESTS = ALERTS / "generated", ALERTS / "tests"
FROM_TESTS = Path("../generated")


def compare(file: Path, text: str, request: pytest.FixtureRequest) -> None:
    """Compare the committed file with what is made now; ``--update`` writes it."""
    if request.config.getoption("--update"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.exists(), f"{file} is missing: run this test with --update"
    assert file.read_text("utf-8") == text, f"{file} is not up to date: run this test with --update and review the diff"


@pytest.mark.parametrize("name", files(load()))
def test_the_rules_are_what_slo_yaml_makes(name: str, request: pytest.FixtureRequest) -> None:
    slo = load()
    compare(GENERATED / f"{name}.yaml", rule_file(files(slo)[name], slo), request)


def test_no_rule_file_is_left_over() -> None:
    assert {file.stem for file in GENERATED.glob("*.yaml")} == set(files(load()))
    assert {file.stem for file in TESTS.glob("*.yaml")} == set(suites())


@needs_promtool
def test_promtool_takes_every_rule_file() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", *sorted(GENERATED.glob("*.yaml")))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("suite", suites())
def test_the_test_files_are_what_the_cases_make(suite: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    file, cases = TESTS / f"{suite}.yaml", suites()[suite]
    if request.config.getoption("--update"):
        mute = tmp_path / "mute.yaml"
        mute.write_text(test_file(suite, cases, {}, GENERATED), encoding="utf-8")
        compare(file, test_file(suite, cases, annotations_of(promtool("test", "rules", mute).stdout, cases), FROM_TESTS), request)
    compare(file, test_file(suite, cases, kept(file.read_text("utf-8"), cases), FROM_TESTS), request)


@needs_promtool
@pytest.mark.parametrize("suite", suites())
def test_every_rule_fires_where_it_should_and_nowhere_else(suite: str) -> None:
    """The cases name these reported cases and no others.

    A01 A03 A04 A05 A08 A10 A14 A16 A17 A19 B08 C05 D13 F13 H01 H08 H10 H13 H14 H15.
    """
    done = promtool("test", "rules", TESTS / f"{suite}.yaml")
    assert done.returncode == 0, done.stdout


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    kinds = {(case.alert, bool(case.fires)) for case in CASES}
    without = [(alert, fires) for alert in sorted(rule_files()) for fires in (True, False) if (alert, fires) not in kinds]
    assert without == [], "add a case in tests/alert_cases"


def test_the_reported_cases_are_those_that_the_test_above_says() -> None:
    named = {word for case in CASES for word in case.name.split() if re.fullmatch(r"[A-H]\d\d", word)}
    assert named == set(re.findall(r"[A-H]\d\d", test_every_rule_fires_where_it_should_and_nowhere_else.__doc__ or ""))


def test_every_case_is_of_an_alert_and_has_its_own_name() -> None:
    assert {case.alert for case in CASES} <= set(rule_files())
    names = [(case.alert, case.name) for case in CASES]
    assert len(names) == len(set(names))


_SINCE = (
    *("in the last ", "of the last ", "or longer", "ago or earlier", "30s by default", "answered before"),
    *("for {{ $value | humanizeDuration }}", "expires in {{ $value | humanizeDuration }}"),
)
_THERE_OR_NOT = {
    *("KvTransfersStuck", "KvLinkSlow", "EngineDown", "EngineHung", "GpuLost", "HandrailAbsent", "EdgeSidecarDown"),
    *("SidecarDown", "CollectorDown", "HandOffsUnwatched", "EngineSendsNoSpans", "SecretStale", "SpoolDiskFailing"),
}


def _text_problems(alert: Alert) -> list[str]:
    problems = {
        "the summary is empty or ends in a full stop": not alert.summary or alert.summary.endswith("."),
        "the description does not end in a full stop": not alert.description.endswith("."),
        "the description does not say since when": not any(word in alert.description for word in _SINCE),
        "it gives no value with its unit": ("$value" in alert.summary + alert.description) is (alert.name in _THERE_OR_NOT),
    }
    return [f"{'-'.join((alert.name, *alert.labels.values()))}: {problem}" for problem, found in problems.items() if found]


def test_every_alert_says_since_when_and_how_much() -> None:
    assert [problem for alert in alerts(load()) for problem in _text_problems(alert)] == []
