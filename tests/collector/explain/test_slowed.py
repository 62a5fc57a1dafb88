"""How slow a host was, by blocks of time."""

from __future__ import annotations

import numpy as np

from handrail_collector.explain.period.queue_replay import HostSlowdown

HOSTS = np.array(["p0", "p1"] * 300, object)
STARTED = np.arange(600, dtype=np.int64)
ENDS = np.array([200, 400], np.int64)
TYPICAL = np.full(600, 100.0)


def test_a_host_that_took_twice_as_long_is_slowed_then() -> None:
    took = np.where((HOSTS == "p0") & (STARTED >= 200) & (STARTED < 400), 200.0, 100.0)
    slowed = HostSlowdown.fit(HOSTS, STARTED, took, TYPICAL, ENDS)
    assert slowed.at(np.array(["p0", "p0", "p0", "p1"], object), np.array([199, 200, 400, 300])).tolist() == [1, 2, 1, 1]


def test_a_little_more_is_as_typical() -> None:
    slowed = HostSlowdown.fit(HOSTS, STARTED, TYPICAL * 1.2, TYPICAL, ENDS)
    assert (slowed.at(HOSTS, STARTED) == 1).all()


def test_too_few_say_nothing_and_an_unknown_host_neither() -> None:
    few = np.flatnonzero(STARTED < 30)
    slowed = HostSlowdown.fit(HOSTS[few], STARTED[few], TYPICAL[few] * 3, TYPICAL[few], ENDS)
    assert (slowed.at(HOSTS, STARTED) == 1).all()
    assert slowed.at(np.array(["p9"], object), np.array([5])).tolist() == [1]
