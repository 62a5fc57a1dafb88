"""Render docs/overhead.md and the terminal's report.

Both hold one table, every single run, and the machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.overhead.arms import CONCURRENCY, ORDER, REQUESTS, TOKENS, Arm, Measured
from bench.overhead.paired import LIMIT, Difference
from vllm.pair import VERSION, Installation

PAGE = Path(__file__).parents[3] / "docs/overhead.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All measurements; ``alone`` holds the figures of ``bench_guest``."""

    differences: Sequence[Difference]
    runs: Sequence[Mapping[Arm, Measured]]
    alone: Sequence[Mapping[str, Any]]
    middleware: bool
    load: float  # load of the machine before the run
    seconds: float
    command: str

    @property
    def sidecar_ms(self) -> float:
        """Return the processor time of both sidecars for a request, in ms."""
        on = [run[Arm.ON] for run in self.runs]
        return sum(m.sidecar_cpu_s for m in on) / sum(m.requests for m in on) * 1e3


def machine(installation: Installation) -> str:
    info = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    site = next((installation.root / "venv/lib").glob("python3*/site-packages"))
    nixl = next((found.name.removesuffix(".dist-info").split("-")[1] for found in site.glob("nixl_cu12-*.dist-info")), "?")
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, {site.parent.name}; "
        f"vLLM {VERSION} on CPU, NIXL {nixl}, no GPU"
    )


def rows(result: Result) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for d in result.differences:
        met = {True: "met", False: "missed", None: ""}[d.met]
        limit = f"≤ {LIMIT:.0%}: {met}" if met else ""
        span = f"{d.low:+.2%} to {d.high:+.2%}"
        found.append(
            (d.figure.name, f"{d.off:.2f} {d.figure.unit}", f"{d.on:.2f} {d.figure.unit}", f"{d.mean:+.2%}", span, limit)
        )
    return found


def alone(result: Result) -> list[tuple[str, str, str]]:
    """Describe the figures of ``bench_guest`` and the rates that follow from them."""
    by_name = {row["name"]: row for row in result.alone}
    found = [
        (name.removeprefix("guest_").replace("_", " "), f"{row['value']} {row['unit']}", _budget(row))
        for name, row in by_name.items()
    ]
    record_ns, sent_us = by_name["guest_record_event"]["value"], by_name["guest_thread_encode_and_send_event"]["value"]
    found.append(("events recorded a second, one core", f"{1e9 / record_ns:,.0f}", ""))
    found.append(("events recorded, encoded and sent a second, one core", f"{1e9 / (record_ns + 1e3 * sent_us):,.0f}", ""))
    return found


def _budget(row: Mapping[str, Any]) -> str:
    return "" if row["budget"] is None else f"≤ {row['budget']:g} {row['unit']}: {'met' if row['met'] else 'missed'}"


_METHOD = """
Arms: the engines without and with {with_it}. {count} runs; in each, one pair of engines is started anew, a sidecar beside
each that sends to a sink, and the plugin is taken out of the running processes and put back between {blocks} blocks of load
(A, B, B, A, B, A, A, B, and so on; A is the other arm in every second run) of {requests} streamed requests, {concurrency} at
once, {tokens} tokens each: {all:,} requests an arm in all. Out means: scheduler, connector and NIXL's objects have their own
methods again, the plugin's thread has ended, the middleware hands every call on. Differences are taken within a run, the
interval is Student's t over the runs. Everything shares the cores, load generator and sidecars too: what they take shows in
TTFT and gaps, not in the CPU of the engines, which is user and system time of all their processes.
"""
_READING = """
An interval that holds zero shows no cost, and none smaller than its width. Absolute times are those of a model of 0.7 million
parameters on CPU: a step of a real model takes longer, and the plugin's part of it is smaller. An earlier form of this bench
compared two pairs of processes side by side, one without the plugin: they differed by 8 to 10 % from run to run, for either
sign (gap p50 -10.8 to +4.0 %, CPU a request -9.0 to +3.4 % over 8 runs), so it could not have shown 1 %. The sidecars' time
beside the engines' is what gaps must grow by where processors are full, as two are here: engines, sidecars and load share them,
and what one takes the others wait for. A host with processors to spare pays the engine's own part alone.
"""


def page(result: Result, where: str) -> str:
    """Render the whole of docs/overhead.md."""
    method = _METHOD.format(
        with_it="plugin and middleware" if result.middleware else "plugin, no middleware",
        count=len(result.runs),
        blocks=len(ORDER),
        requests=REQUESTS,
        concurrency=CONCURRENCY,
        tokens=TOKENS,
        all=sum(run[Arm.ON].requests for run in result.runs),
    )
    runs = [[f"{n + 1}", *(f"{d.each[n]:+.2%}" for d in result.differences)] for n in range(len(result.runs))]
    parts = [
        "# What the plugin costs",
        f"Written by `{result.command}`, {result.seconds / 60:.0f} minutes, load average before it {result.load:.1f}.",
        f"{where}.",
        fill(method.strip(), 128),
        _table(("figure", "without", "with", "difference", "95 % interval", "limit of its upper end"), rows(result)),
        f"Both sidecars together took {result.sidecar_ms:.2f} ms of CPU a request.",
        "## Run by run",
        _table(("run", *(d.figure.name for d in result.differences)), runs),
        "## In isolation",
        "The hooks with a scheduler and a connector that do nothing (`python -m tests.bench guest`); CPU time.",
        _table(("figure", "value", "budget"), alone(result)),
        "## How to read it",
        fill(_READING.strip(), 128),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
