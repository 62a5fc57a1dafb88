"""Run some files of the eval tests within a time limit.

Each commit begins with another file.
The files stand in a ring in the order of their names. Commit number n begins at file n of the ring: each commit begins one file
further than the one before. Each processor runs one file after another until the time is over: then no file begins, and those
that run end.

eval_share.py [--minutes 6] [--tests FOLDER] [--start N]        N: begin at this file instead, to repeat a run
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EVAL = "eval and not vllm and not grafana"
_NO_TESTS = 5  # pytest's exit status


def eval_files(tests: Path) -> list[str]:
    """Return the files that hold eval tests, in order."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", EVAL, str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, _NO_TESTS):
        sys.exit(done.stdout + done.stderr)
    return sorted({line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line})


def commit_number() -> int:
    """Return the number of commits up to the one that is checked out.

    Without git: the day's number.
    """
    done = subprocess.run(["git", "rev-list", "--count", "HEAD"], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else int(time.time() // 86400)


def main() -> int:
    """Return 0 where every file that ran passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--tests", type=Path, default=Path("tests"))
    parser.add_argument("--start", type=int)
    options = parser.parse_args()
    files = eval_files(options.tests)
    if not files:
        sys.exit("there is no eval test")
    start = (commit_number() if options.start is None else options.start) % len(files)
    print(f"eval: {len(files)} files, from number {start}: {files[start]} (--start {start} repeats it)", flush=True)
    until = time.monotonic() + options.minutes * 60

    def run(file: str) -> int | None:
        """Return pytest's exit status; None where the time was over."""
        if time.monotonic() >= until:
            return None
        command = [sys.executable, "-m", "pytest", "-q", "-m", EVAL, file]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"\n{file}\n{done.stdout}", flush=True)
        return done.returncode

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ring = files[start:] + files[:start]
        found = dict(zip(ring, pool.map(run, ring), strict=True))
    ran = [status for status in found.values() if status is not None]
    red = [file for file, status in found.items() if status]
    print(f"eval: {len(ran)} of {len(files)} files ran, {len(red)} failed", *red, sep="\n  ", flush=True)
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
