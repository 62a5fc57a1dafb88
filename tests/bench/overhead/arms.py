"""Two real pairs side by side, one with the plugin and one without, both started anew; blocks of load go to them in turn.

New processes for each run, since two processes of one program differ by some per cent for reasons of their own (where memory came
to lie); both at once, since a machine drifts by more than the plugin costs between one minute and the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from random import Random

from vllm.child import HOST, Child
from vllm.client import Request, Result, events, load, prompt
from vllm.handoffs import MIDDLEWARE
from vllm.observed import make_plugin_site
from vllm.pair import ENGINE_ENV, EngineSettings, Installation, Pair, running_pair
from vllm.proctime import cpu_seconds
from vllm.stack import Starter

REQUESTS = 30  # of a block
CONCURRENCY = 4
TOKENS = 48
ORDER = "ABBABAAB"  # each arm as often first as second: a drift that is straight in time cancels


class Arm(str, Enum):
    OFF = "off"
    ON = "on"


@dataclass(slots=True)
class Measured:
    """What one arm did in one run. Gaps are those between chunks with content, ns."""

    ttft_ns: list[int] = field(default_factory=list)
    gap_ns: list[int] = field(default_factory=list)
    token_ns: list[float] = field(default_factory=list)  # time per output token, of each request
    requests: int = 0
    engine_cpu_s: float = 0.0  # all processes of both engines
    sidecar_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arms:
    """What runs."""

    pairs: dict[Arm, Pair]
    urls: dict[Arm, str]
    sidecars: Sequence[Child]

    def cpu_s(self, arm: Arm) -> tuple[float, float]:
        """Processor time so far: engines, sidecars."""
        engines = [self.pairs[arm].prefill.child, self.pairs[arm].decode.child]
        beside = self.sidecars if arm is Arm.ON else ()
        return sum(map(cpu_seconds, engines)), sum(map(cpu_seconds, beside))


@contextlib.contextmanager
def running_arms(installation: Installation, folder: Path, *, middleware: bool) -> Iterator[Arms]:
    """Both pairs, answering."""
    folder.mkdir(parents=True)
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
            env = {"PYTHONPATH": f"{ENGINE_ENV['PYTHONPATH']}:{site}", "HANDRAIL_SOCKET": str(path)}
            settings[role] = EngineSettings(env=env, flags=("--middleware", MIDDLEWARE) if middleware else ())
        pairs = both_pairs(parts, installation, folder, settings)
        urls = {
            arm: f"http://{start.module('vllm.proxy', f'proxy-{arm.value}', *_legs(pair))['proxy']}"
            for arm, pair in pairs.items()
        }
        yield Arms(pairs, urls, sidecars)


def both_pairs(
    parts: contextlib.ExitStack, installation: Installation, folder: Path, settings: dict[str, EngineSettings]
) -> dict[Arm, Pair]:
    """One after the other: four engines that import at once take longer on two cores."""
    off = parts.enter_context(running_pair(installation, logs=folder / "off"))
    on = parts.enter_context(
        running_pair(installation, logs=folder / "on", prefill=settings["prefill"], decode=settings["decode"])
    )
    return {Arm.OFF: off, Arm.ON: on}


def _legs(pair: Pair) -> tuple[str, ...]:
    return "--prefill", pair.prefill.url, "--decode", pair.decode.url


def measure(arms: Arms, run: int) -> dict[Arm, Measured]:
    """One run: a block to warm each arm, then the blocks of ``ORDER``; which arm is A changes from run to run."""
    first, second = (Arm.OFF, Arm.ON) if run % 2 == 0 else (Arm.ON, Arm.OFF)
    found = {arm: Measured() for arm in Arm}
    for arm in Arm:
        load(arms.urls[arm], block(f"warm-{run}-{arm.value}"), CONCURRENCY)
    for number, letter in enumerate(ORDER):
        arm = first if letter == "A" else second
        before = arms.cpu_s(arm)
        # the same prompts to both arms: the n-th block of each
        turn = ORDER[:number].count(letter)
        results = load(arms.urls[arm], block(f"run-{run}-{turn}"), CONCURRENCY)
        after = arms.cpu_s(arm)
        _take(found[arm], results, after[0] - before[0], after[1] - before[1])
    return found


def block(tag: str) -> list[Request]:
    source = Random(tag)
    return [
        Request(
            request_id=f"{tag}-{number:02d}",
            traceparent=None,
            chat=False,
            stream=True,
            prompt=prompt(source, (60, 120)),
            max_tokens=TOKENS,
        )
        for number in range(REQUESTS)
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
        # events that came in one read have one time: a gap is between chunks
        into.gap_ns.extend(later - earlier for earlier, later in pairwise(dict.fromkeys(at)))
