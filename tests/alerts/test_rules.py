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


@pytest.mark.parametrize("alert", sorted(rule_files()))
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(alert: str) -> None:
    of_alert = [case for case in CASES if case.alert == alert]
    assert any(case.fires for case in of_alert), f"no case of {alert} fires: add one in tests/alert_cases"
    assert any(not case.fires for case in of_alert), f"no case of {alert} is silent: add one in tests/alert_cases"


def test_the_reported_cases_are_those_that_the_test_above_says() -> None:
    named = {word for case in CASES for word in case.name.split() if re.fullmatch(r"[A-H]\d\d", word)}
    assert named == set(re.findall(r"[A-H]\d\d", test_every_rule_fires_where_it_should_and_nowhere_else.__doc__ or ""))


def test_every_case_is_of_an_alert_and_has_its_own_name() -> None:
    assert {case.alert for case in CASES} <= set(rule_files())
    names = [(case.alert, case.name) for case in CASES]
    assert len(names) == len(set(names))


_SINCE = ("in the last ", "of the last ", "or longer", "for {{ $value | humanizeDuration }}", "30s by default", "answered before")
_THERE_OR_NOT = {
    *("KvTransfersStuck", "KvLinkSlow", "EngineDown", "EngineHung", "GpuLost", "HandrailAbsent", "EdgeSidecarDown"),
    *("SidecarDown", "CollectorDown", "HandOffsUnwatched", "EngineSendsNoSpans", "SecretStale", "SpoolDiskFailing"),
}


@pytest.mark.parametrize("alert", alerts(load()), ids=lambda alert: "-".join((alert.name, *alert.labels.values())))
def test_an_alert_says_since_when_and_how_much(alert: Alert) -> None:
    assert alert.summary
    assert not alert.summary.endswith(".")
    assert alert.description.endswith(".")
    assert any(word in alert.description for word in _SINCE), "it does not say since when"
    assert ("$value" in alert.summary + alert.description) is not (alert.name in _THERE_OR_NOT), "it gives no value with its unit"
