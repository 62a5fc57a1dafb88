"""Feed seeded hostile input to every reader: mutated recordings, as trials.

For each input it checks what must hold.
Each reader runs in a process of its own, so that a crash, a hang or unbounded memory in native code is detected. The current
input lies in a mapped file, so that it is known afterwards.
Failed inputs are kept under ``tests/data/hostile`` (``--keep``), with those that showed new behaviour.
``tests/test_hostile.py`` replays them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import mmap
import os
import random
import re
import resource
import signal
import sys
import time
import traceback
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

TESTS: Final = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))  # as pytest has it

from faults import sockets  # noqa: E402
from faults.mutate import MOST_BYTES, mutated  # noqa: E402
from faults.readers import READERS, Reader  # noqa: E402
from faults.trial import Context, Got, Trial  # noqa: E402

CORPUS: Final = TESTS / "data" / "hostile"
CPU_S: Final = 60.0
LONG_CPU_S: Final = 600.0
SHARES: Final = {"otlp_tap": 0.5, "otlp_collector": 0.5, "http": 0.7, "proxy_socket": 0.3}
"""Parts of a CPU minute for two readers of the same kind of input.

A minute of work takes the proxy five minutes of waiting for sockets.
"""

_WALL: Final = {"proxy_socket": 6.0}
ADDRESS_BYTES: Final = 4 << 30
GROWTH_BYTES: Final = 200 << 20
"""Most bytes by which the process may have grown at the end.

The start value is the one after a tenth of its run.
"""

CASE_CPU_S, CASE_CPU_PER_BYTE_S = 2.0, 50e-6
MEASURED_EVERY: Final = 64
PEAK_BYTES, PEAK_TIMES = 24 << 20, 40
"""Most bytes that one case may take: a constant, and a multiple of the input."""

KEPT_BYTES, KEPT_AFTER = 4096, 1000
"""New behaviour is kept when it is small and rare.

