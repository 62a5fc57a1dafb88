"""Child processes of a command: readiness, early exit, orderly stop, no leftovers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from handrail_cli.subprocesses import Child, ChildError, Children, free_ports

# Says that it is ready. When it is ended, it leaves its name in a file that all of them share.
READY = """
import json, os, signal, sys
path = sys.argv[1]
def end(*_):
    with open(os.path.join(os.path.dirname(path), "ends"), "a") as ends:
        ends.write(os.path.basename(path).split(".")[0] + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
with open(path + ".tmp", "w") as draft:
    json.dump({"pid": os.getpid(), "addresses": {"http": "127.0.0.1:1"}}, draft)
os.rename(path + ".tmp", path)
signal.pause()
"""
DEAF = READY.replace("signal.SIGTERM, end", "signal.SIGTERM, signal.SIG_IGN")


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path)
    yield started
    started.end([], grace_s=0.1)


def start(children: Children, name: str, code: str, *, may_end: bool = False) -> Child:
    return children.start(name, [sys.executable, "-c", code, str(children.ready_file(name))], may_end=may_end)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_child_says_where_it_listens(children: Children) -> None:
    child = start(children, "one", READY)
    children.wait_ready([child], 90)
    assert child.addresses == {"http": "127.0.0.1:1"}
    assert json.loads(child.ready_file.read_text())["pid"] == child.pid


@pytest.mark.parametrize(("code", "status"), [("print('no port'); raise SystemExit(3)", 3), ("print('no port')", 0)])
def test_an_early_end_is_reported_with_the_last_output(children: Children, code: str, status: int) -> None:
    child = start(children, "one", code)
    with pytest.raises(ChildError, match=rf"one ended with status {status}[^|]*\| no port"):
        children.wait_ready([child], 90)


def test_one_that_may_end_is_no_failure_unless_it_fails(children: Children) -> None:
    good = start(children, "good", "pass", may_end=True)
    children.wait_for("its end", lambda: good.poll() is not None, 90)
    children.check()
    bad = start(children, "bad", "raise SystemExit(1)", may_end=True)
    with pytest.raises(ChildError, match="bad ended with status 1"):
        children.wait_for("nothing", lambda: bad.poll() is None and False, 90)


def test_waiting_in_vain_ends(children: Children) -> None:
    child = start(children, "one", "import time; time.sleep(60)")
    with pytest.raises(ChildError, match=r"one did not start: not within 0\.2 s"):
        children.wait_ready([child], 0.2)


def test_ends_come_in_order_and_none_is_left(children: Children) -> None:
    late, early, rest = (start(children, name, READY) for name in ("late", "early", "rest"))
    children.wait_ready([late, early, rest], 90)
    children.end([[early], [late]], grace_s=90)
    assert (children.folder / "ends").read_text().split() == ["early", "late", "rest"]
    assert all(gone(child.pid) for child in (late, early, rest))
    children.check()


def test_a_deaf_child_is_forced(children: Children) -> None:
    child = start(children, "deaf", DEAF)
    children.wait_ready([child], 90)
    children.end([[child]], grace_s=0.2)
    assert gone(child.pid)  # it would otherwise pause for ever


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50


def test_a_signal_that_was_swallowed_ends_the_command_at_the_next_look(tmp_path: Path) -> None:
    came: list[BaseException] = []

    def requested_to_end() -> None:
        if came:
            raise came[-1]

    started = Children(tmp_path, requested_to_end)
    started.check()
    came.append(SystemExit(143))  # as the handler leaves it where a callback of the interpreter swallowed its exception
    with pytest.raises(SystemExit):
        started.wait_for("nothing", lambda: False, 60.0)
