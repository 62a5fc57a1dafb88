"""Run one real pair and switch its plugin off and on between blocks of load.

``engine_site/overhead_switch.py`` describes the switch.
Two processes of one program differ by some per cent for reasons of their own, and a machine drifts from one minute to the next
by more than the plugin costs. So both arms use the same processes, in short turns. Each run starts new processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from random import Random

from bench.overhead.switching import FOLDER_ENV, SITE, Switches
from vllm.child import HOST, Child
from vllm.client import Request, Result, events, load, prompt
from vllm.handoffs import MIDDLEWARE
from vllm.observed import make_plugin_site
from vllm.pair import ENGINE_ENV, EngineSettings, Installation, Pair, running_pair
from vllm.proctime import cpu_seconds
from vllm.stack import Starter

REQUESTS = 30  # requests in a block
CONCURRENCY = 4
TOKENS = 48
ORDER = "ABBABAAB" * 4  # each arm is first equally often, which cancels a linear drift


class Arm(str, Enum):
    OFF = "off"
    ON = "on"


@dataclass(slots=True)
class Measured:
    """The measurements of one arm in one run; gaps between content chunks are in ns."""

    ttft_ns: list[int] = field(default_factory=list)
    gap_ns: list[int] = field(default_factory=list)
    token_ns: list[float] = field(default_factory=list)  # time per output token of each request
    requests: int = 0
    engine_cpu_s: float = 0.0  # CPU of all processes of both engines
    sidecar_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bed:
    """The processes of a run."""

    pair: Pair
    url: str
    sidecars: Sequence[Child]
    switches: Switches

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor time so far, of the engines and of the sidecars."""
        engines = [self.pair.prefill.child, self.pair.decode.child]
        return sum(map(cpu_seconds, engines)), sum(map(cpu_seconds, self.sidecars))


@contextlib.contextmanager
def running_bed(installation: Installation, folder: Path, *, middleware: bool) -> Iterator[Bed]:
    """Start the pair with the plugin; yield it when it answers."""
    switches = folder / "switches"
    switches.mkdir(parents=True)
    with contextlib.ExitStack() as parts:
        start = Starter(parts, folder)
        sink = start.module("bench.overhead.sink", "sink")["otlp_http"]
        site = make_plugin_site(folder / "site")
        sidecars = []
        settings = {}
        for role in ("prefill", "decode"):
            path = folder / f"{role}.sock"
            place = ("--role", role, "--instance", f"{HOST}:1", "--plugin-socket", str(path), "--collector", f"http://{sink}")
            sidecars.append(start.handrail("sidecar", role, *place)[0])
            env = {
                "PYTHONPATH": f"{ENGINE_ENV['PYTHONPATH']}:{site}:{SITE}",
                "HANDRAIL_SOCKET": str(path),
                FOLDER_ENV: str(switches),
            }
            settings[role] = EngineSettings(env=env, flags=("--middleware", MIDDLEWARE) if middleware else ())
        pair = parts.enter_context(
            running_pair(installation, logs=folder / "logs", prefill=settings["prefill"], decode=settings["decode"])
        )
        legs = ("--prefill", pair.prefill.url, "--decode", pair.decode.url)
        url = f"http://{start.module('vllm.proxy', 'proxy', *legs)['proxy']}"
        yield Bed(pair, url, sidecars, Switches(switches))


def measure(bed: Bed, run: int) -> dict[Arm, Measured]:
    """Do one run: a block to warm each arm, then the blocks of ``ORDER``.

    Which arm is A changes from run to run.
    """
    first, second = (Arm.OFF, Arm.ON) if run % 2 == 0 else (Arm.ON, Arm.OFF)
    found = {arm: Measured() for arm in Arm}
    for arm in (Arm.ON, Arm.OFF):
        load(bed.url, block(f"warm-{run}", 0, arm), CONCURRENCY)
        bed.switches.turn(arm is Arm.ON)
    for number, letter in enumerate(ORDER):
        arm = first if letter == "A" else second
        bed.switches.turn(arm is Arm.ON)
        before = bed.cpu_s()
        results = load(bed.url, block(f"run-{run}", ORDER[:number].count(letter), arm), CONCURRENCY)
        after = bed.cpu_s()
        _take(found[arm], results, after[0] - before[0], after[1] - before[1])
    return found


def block(tag: str, turn: int, arm: Arm) -> list[Request]:
    """Send one block of load.

    The n-th blocks of both arms have prompts of the same lengths but other words: the same words would hit the prefix cache.
    """
    lengths, words = Random(f"{tag}-{turn}"), Random(f"{tag}-{turn}-{arm.value}")
    return [
        Request(
            request_id=f"{tag}-{turn}-{arm.value}-{number:02d}",
            traceparent=None,
            chat=False,
            stream=True,
            prompt=prompt(words, (length, length)),
            max_tokens=TOKENS,
        )
        for number, length in enumerate(lengths.randint(60, 120) for _ in range(REQUESTS))
    ]


def _take(into: Measured, results: Sequence[Result], engine_s: float, sidecar_s: float) -> None:
    bad = [result.answer.error for result in results if result.answer.error or result.answer.ttft_token_ns is None]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(results)} requests failed: {bad[0]}")
    into.requests += len(results)
    into.engine_cpu_s += engine_s
    into.sidecar_cpu_s += sidecar_s
    for result in results:
        into.ttft_ns.append(result.answer.ttft_token_ns or 0)
        at = [at_ns for at_ns, data in events(result.chunks) if '"text"' in data]
        into.token_ns.append((at[-1] - at[0]) / (TOKENS - 1))
        # events of one read share one time, so a gap lies between chunks
        into.gap_ns.extend(later - earlier for earlier, later in pairwise(dict.fromkeys(at)))
