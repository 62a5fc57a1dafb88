"""List the trials and run each in a process of its own.

Each trial has a deadline, and the battery leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from faults.trial import Context, Got, NotRunError, Trial

GROUPS: Final = {
    "descriptors": "silent connections, and more streams than the process has descriptors for",
    "disk": "a full, slow, read-only, failing or deleted disk under the collector's data and the sidecar's spool",
    "kill": "kill -9, and SIGSTOP with SIGCONT, of each process under load",
    "clock": "steps of the wall clock by hours and years while the process runs",
    "network": "peers that vanish without a word, and a network that loses packets",
    "overload": "more OTLP than the collector takes",
    "store": "a store that cannot be written for a long time",
    "damage": "damaged Parquet, journal, spool and manifest, at chosen and at random bytes",
    "hostile": "hostile bytes on every socket and in every reader",
}
"""What the battery tries, in this order."""

MODULES: Final = ("descriptors", "disks", "kills", "clocks", "networks", "overload", "outages", "spoiled", "damage", "hostile")
LIMIT_S: Final = {False: 900.0, True: 5400.0}
"""Time limit of a whole run, in s, in the short and in the long form.

At the limit the battery starts no more trials and ends those that run.
"""

TOKEN: Final = "HANDRAIL_TRIAL"
"""Environment variable of every process of a trial; it finds those left behind."""

AT_ONCE: Final = {False: 3, True: 4}
"""Trials that run at once in the short and in the long form.

Trials mostly wait.
"""

_ROOT: Final = Path(__file__).parents[2]
_GRACE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one trial.

    ``not_run``: why it could not run here, else empty.
    """

    trial: Trial
    got: str
    ok: bool
    seconds: float
    not_run: str = ""

    def line(self) -> dict[str, object]:
        """Return the object for ``--json``."""
        trial = self.trial
        return {
            "trial": trial.name,
            "expected": trial.expected,
            "got": self.got,
            "ok": self.ok,
            "group": trial.group,
            "seconds": round(self.seconds, 1),
            "run": not self.not_run,
        }


def trials() -> tuple[Trial, ...]:
    """Return every trial of every module, in the order of the groups.

    Raises ``ValueError`` when the registry is wrong.
    """
    found: list[Trial] = []
    for name in MODULES:
        if importlib.util.find_spec(f"faults.{name}") is not None:
            found += importlib.import_module(f"faults.{name}").TRIALS
    names = [trial.name for trial in found]
    problems = [f"{name} twice" for name in sorted({name for name in names if names.count(name) > 1})]
    problems += [f"{trial.name}: no group {trial.group}" for trial in found if trial.group not in GROUPS]
    if problems:
        raise ValueError("; ".join(problems))
    order = list(GROUPS)
    return tuple(sorted(found, key=lambda trial: order.index(trial.group)))


def chosen(every: Iterable[Trial], patterns: Sequence[str]) -> tuple[Trial, ...]:
    """Return the trials whose name or name prefix matches a pattern.

    Without a pattern all trials are returned.
    """
    if not patterns:
        return tuple(every)
    return tuple(t for t in every if any(fnmatchcase(t.name, p) or t.name.startswith(p) for p in patterns))


def must_run() -> bool:
    """Tell whether a trial that cannot run here counts as a failure.

    It does in CI, and where root could install what is missing.
    """
    return os.environ.get("CI") == "true" or (os.getuid() == 0 and Path("/etc/debian_version").exists())


def run_here(trial: Trial, context: Context) -> Got:
    """Run a trial in this process. Raises what it raises."""
    got = trial.run(context)
    if inspect.isawaitable(got):

        async def finish() -> Got:
            return await asyncio.wait_for(got, context.left_s())

        return asyncio.run(finish())
    return got


