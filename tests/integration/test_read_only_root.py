"""The images' promises, tested without an image.

Collector and sidecar run as user 65532, without capabilities. Every file system is read-only except for the folders that
deploy/docker/Dockerfile makes for them.
Where this user may not enter the interpreter's folder, it gets the one capability to read there.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from handrail_cli.subprocesses import Children, free_ports
from harness.manifests import DEPLOY
from harness.skips import needs_ability
from harness.web import get, succeeds

_TOOLS = ("unshare", "setpriv", "findmnt", "mount")


def _may_mount() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)):
        return False
    return subprocess.run(("unshare", "--mount", "true"), capture_output=True, check=False).returncode == 0


pytestmark = [
    needs_ability(_may_mount(), f"root that may mount, and {', '.join(_TOOLS)} (util-linux): no read-only root is tried"),
    pytest.mark.timeout(600),
]

USER = "65532"
_START_S = 180.0
_READ_ONLY = """
mount -t tmpfs -o uid={user},gid={user},mode=750 tmpfs {data} || exit 77
for at in $(findmnt -rno TARGET -t ext2,ext3,ext4,xfs,btrfs,overlay); do mount -o remount,bind,ro "$at" || exit 77; done
touch {outside} 2>/dev/null && exit 78
cd {data} && exec setpriv --reuid {user} --regid {user} --clear-groups --no-new-privs --bounding-set=-all{reading} "$@"
"""


def reading(program: Path) -> str:
    """Return the flags that let the user read the interpreter, where it needs any."""
    reachable = all(parent.stat().st_mode & stat.S_IXOTH for parent in program.resolve().parents)
    return "" if reachable else ",+dac_read_search --inh-caps=-all,+dac_read_search --ambient-caps=+dac_read_search"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that everyone may enter; pytest's own are the user's alone."""
    made = Path(tempfile.mkdtemp(prefix="handrail-ro-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def fenced(folder: Path, name: str, words: Sequence[str]) -> list[str]:
    """Return a command line that runs ``handrail`` as the image does.

    ``folder/name`` is /var/lib/handrail and /run/handrail.
    """
    data = folder / name
    data.mkdir()
    program = Path(sys.executable)
    script = _READ_ONLY.format(data=data, outside=folder / "outside", user=USER, reading=reading(program))
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(program), "-m", "handrail_cli.main", *words]


def test_the_dockerfile_makes_no_more_than_these_folders() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8")
    assert f"USER {USER}:{USER}" in text
    assert f"install -d -o {USER} -g {USER} /var/lib/handrail && install -d -o {USER} -g {USER} -m 2770 /run/handrail" in text


def test_collector_and_sidecar_run_as_nobody_on_a_read_only_root(folder: Path) -> None:
    children = Children(folder)
    grpc, http, api, admin = free_ports(4)
    collector = ("--otlp-grpc", f"127.0.0.1:{grpc}", "--otlp-http", f"127.0.0.1:{http}", "--api", f"127.0.0.1:{api}")
    at = {name: folder / name for name in ("collector", "sidecar")}
    own = ("--data", str(at["collector"] / "data"), "--flush-interval", "1s")
    sidecar = ("--role", "decode", "--instance", "10.0.0.7:8000", "--metrics-url", f"http://127.0.0.1:{api}/metrics")
    kept = ("--plugin-socket", str(at["sidecar"] / "engine.sock"), "--spool-dir", str(at["sidecar"] / "spool"))
    to = ("--collector", f"http://127.0.0.1:{http}", "--admin", f"127.0.0.1:{admin}", "--gpu-sample", "off")
    try:
        first = children.start("collector-process", fenced(folder, "collector", ("collector", *collector, *own)))
        children.wait_for("the collector is not ready", partial(succeeds, f"http://127.0.0.1:{api}/readyz"), _START_S, poll_s=0.1)
        second = children.start("sidecar-process", fenced(folder, "sidecar", ("sidecar", *sidecar, *kept, *to)))
        children.wait_for("the sidecar is not ready", partial(succeeds, f"http://127.0.0.1:{admin}/readyz"), _START_S, poll_s=0.1)
        delivered = lambda: "handrail_sidecar_export_up 1.0" in get(f"http://127.0.0.1:{admin}/metrics")  # noqa: E731
        children.wait_for("the sidecar delivers nothing", delivered, _START_S, poll_s=0.2)
        for process in (first, second):
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            assert f"Uid:\t{USER}\t{USER}" in status
            assert "NoNewPrivs:\t1" in status
            effective = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
            assert effective & ~(1 << 2) == 0, "no capability, but CAP_DAC_READ_SEARCH at most"
        status_page = subprocess.run(
            ("nsenter", f"--mount=/proc/{first.pid}/ns/mnt", "ls", str(at["collector"] / "data")),
            capture_output=True,
            text=True,
            check=True,
        )
        assert {"journal", "store"} <= set(status_page.stdout.split())
    finally:
        children.end([], 120.0)
    assert (first.poll(), second.poll()) == (0, 0)