Rare means: rarer than the first inputs show.
"""

MOST_POOL: Final = 600
MOST_FAILURES: Final = 20
_NUMBERS: Final = re.compile(r"\d+")


@dataclass(slots=True)
class Report:
    """The result of one run."""

    reader: str
    seed: int
    cases: int = 0
    outcomes: int = 0  # kinds of outcomes
    good: int = 0  # how often good input was compared
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    peak_bytes: int = 0  # of one measured case
    grown_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # how often, by the first failure of its kind
    kinds: dict[str, str] = field(default_factory=dict)

    def fail(self, what: str, where: str = "") -> None:
        """Count a failure under the first one that differs only in numbers."""
        first = self.kinds.setdefault(_NUMBERS.sub("#", what), f"{what}{where}")
        self.failures[first] = self.failures.get(first, 0) + 1


class HangError(Exception):
    """One input takes more processor time than any may."""


def run(
    reader: Reader,
    seed: int,
    cpu_s: float,
    *,
    most_s: float = float("inf"),
    keep: Path | None = None,
    current: mmap.mmap | None = None,
) -> Report:
    """Read mutated inputs for ``cpu_s`` seconds of processor time.

    It takes at most ``most_s`` on a busy machine.
    """
    rng = random.Random(f"{reader.name} {seed}")
    report = Report(reader.name, seed)
    with reader:
        seeds = [*reader.seeds(), *(data for _, data in corpus(reader.name))]
        pool = list(seeds)
        expected = reader.good()
        for data in seeds:
            reader.read(data, random.Random(0))
        seen: set[str] = set()
        resident = 0
        end, over = time.process_time() + cpu_s, time.monotonic() + most_s
        while (now := time.process_time()) < end and time.monotonic() < over and len(report.failures) < MOST_FAILURES:
            case_seed = rng.getrandbits(32)
            data = mutated(rng.choice(pool), pool, reader.mutations, rng)[:MOST_BYTES]
            if current is not None:
                current[:8] = len(data).to_bytes(4, "big") + case_seed.to_bytes(4, "big")
                current[8 : 8 + len(data)] = data
            outcome = _case(reader, data, case_seed, report)
            if outcome is None and keep is not None:
                _keep(keep, reader.name, data, "failed")
            if outcome is not None and outcome not in seen:
                seen.add(outcome)
                if keep is not None and len(data) <= KEPT_BYTES and report.cases > KEPT_AFTER:
                    _keep(keep, reader.name, data, "new")
                if len(pool) < len(seeds) + MOST_POOL:
                    pool.append(data)
                else:
                    pool[rng.randrange(len(seeds), len(pool))] = data
            report.cases += 1
            if report.cases % reader.every == 0:
                _compare(reader, expected, report)
            if not resident and now > end - 0.9 * cpu_s:
                resident = _resident_bytes()
        report.grown_bytes = max(0, _resident_bytes() - resident) if resident else 0
        if report.grown_bytes > GROWTH_BYTES:
            report.fail(f"the process grew by {report.grown_bytes >> 20} MiB")
        report.outcomes = len(seen)
    report.cpu_s = round(time.process_time() - (end - cpu_s), 1)
    return report


def _case(reader: Reader, data: bytes, case_seed: int, report: Report) -> str | None:
    """Read one input; return None when it failed."""
    measured = report.cases % MEASURED_EVERY == 0
    if measured:
        tracemalloc.start(1)
    most_s = (CASE_CPU_S + CASE_CPU_PER_BYTE_S * len(data)) * (5 if measured else 1)
    began = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, most_s)
    try:
        outcome = reader.read(data, random.Random(case_seed))
    except Exception as error:
        report.fail(_reported(error), f" ({len(data)} bytes, {_name(data)}, {case_seed})")
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        report.slowest_s = max(report.slowest_s, 0.0 if measured else round(time.process_time() - began, 3))
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            report.peak_bytes = max(report.peak_bytes, peak)
    if measured and peak > PEAK_BYTES + PEAK_TIMES * len(data):
        report.fail(f"{peak} bytes for an input of {len(data)}", f" ({_name(data)}, {case_seed})")
        return None
    return outcome


def _compare(reader: Reader, expected: object, report: Report) -> None:
    report.good += 1
    try:
        found = reader.good()
    except Exception as error:
        report.fail(f"good input fails after {report.cases} cases: {_reported(error)}")
        return
    if found != expected:
        report.fail(f"good input reads otherwise after {report.cases} cases: {str(found)[:300]} not {str(expected)[:300]}")


def _reported(error: BaseException) -> str:
    """Return what failed and where, in one line."""
    root = error.__cause__ or error
    at = next((f for f in reversed(traceback.extract_tb(root.__traceback__)) if "handrail" in f.filename), None)
    where = f" at {Path(at.filename).name}:{at.lineno}" if at is not None else ""
    cause = f" from {type(root).__name__}: {root}" if root is not error else ""
    return f"{type(error).__name__}: {error}{cause}{where}"[:400]


def _hangs(_number: int, _frame: FrameType | None) -> None:
    raise HangError


def _name(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _keep(folder: Path, reader: str, data: bytes, why: str) -> None:
    at = folder / reader
    at.mkdir(parents=True, exist_ok=True)
    (at / f"{why}-{_name(data)}").write_bytes(data)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def corpus(reader: str) -> list[tuple[str, bytes]]:
    """Return the kept inputs of one reader, by file name."""
    return [(path.name, path.read_bytes()) for path in sorted((CORPUS / reader).glob("*")) if path.is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one reader here; print its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", type=float, default=CPU_S, metavar="SECONDS")
    parser.add_argument("--most", type=float, default=float("inf"), metavar="SECONDS", help="of wall time")
    parser.add_argument("--current", type=Path, help="file that holds the input being read")
    parser.add_argument("--keep", type=Path, help="folder that failing inputs are written to")
    parser.add_argument("--reproduce", type=Path, help="read this one file and let what it raises through")
    parser.add_argument("--case-seed", type=int, default=0)
    namespace = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    logging.getLogger().addHandler(logging.NullHandler())
    signal.signal(signal.SIGVTALRM, _hangs)
    if namespace.reproduce is not None:
        with READERS[namespace.reader]() as reader:
            print(reader.read(namespace.reproduce.read_bytes(), random.Random(namespace.case_seed)))
        return 0
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    current = None
    if namespace.current is not None:
        with namespace.current.open("w+b") as file:
            file.truncate(8 + MOST_BYTES)
            current = mmap.mmap(file.fileno(), 8 + MOST_BYTES)
    report = run(
        READERS[namespace.reader](), namespace.seed, namespace.cpu, most_s=namespace.most, keep=namespace.keep, current=current
    )
    print(json.dumps(asdict(report)), flush=True)
    return 1 if report.failures else 0


async def trial(ctx: Context, reader: str) -> Got:
    """Run one reader in a process of its own until the trial's deadline."""
    cpu_s = SHARES.get(reader, 1.0) * ctx.scale(CPU_S, LONG_CPU_S)
    current = ctx.folder / "current"
    command = (
        sys.executable,
        str(Path(__file__)),
        reader,
        "--seed",
        str(ctx.seed),
        "--cpu",
        str(cpu_s),
        "--current",
        str(current),
    )
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env={**os.environ, "PYTHONHASHSEED": "0"})
    try:
        out, err = await asyncio.wait_for(child.communicate(), max(1.0, ctx.left_s() - 5.0))
    except asyncio.TimeoutError:
        return f"hung at an input; {_current(current)}", False
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode not in (0, 1) or not out:
        return f"the process ended with {child.returncode}: {err.decode(errors='replace')[-300:]}; {_current(current)}", False
    report = Report(**json.loads(out.splitlines()[-1]))
    figures = (
        f"{report.cases:,} inputs in {report.cpu_s:g} CPU seconds, {report.outcomes} kinds of outcome, "
        f"slowest {report.slowest_s:g} s, {report.peak_bytes / 2**20:.1f} MiB at most, good input read {report.good} times"
    )
    if report.failures:
        total, first = sum(report.failures.values()), next(iter(report.failures))
        return f"{figures}; {total} failures of {len(report.failures)} kinds, first: {first}", False
    return f"{figures}, 0 failures", True


def _current(path: Path) -> str:
    if not path.exists():
        return "no input was read"
    data = path.read_bytes()
    size, case_seed = int.from_bytes(data[:4], "big"), int.from_bytes(data[4:8], "big")
    return f"case seed {case_seed}, {size} bytes, beginning {data[8 : 8 + min(size, 60)].hex()}"


def _trial(reader: str) -> Trial:
    async def start(ctx: Context) -> Got:
        return await trial(ctx, reader)

    times = 1.2 * SHARES.get(reader, 1.0) * _WALL.get(reader, 1.0)
    return Trial(
        name=f"hostile.{reader}",
        group="hostile",
        expected="no exception but the documented refusals, no hang, memory by the input's size, good input reads as before",
        seconds=CPU_S * times,
        long_seconds=LONG_CPU_S * times,
        beside=True,
        run=start,
    )


TRIALS: Final = (*(_trial(reader) for reader in READERS), *sockets.TRIALS)


if __name__ == "__main__":
    sys.exit(main())
