"""The battery of faults as a program: contents, verdicts, output.

``make test-faults`` runs it whole.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults import battery, table
from faults.__main__ import main
from faults.battery import GROUPS, Runner, Verdict
from faults.trial import Context, NotRunError, Trial

QUICK = ("disk.data_start_read_only", "kill.collector_stopped")


def trial(name: str = "disk.made", **changes: object) -> Trial:
    fields = {"group": "disk", "expected": "it holds", "seconds": 1.0, "run": lambda context: ("it held", True)}
    return Trial(name=name, **{**fields, **changes})  # type: ignore[arg-type]


def test_every_group_has_trials_of_its_name_and_no_name_is_used_twice() -> None:
    every = battery.trials()
    assert {each.group for each in every} == set(GROUPS)
    assert len({each.name for each in every}) == len(every)
    assert [each.name for each in every if not each.name.startswith(f"{each.group}.")] == []
    assert [each.name for each in every if not each.expected or each.seconds <= 0] == []


def test_both_forms_fit_their_bounds() -> None:
    for long in (False, True):
        alone = sum(each.estimate_s(long) for each in battery.trials() if not each.beside)
        beside = sum(each.estimate_s(long) for each in battery.trials() if each.beside)
        assert alone + beside / battery.AT_ONCE[long] <= battery.LIMIT_S[long]


def test_names_are_chosen_by_beginning_and_by_pattern() -> None:
    every = [trial("disk.a"), trial("disk.b"), trial("kill.a")]
    assert [each.name for each in battery.chosen(every, ["disk"])] == ["disk.a", "disk.b"]
    assert [each.name for each in battery.chosen(every, ["*.a"])] == ["disk.a", "kill.a"]
    assert len(battery.chosen(every, [])) == 3


async def test_quick_trials_come_as_expected() -> None:
    shown: list[Verdict] = []
    verdicts = await Runner(1, False, shown.append).run(battery.chosen(battery.trials(), QUICK))
    assert [verdict.line() for verdict in verdicts if not verdict.ok and not verdict.not_run] == []
    assert {verdict.trial.name for verdict in shown} == set(QUICK)
    assert {"trial", "expected", "got", "ok"} <= set(verdicts[0].line())


def _raise(context: Context) -> tuple[str, bool]:
    raise NotRunError("no such thing here")


def _fail(context: Context) -> tuple[str, bool]:
    raise OSError("broken")


@pytest.mark.parametrize(
    ("run", "got", "ok"),
    [(_raise, "not run: no such thing here", False), (_fail, "OSError in _fail: broken", False)],
    ids=["not-run", "raises"],
)
def test_a_trial_that_gives_no_answer_is_a_row(
    run: object, got: str, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(battery, "trials", lambda: (trial(run=run),))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging, "disable", lambda _: None)
    monkeypatch.setenv("CI", "true")
    battery.child("disk.made", tmp_path / "verdict", tmp_path, 0, False, 5.0)
    answer = json.loads((tmp_path / "verdict").read_text())
    assert (answer["got"], answer["ok"]) == (got, ok)


def test_what_a_trial_leaves_running_is_ended() -> None:
    command = (sys.executable, "-c", "import time; print(flush=True); time.sleep(600)")
    with subprocess.Popen(command, env={**os.environ, battery.TOKEN: "left"}, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        left.stdout.readline()
        assert len(battery.end_all("left")) == 1
        assert left.wait() == -9


def test_rows_of_the_page_are_replaced_and_others_stay() -> None:
    verdicts = [Verdict(trial("disk.a"), "1 | 2", True, 3.0), Verdict(trial("kill.a"), "3", False, 4.0)]
    first = table.markdown(verdicts, 60, 7, False)
    assert "| `disk.a` | it holds | 1 \\| 2 | 3 s | ok |" in first
    again = table.markdown([Verdict(trial("disk.a"), "new", True, 3.0)], 60, 8, True, first)
    assert "| `disk.a` | it holds | new | 3 s | ok |" in again
    assert "| `kill.a` | it holds | 3 | 4 s | **no** |" in again
    assert again.startswith("Last run: long form, 1 trials in 1.0 minutes, seed 8;")


def test_the_list_names_every_trial(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert [each.name for each in battery.trials() if each.name not in shown] == []
