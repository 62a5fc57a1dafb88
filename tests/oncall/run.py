"""Run the cases side by side, as many as the machine can take.

Each is judged when its alert has come or its time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from handrail_cli.subprocesses import ChildError
from harness.real_fleet import Fleet
from oncall.alarm import Alarm, Notification, Rule
from oncall.cases import Case, Run
from oncall.judge import Verdict, first, first_true, judge

STARTS_AT_ONCE = 2
LINGER_S = 75.0
"""Seconds that a fleet runs after its alert, for what comes with it.

It is more than Alertmanager's group_interval.
"""

SLACK_S = 360.0
"""Seconds after fault and ``for`` until an alert is given up.

Windows have to fill first.
"""

_POLL_S = 0.25
_STEP_S = 1.0


@dataclass(slots=True)
class _Going:
    """One case in progress; times are unix seconds."""

    case: Case
    fleet: Fleet
    run: Run
    starting: Iterator[str] | None
    until_s: float
    wait_s: float
    fault_s: float | None = None
    began_s: float | None = None
    true_s: float | None = None
    came: Notification | None = None
    unfinished: bool = True
    failed: str = ""


@dataclass(slots=True)
class Bench:
    """Runs the cases; ``say`` gets the progress, a line at a time."""

    alarm: Alarm
    folder: Path
    interval_s: int
    say: Callable[[str], None]

    def run(self, cases: Sequence[Case], at_once: int, healthy_s: float) -> list[Verdict]:
        """Run the cases in the given order.

        ``healthy_s``: how long a case without an alert runs.
        Each is judged again at the end: a notification that reaches the pager after its fleet has gone counts too.
        """
        rules = self.alarm.rules()
        waiting, seen = list(cases), 0
        going: list[_Going] = []
        over: dict[str, _Going] = {}
        try:
            while waiting or going:
                starting = sum(each.starting is not None for each in going)
                while waiting and len(going) < at_once and starting < STARTS_AT_ONCE:
                    going.append(self._open(waiting.pop(0), rules, healthy_s))
                    starting += 1
                reported_notifications, seen = self.alarm.pager.notifications[seen:], len(self.alarm.pager.notifications)
                for notification in reported_notifications:
                    self._hear(notification, going)
                for each in list(going):
                    if self._step(each, healthy_s):
                        self._close(each, rules)
                        going.remove(each)
                        over[each.case.name] = each
                        left = f"{len(over)} of {len(cases)} done; {len(going)} running, {len(waiting)} waiting"
                        self.say(f"{_line(self._judged(each))}  ({left})")
                time.sleep(_POLL_S)
        finally:
            for each in going:
                each.run.end()
                each.fleet.end(5.0)
        return [self._judged(over[case.name]) for case in cases]

    def _open(self, case: Case, rules: Sequence[Rule], healthy_s: float) -> _Going:
        fleet = Fleet(case.name, self.folder / case.name, case.shape, seed=sum(case.name.encode()))
        wait_s = _rule(case, rules, case.labels).wait_s if case.alert else 0.0
        return _Going(case, fleet, case.run(), fleet.starting(), time.time() + 300.0, wait_s)

    def _hear(self, notification: Notification, going: Sequence[_Going]) -> None:
        kind = "page" if notification.pages else "ticket"
        if not notification.resolved:
            self.say(f"{notification.cluster}: {kind} {notification.name} {notification.summary!r}")
        for each in going:
            if each.case.name == notification.cluster and each.case.alert and each.came is None:
                each.came = first([notification], each.case.alert, each.case.labels)
                if each.came and each.case.unfinished:
                    each.unfinished = each.fleet[each.case.unfinished].poll() is None

    def _step(self, each: _Going, healthy_s: float) -> bool:
        """Advance one case; return whether it is over."""
        now = time.time()
        if each.starting is not None:
            try:
                if next(each.starting, None) is not None:
                    each.failed = "did not start within 5 minutes" if now > each.until_s else ""
                    return bool(each.failed)
            except ChildError as error:
                each.failed = f"did not start: {error}"
                return True
            each.starting = None
            self.alarm.watch(each.case.name, list(each.fleet.sidecar_pages.values()), each.fleet.collector_api)
            assert each.fleet.began_s is not None
            each.began_s = now - (time.monotonic() - each.fleet.began_s)
            slow_s = healthy_s if each.case.alert is None else each.case.at_s + each.wait_s + SLACK_S
            each.until_s = max(now, each.began_s) + slow_s
            self.say(f"{each.case.name}: runs")
            return False
        assert each.began_s is not None
        if each.fault_s is None:
            if now >= each.began_s + each.case.at_s:
                if self.alarm.scraped(each.case.name) < len(each.fleet.sidecar_pages) + 1 and each.case.at_s:
                    return self._too_early(each, now)
                each.fault_s = self._begun(each, now)
            return False
        each.run.go_on(each.fleet, now - each.fault_s)
        return now > (each.until_s if each.came is None else each.came.received_unix_s + LINGER_S)

    def _too_early(self, each: _Going, now: float) -> bool:
        self.say(f"{each.case.name}: its fault begins and not every page of it has been scraped")
        each.fault_s = self._begun(each, now)
        return False

    def _begun(self, each: _Going, now: float) -> float:
        """Start the fault; return since when it exists, in unix seconds.

        A fault of the fleet's own processes exists from its due time.
        """
        each.run.begin(each.fleet)
        assert each.began_s is not None
        return each.began_s + each.case.at_s if type(each.run) is Run else now

    def _close(self, each: _Going, rules: Sequence[Rule]) -> None:
        case, now = each.case, time.time()
        if case.alert and each.began_s is not None:
            labels = {**case.labels, **(each.came.labels if each.came else {})}
            came_s = each.came.received_unix_s if each.came else now
            found = self.alarm.ask_range(_rule(case, rules, labels).expr, each.began_s, now, _STEP_S)
            each.true_s = first_true(found, case.name, labels, came_s - each.wait_s)
        self.alarm.forget(case.name)
        each.run.end()
        each.fleet.end(5.0)

    def _judged(self, each: _Going) -> Verdict:
        case = each.case
        reported_notifications = [
            notification for notification in self.alarm.pager.notifications if notification.cluster == case.name
        ]
        verdict = judge(
            *(case.name, case.expected_text, case.alert, case.labels, reported_notifications),
            fault_unix_s=each.fault_s or time.time(),
            true_unix_s=each.true_s,
            wait_s=each.wait_s,
            interval_s=self.interval_s,
        )
        if each.failed:
            verdict = replace(verdict, wrong=(each.failed, *verdict.wrong))
        if not each.unfinished:
            verdict = replace(verdict, wrong=(*verdict.wrong, f"{case.unfinished} had ended before the alert came"))
        return verdict


def _rule(case: Case, rules: Sequence[Rule], labels: Mapping[str, str]) -> Rule:
    """Return the rule of the case's alert, or of several the one for these labels."""
    named = [rule for rule in rules if rule.name == case.alert]
    if not named:
        raise ValueError(f"{case.name}: no rule is called {case.alert}")
    return next((rule for rule in named if rule.labels.get("slo") == labels.get("slo")), named[0])


def _line(verdict: Verdict) -> str:
    if verdict.wrong:
        return f"{verdict.name}: WRONG: {'; '.join(verdict.wrong)}"
    late = "" if verdict.late_s is None else f", {verdict.late_s:.1f} s after its condition and for"
    return f"{verdict.name}: {verdict.alert}{late}"
