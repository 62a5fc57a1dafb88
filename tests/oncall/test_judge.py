"""The judge of notifications and Prometheus answers.

It must not take a wrong alert for a right one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from handrail_alerts.groups import files
from handrail_alerts.inhibition import COMPANIONS
from handrail_alerts.slo import load
from oncall.alarm import SHIPPED, Notification, read_notification
from oncall.cases import CASES, HEALTHY, HERE
from oncall.judge import Verdict, first, first_true, judge
from oncall.quantiles import Reading, exact, query, wrong
from oncall.report import markdown


def notification(name: str, at: float, severity: str = "page", *, resolved: bool = False, **labels: str) -> Notification:
    return Notification(at, "pager", resolved, {"alertname": name, "cluster": "c", "severity": severity, **labels}, "")


def judged(
    *notifications: Notification,
    alert: str | None = "KvFetchFailed",
    true: float | None = 100.0,
    labels: Mapping[str, str] | None = None,
) -> Verdict:
    """Judge a case whose fault came at 90 s and whose rule waits a minute."""
    times = {"fault_unix_s": 90.0, "true_unix_s": true, "wait_s": 60.0, "interval_s": 15.0}
    return judge("c", "words", alert, labels or {}, notifications, **times)  # type: ignore[arg-type]


def test_an_alert_in_time_is_right() -> None:
    verdict = judged(notification("KvFetchFailed", 189.0), notification("KvExpiring", 191.0, "ticket"))
    assert (verdict.late_s, verdict.after_s, verdict.tickets, verdict.wrong) == (29.0, 99.0, ("KvExpiring",), ())


@pytest.mark.parametrize(
    ("notifications", "labels", "why"),
    [
        ((), {}, "KvFetchFailed never came, though its condition held"),
        ((notification("KvFetchFailed", 150.0, resolved=True),), {}, "KvFetchFailed never came, though its condition held"),
        (
            (notification("KvFetchFailed", 150.0, outcome="hung"),),
            {"outcome": "failed"},
            "KvFetchFailed never came, though its condition held",
        ),
        ((notification("KvFetchFailed", 191.0),), {}, "31 s late"),
        ((notification("KvFetchFailed", 89.0),), {}, "KvFetchFailed came before the fault"),
        (
            (notification("KvFetchFailed", 150.0), notification("GpuLost", 150.0)),
            {},
            "GpuLost paged and is no companion of KvFetchFailed",
        ),
    ],
    ids=["nothing", "resolved only", "other labels", "late", "early", "another page"],
)
def test_anything_else_is_wrong(notifications: tuple[Notification, ...], labels: dict[str, str], why: str) -> None:
    assert why in judged(*notifications, labels=labels).wrong


def test_a_companion_may_page_and_an_unknown_condition_is_no_success() -> None:
    companion = COMPANIONS["KvFetchFailed"][0]
    assert judged(notification("KvFetchFailed", 150.0), notification(companion, 150.0)).wrong == ()
    assert judged(notification("KvFetchFailed", 150.0), true=None).wrong == ("when its condition was first true is not known",)


def test_a_healthy_fleet_may_not_even_have_a_ticket() -> None:
    assert judged(alert=None).wrong == ()
    assert judged(notification("KvExpiring", 150.0, "ticket"), alert=None).wrong == ("KvExpiring came though nothing was wrong",)


def test_the_first_is_the_earliest_that_fires() -> None:
    found = first(
        [notification("A", 3.0), notification("A", 2.0), notification("A", 1.0, resolved=True), notification("B", 0.0)], "A", {}
    )
    assert found is not None
    assert found.received_unix_s == 2.0


def series(*times: float, **labels: str) -> dict[str, Any]:
    return {"metric": {"cluster": "c", **labels}, "values": [[at, "1"] for at in times]}


@pytest.mark.parametrize(
    ("found", "until", "since"),
    [
        ([], 50.0, None),
        ([series(10, 11, 12)], 50.0, 9.0),
        ([series(10, 11, 20, 21)], 50.0, 19.0),
        ([series(10, 11, 20, 21)], 15.0, 9.0),
        ([series(30, 31)], 15.0, 29.0),
        ([series(10, role="edge"), series(5, role="decode")], 50.0, 9.0),
        ([{"metric": {"cluster": "other"}, "values": [[1, "1"]]}], 50.0, None),
    ],
    ids=["nothing", "whole", "began anew", "before it began anew", "only later", "other labels", "another fleet"],
)
def test_since_when_a_condition_holds(found: list[dict[str, Any]], until: float, since: float | None) -> None:
    assert first_true(found, "c", {"role": "edge"}, until) == since


def test_a_notification_is_read_and_anything_else_refused() -> None:
    alert = {
        "status": "firing",
        "labels": {"alertname": "A", "cluster": "c", "severity": "page"},
        "annotations": {"summary": "s"},
    }
    (found,) = read_notification(json.dumps({"version": "4", "alerts": [alert]}).encode(), "page", 7.0)
    assert (found.name, found.cluster, found.pages, found.resolved, found.summary) == ("A", "c", True, False, "s")
    for garbage in (b"[]", b"{}", b"\xff", b'{"alerts": 3}'):
        with pytest.raises(ValueError, match=r"."):
            read_notification(garbage, "page", 7.0)


def test_every_case_names_an_alert_that_ships_and_its_fleet_is_its_own() -> None:
    rules = {alert.name for groups in files(load(HERE / "slo.yaml")).values() for group in groups for alert in group.alerts}
    assert {case.alert for case in CASES} <= rules
    names = [case.name for case in (HEALTHY, *CASES)]
    assert len(names) == len(set(names))
    assert "http://127.0.0.1:9095" in SHIPPED.read_text(encoding="utf-8")


def test_the_page_keeps_the_rows_of_faults_that_were_not_injected_now() -> None:
    first = markdown(
        [Verdict(name="a", notified="x", alert="A"), Verdict(name="b", notified="x", alert="B", wrong=("31 s late",))]
    )
    again = markdown([Verdict(name="b", notified="y", alert="B"), Verdict(name="c", notified="x", alert="C")], first)
    assert [line.split(" | ")[:2] for line in again.splitlines()[2:]] == [["| a", "x"], ["| b", "y"], ["| c", "x"]]
    assert "late" not in again.splitlines()[3]


@pytest.mark.parametrize("what", ["ttft", "gap"])
@pytest.mark.parametrize("share", ["p50", "p99", "p99.9"])
def test_the_boards_query_has_no_variable_left(what: str, share: str) -> None:
    assert "$" not in query(what, share, "c", ".*", "edge", 400.0)


def test_quantiles_are_judged_by_the_raw_value() -> None:
    assert exact(range(1, 1001), 0.999) == 999
    assert exact([4.0], 0.5) == 4.0
    assert wrong([Reading("a", "ttft", "p50", 1.0, 1.09, 5), Reading("b", "gap", "p99", 1.0, 0.89, 5)]) == [
        "b: p99 of gap 11.0% off"
    ]