def child(name: str, result: Path, folder: Path, seed: int, long: bool, seconds: float) -> int:
    """Run one trial in this process and write its verdict to ``result``.

    This is the whole work of a trial's process.
    """
    signal.signal(signal.SIGTERM, _end)
    logging.disable(logging.CRITICAL)
    trial = next(t for t in trials() if t.name == name)
    context = Context(folder=folder, seed=seed, long=long, deadline_s=time.monotonic() + seconds)
    try:
        got, ok = run_here(trial, context)
        answer = {"got": got, "ok": ok, "not_run": ""}
    except NotRunError as why:
        answer = {"got": f"not run: {why}", "ok": not must_run(), "not_run": str(why)}
    except (asyncio.TimeoutError, TimeoutError) as error:
        answer = {"got": f"not over within its {seconds:.0f} s: {str(error) or 'stopped'}", "ok": False, "not_run": ""}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error).strip().replace("\n", " ") or "no message"
        answer = {"got": f"{type(error).__name__} in {where.name}: {reason[:400]}", "ok": False, "not_run": ""}
        traceback.print_exc()
    result.write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class Runner:
    """Runs trials; ``report`` gets each verdict as its trial ends.

    ``keep``: a folder that keeps the files of the trials.
    """

    def __init__(self, seed: int, long: bool, report: Callable[[Verdict], None], keep: Path | None = None) -> None:
        self._seed = seed
        self._long = long
        self._report = report
        self._keep = keep
        self._over_s = time.monotonic() + LIMIT_S[long]

    async def run(self, wanted: Sequence[Trial]) -> list[Verdict]:
        """Run the trials that must be alone one by one, then the others in parallel."""
        alone = [trial for trial in wanted if not trial.beside]
        verdicts = [await self._one(trial) for trial in alone]
        waiting = [trial for trial in wanted if trial.beside]

        async def work() -> None:
            while waiting:
                verdicts.append(await self._one(waiting.pop(0)))

        await asyncio.gather(*(work() for _ in range(AT_ONCE[self._long])))
        order = {trial.name: at for at, trial in enumerate(wanted)}
        return sorted(verdicts, key=lambda verdict: order[verdict.trial.name])

    async def _one(self, trial: Trial) -> Verdict:
        began_s = time.monotonic()
        if began_s > self._over_s:
            why = f"the battery's {LIMIT_S[self._long]:g} s are over"
            verdict = Verdict(trial, f"not run: {why}", False, 0.0, why)
        else:
            with tempfile.TemporaryDirectory(prefix="handrail-faults-") as temporary:
                folder = Path(temporary) if self._keep is None else self._keep / trial.name
                if self._keep is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
                answer = await self._answer(trial, folder)
            seconds = time.monotonic() - began_s
            verdict = Verdict(trial, str(answer["got"]), bool(answer["ok"]), seconds, str(answer["not_run"]))
        self._report(verdict)
        return verdict

    async def _answer(self, trial: Trial, folder: Path) -> dict[str, object]:
        seconds = min(60.0 + 3 * trial.estimate_s(self._long), max(1.0, self._over_s - time.monotonic()))
        result = folder / "verdict.json"
        (own := folder / "files").mkdir(exist_ok=True)
        token = f"{trial.name}-{os.getpid()}-{time.monotonic_ns()}"
        command = ("-m", "tests.faults", "--one", trial.name, "--result", str(result), "--folder", str(own))
        more = ("--seed", str(self._seed), "--seconds", str(seconds), *(["--long"] if self._long else []))
        with (folder / "trial.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *command, *more), cwd=_ROOT, env={**os.environ, TOKEN: token}, stdout=log, stderr=log
            )
            try:
                await asyncio.wait_for(process.wait(), seconds + _GRACE_S)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
                left = end_all(token)
        if not result.exists():
            return {"got": f"no verdict within {seconds:.0f} s (status {process.returncode})", "ok": False, "not_run": ""}
        answer: dict[str, object] = json.loads(result.read_text(encoding="utf-8"))
        if left:
            answer["got"] = f"{answer['got']}; left running: {', '.join(left)}"
            answer["ok"] = False
        return answer


def end_all(token: str) -> list[str]:
    """Kill every process with this token in its environment, by pid.

    Returns their command lines.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{TOKEN}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                os.kill(int(folder.name), signal.SIGKILL)
                found.append(words[:80])
    return found
