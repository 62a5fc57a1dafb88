"""Take processor time away from processes.

Either a control group of their own has a quota, or they are stopped again and again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 200_000


class NoQuotaError(RuntimeError):
    """Control groups are not available here; the message says why."""


@contextlib.contextmanager
def cpu_quota(pids: Sequence[int], share: float, *, name: str) -> Iterator[str]:
    """Limit the processes together to this share of one processor.

    Yields the file that sets the quota. Raises ``NoQuotaError``.
    Afterwards all processes are in one group, the caller's, where they were before.
    """
    parent, quota = _place()
    group = parent / name
    try:
        group.mkdir()
    except OSError as error:
        raise NoQuotaError(f"{group}: {error}") from None
    try:
        try:
            _limit(group, quota, share)
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise NoQuotaError(f"{group}: {error}") from None
        yield str(group / quota)
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # the process has ended
                (parent / "cgroup.procs").write_text(left)
        group.rmdir()


def _place() -> tuple[Path, str]:
    """Return this process's own group, and the file that limits a group in it."""
    tried = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            tried.append((ROOT / controllers / path.lstrip("/"), "cpu.cfs_quota_us"))
            tried.append((ROOT / "cpu" / path.lstrip("/"), "cpu.cfs_quota_us"))
        elif not controllers:
            tried.append((ROOT / path.lstrip("/"), "cpu.max"))
    for place, quota in tried:
        # cgroup v2: a group with processes cannot enable a controller for its children, except the root
        given = place / ("cgroup.subtree_control" if quota == "cpu.max" else "cpu.cfs_period_us")
        if given.is_file() and (quota != "cpu.max" or "cpu" in given.read_text().split()):
            return place, quota
    raise NoQuotaError(f"no group with a cpu controller among {', '.join(str(place) for place, _ in tried) or 'none'}")


def _limit(group: Path, quota: str, share: float) -> None:
    allowed = round(share * PERIOD_US)
    if quota == "cpu.max":
        (group / quota).write_text(f"{allowed} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / quota).write_text(str(allowed))


@contextlib.contextmanager
def stopped_in_turns(process_group: int, share: float) -> Iterator[str]:
    """Stop and continue a process so that it runs for this share of each period.

    Uses SIGSTOP and SIGCONT. Yields a description in words.
    """
    over = threading.Event()
    run_s = share * PERIOD_US / 1e6

    def turns() -> None:
        while not over.wait(run_s):
            os.killpg(process_group, signal.SIGSTOP)
            over.wait(PERIOD_US / 1e6 - run_s)
            os.killpg(process_group, signal.SIGCONT)

    thread = threading.Thread(target=turns, name="stopped-in-turns")
    thread.start()
    try:
        yield "SIGSTOP and SIGCONT in turns"
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process_group, signal.SIGCONT)
