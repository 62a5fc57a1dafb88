"""Judge a case: the right alert in time, and nothing but its companions.

The runbook says what may come with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from handrail_alerts.inhibition import COMPANIONS
from oncall.alarm import Notification

INTERVALS: Final = 2
"""Evaluation intervals that an alert may take to the pager after its ``for``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a case; times are in seconds.

    ``late_s``: from when the condition had held for the rule's ``for`` until the pager got the alert; None: it never came.
    ``after_s``: the same from the fault's beginning.
    ``pages`` and ``tickets``: what else came, by name.
    ``wrong``: why the case failed, empty when it succeeded.
    """

    name: str
    notified: str
    alert: str
    wait_s: float = 0.0
    late_s: float | None = None
    after_s: float | None = None
    pages: tuple[str, ...] = ()
    tickets: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


def matches(notification: Notification, alert: str, labels: Mapping[str, str]) -> bool:
    return notification.name == alert and all(notification.labels.get(name) == value for name, value in labels.items())


def first(notifications: Iterable[Notification], alert: str, labels: Mapping[str, str]) -> Notification | None:
    """Return the earliest firing notification of this alert."""
    found = [each for each in notifications if not each.resolved and matches(each, alert, labels)]
    return min(found, key=lambda each: each.received_unix_s) if found else None


def others(notifications: Iterable[Notification], alert: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the pages and of the tickets beside ``alert``.

    Each name is there once, in order of arrival.
    """
    firing = [each for each in notifications if not each.resolved and each.name != alert]
    return tuple(tuple(dict.fromkeys(each.name for each in firing if each.pages is pages)) for pages in (True, False))  # type: ignore[return-value]


def first_true(
    series: Sequence[Mapping[str, Any]], cluster: str, labels: Mapping[str, str], until_unix_s: float, step_s: float = 1.0
) -> float | None:
    """Return since when a series of this cluster with these labels exists.

    ``series`` is the answer to a range query. The result is in unix seconds, at the earliest: one step before the series was
    seen.
    If the series came and went, it is the last beginning not after ``until_unix_s``: an alert's ``for`` starts again with each.
    """
    begins = []
    for each in series:
        metric = each["metric"]
        if metric.get("cluster") == cluster and all(metric.get(name, value) == value for name, value in labels.items()):
            times = [float(at) for at, _ in each["values"]]
            begins += [at for before, at in zip((-math.inf, *times), times, strict=False) if at - before > 1.5 * step_s]
    since = max((at for at in begins if at <= until_unix_s + step_s), default=min(begins, default=None))
    return None if since is None else since - step_s


def judge(
    name: str,
    reported_words: str,
    alert: str | None,
    labels: Mapping[str, str],
    notifications: Sequence[Notification],
    *,
    fault_unix_s: float,
    true_unix_s: float | None,
    wait_s: float,
    interval_s: float,
) -> Verdict:
    """Judge a case by its notifications.

    ``notifications``: all that the pager got from this cluster.
    ``true_unix_s``: when the alert's expression first held.
    """
    if alert is None:
        pages, tickets = others(notifications, "")
        wrong = tuple(f"{each} came though nothing was wrong" for each in (*pages, *tickets))
        return Verdict(name=name, notified=reported_words, alert="none", pages=pages, tickets=tickets, wrong=wrong)
    pages, tickets = others(notifications, alert)
    wrongs = [f"{each} paged and is no companion of {alert}" for each in pages if each not in COMPANIONS[alert]]
    early = [each for each in notifications if not each.resolved and each.received_unix_s < fault_unix_s]
    wrongs += [f"{each.name} came before the fault" for each in early]
    came = first(notifications, alert, labels)
    late_s = after_s = None
    if came is None:
        wrongs.insert(0, f"{alert} never came" + (", though its condition held" if true_unix_s is not None else ""))
    else:
        after_s = came.received_unix_s - fault_unix_s
        if true_unix_s is None:
            wrongs.append("when its condition was first true is not known")
        else:
            late_s = came.received_unix_s - true_unix_s - wait_s
            if late_s > INTERVALS * interval_s:
                wrongs.append(f"{late_s:.0f} s late")
    return Verdict(
        name=name,
        notified=reported_words,
        alert=alert,
        wait_s=wait_s,
        late_s=late_s,
        after_s=after_s,
        pages=pages,
        tickets=tickets,
        wrong=tuple(wrongs),
    )
