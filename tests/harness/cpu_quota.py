"""Takes processor time away from processes: by a quota of a control group of their own, or by stopping them again and again."""

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
    """Control groups are not to be had here; the message says why."""


@contextlib.contextmanager
def cpu_quota(pids: Sequence[int], share: float, *, name: str) -> Iterator[str]:
    """The processes together get this share of one processor; yields the file that sets it. Raises ``NoQuotaError``.

    Afterwards they are where they were, all in one group: that of the caller.
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
            with contextlib.suppress(OSError):  # it is gone
                (parent / "cgroup.procs").write_text(left)
        group.rmdir()


def _place() -> tuple[Path, str]:
    """This process's own group, and the file that limits a group in it."""
    tried = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            tried.append((ROOT / controllers / path.lstrip("/"), "cpu.cfs_quota_us"))
            tried.append((ROOT / "cpu" / path.lstrip("/"), "cpu.cfs_quota_us"))
        elif not controllers:
            tried.append((ROOT / path.lstrip("/"), "cpu.max"))
    for place, quota in tried:
        # of version 2 a group with processes of its own can give no controller to those in it, unless it is the root
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
    """SIGSTOP and SIGCONT in turns, so that it runs for this share of each period; yields what is done, in words."""
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
