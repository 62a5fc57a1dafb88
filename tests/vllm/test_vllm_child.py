"""Children of the test bed: ready, or failed with their output.

They take everything they started with them when they end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from harness.skips import needs_ability
from vllm.child import Child, ChildError, free_port
from vllm.pair import Installation, NotInstalledError, find_installation

SERVER = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
READY = """
import json, pathlib, signal, sys
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(json.dumps({"pid": 1, "addresses": {"proxy": "127.0.0.1:1"}}))
part.rename(sys.argv[1])
signal.pause()
"""
FAMILY = """
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
signal.pause()
"""


def soon() -> float:
    return time.monotonic() + 20


def python(name: str, code: str, *arguments: str, folder: Path) -> Child:
    return Child(name, (sys.executable, "-c", code, *arguments), log=folder / f"{name}.log")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie has ended; its adopter has not reaped it yet


def test_a_child_is_ready_when_it_answers_and_ends_on_request(tmp_path: Path) -> None:
    port = free_port()
    with python("server", SERVER, str(port), folder=tmp_path) as child:
        child.wait_http(f"http://127.0.0.1:{port}/", deadline_s=soon())
        assert child.exit_status is None
    assert child.exit_status == -signal.SIGTERM


def test_it_is_ready_when_its_ready_file_is_there(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with python("part", READY, str(ready), folder=tmp_path) as child:
        assert child.wait_ready_file(ready, deadline_s=soon()) == {"proxy": "127.0.0.1:1"}


def test_one_that_ends_too_early_says_why(tmp_path: Path) -> None:
    child = python("broken", "import sys; sys.exit('no model')", folder=tmp_path)
    with child, pytest.raises(ChildError, match=r"broken ended with status 1 before it was ready:\nno model"):
        child.wait_http("http://127.0.0.1:9/", deadline_s=soon())


def test_one_that_is_never_ready_is_not_waited_for_any_longer(tmp_path: Path) -> None:
    with python("mute", "import signal; signal.pause()", folder=tmp_path) as child, pytest.raises(ChildError, match="in time"):
        child.wait_ready_file(tmp_path / "ready.json", deadline_s=time.monotonic())


@needs_ability(sys.platform == "linux", "/proc")
def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    found = tmp_path / "pid"
    child = python("family", FAMILY, str(found), folder=tmp_path)
    deadline_s = soon()
    while not found.exists() or not found.read_text():
        assert child.exit_status is None, child.output()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    grandchild = int(found.read_text())
    assert is_alive(grandchild)
    assert child.stop(grace_s=0.1) == -signal.SIGKILL
    deadline_s = soon()
    while is_alive(grandchild):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_ports_are_handed_out_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50


def test_an_unfinished_installation_is_none(tmp_path: Path) -> None:
    root = tmp_path / "vllm-0.32.0"
    (root / "venv/bin").mkdir(parents=True)
    (root / ".venv-1").touch()
    with pytest.raises(NotInstalledError, match=r"install\.sh"):
        find_installation(tmp_path)
    (root / ".venv_router-1").touch()
    (root / ".models-1.1").touch()
    assert find_installation(tmp_path) == Installation(root)
