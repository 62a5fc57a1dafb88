"""Show the GPUs of this host: their activity, their processes, their counters.

For each counter that a GPU lacks, it shows why, and what would provide it.
It reads NVML for about a second, as the sidecar does. It names a call that
hangs and does not wait for it.

examples:
  handrail gpus
  handrail gpus --json
  handrail gpus --counters
  handrail gpus --record run.jsonl --for 10s --interval 10ms
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from handrail.device_counters.gpu import ALL
from handrail.durations import format_duration
from handrail.records import Process, Role
from handrail.records.devices import DeviceSample
from handrail_cli.console import answer_console, waiting
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.render.gpus import GpuListing, GpuWindow
from handrail_cli.sanitize import print_document
from handrail_cli.time_flags import duration_ns
from handrail_sidecar.gpu.failures import NvmlFailed, failure
from handrail_sidecar.gpu.processes import GpuProcess, processes_of
from handrail_sidecar.gpu.sampler import Sampler
from handrail_sidecar.gpu.state import SamplerSettings
from handrail_sidecar.gpu.view import absences
from handrail_sidecar.gpu.visible import visible

OPEN_WITHIN_S: Final = 15.0
"""How long NVML may take to open: a driver may have to wake GPUs."""

_PROCESSES_WITHIN_S: Final = 2.0
_PIPE_WIDTH: Final = 220
_LEAST_INTERVAL_NS: Final = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail gpus``."""
    parser.add_argument("--counters", action="store_true", help="list every counter and when it is absent; needs no GPU")
    parser.add_argument(
        "--for", dest="span", metavar="DURATION", default="1.2s", help="time to sample, at least two intervals (default 1.2s)"
    )
    parser.add_argument(
        "--interval", metavar="DURATION", default="100ms", help="time between two samples, at least 10ms (default 100ms)"
    )
    parser.add_argument("--record", metavar="FILE", type=Path, help="write every sample to FILE, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object: GPUs, values, absent counters, processes")


def run(arguments: argparse.Namespace) -> int:
    """Sample, then show."""
    from handrail_cli.render.gpus import show_counters, show_gpus

    if arguments.counters:
        if arguments.json:
            print_document([{**asdict(each), "kind": each.kind.value} for each in ALL])
        else:
            show_counters(answer_console(in_pipe=_PIPE_WIDTH))
        return EXIT_OK
    span_ns, interval_ns = duration_ns("--for", arguments.span), duration_ns("--interval", arguments.interval)
    if interval_ns < _LEAST_INTERVAL_NS:
        raise CliError(
            what="is shorter than 10ms", where=f"--interval {arguments.interval}", valid="--interval 10ms", exit_code=EXIT_USAGE
        )
    if span_ns < 2 * interval_ns:  # a rate needs two readings
        least = format_duration(2 * interval_ns)
        raise CliError(
            what=f"is shorter than two intervals ({least})",
            where=f"--for {arguments.span}",
            valid=f"--for {least} or more, or a shorter --interval",
            exit_code=EXIT_USAGE,
        )
    logging.getLogger("handrail_sidecar.gpu").addHandler(logging.NullHandler())  # the answer holds what the sampler logs
    with waiting("reading NVML ..."):
        found = look(span_ns / 1e9, interval_ns, arguments.record)
    if arguments.json:
        print_document(as_json(found))
    else:
        show_gpus(answer_console(in_pipe=_PIPE_WIDTH), found)
    return EXIT_OK


def look(span_s: float, interval_ns: int, record: Path | None = None) -> GpuListing:
    """Sample for a while.

    Raises ``CliError`` where there is no NVML, or where the file cannot be written.
    """
    seen, recorded = GpuWindow(), threading.Lock()
    with ExitStack() as stack:
        file = _opened(stack, record)

        def take(sample: DeviceSample) -> None:
            seen.take(sample)
            if file is not None:
                with recorded:
                    file.write(json.dumps(sample_json(sample)) + "\n")

        sampler = Sampler(
            SamplerSettings(period_ns=interval_ns),
            Process(role=Role.UNKNOWN, instance="", host=""),
            take,
            lambda event: None,
            environment={},
        )
        sampler.start()
        try:
            _opened_session(sampler)
            time.sleep(span_s)
            return _found(sampler, seen)
        finally:
            sampler.stop()
            recorded.acquire()  # a thread that comes back late writes no more


def _opened(stack: ExitStack, record: Path | None) -> IO[str] | None:
    if record is None:
        return None
    try:
        return stack.enter_context(record.open("w", encoding="utf-8"))
    except OSError as error:
        raise CliError(
            what=f"cannot be written: {error.strerror}", where=str(record), valid="--record run.jsonl", exit_code=EXIT_USAGE
        ) from None


def _opened_session(sampler: Sampler) -> None:
    deadline = time.monotonic() + OPEN_WITHIN_S
    while not sampler.state.sessions:
        problem = sampler.state.problem
        if problem is not None:
            what = f"no GPU can be read: {problem.words}"
            raise CliError(what=what, where=f"NVML (code {problem.code})", valid=problem.remedy)
        if time.monotonic() > deadline:
            what = f"NVML has not opened within {OPEN_WITHIN_S:.0f} s"
            raise CliError(what=what, where="nvmlInit", valid=failure(-2).remedy)
        time.sleep(0.01)


def _found(sampler: Sampler, seen: GpuWindow) -> GpuListing:
    readers = list(sampler.readers.values())
    devices = tuple(reader.gpu.device for reader in readers)
    return GpuListing(
        driver=sampler.state.driver,
        nvml=sampler.state.nvml,
        devices=devices,
        seen=seen,
        absent=tuple(absences(readers, sampler.xid_watch)),
        lost=dict(sampler.state.lost),
        stuck=tuple((task.gpu.device.key, task.name, ns / 1e9) for task, ns in sampler.hanging()),
        processes=tuple(_processes(sampler)),
        visible=visible(devices, os.environ),
        failures=sampler.stats.by_code(),
    )


def _processes(sampler: Sampler) -> list[GpuProcess]:
    """Read the processes in a thread with a short time limit."""
    found: list[GpuProcess] = []

    def ask() -> None:
        import pynvml

        for reader in list(sampler.readers.values()):
            try:
                found.extend(processes_of(pynvml, reader.gpu))
            except NvmlFailed:  # noqa: PERF203 - one GPU must not hide the others
                continue

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROCESSES_WITHIN_S)
    return list(found)


def as_json(found: GpuListing) -> dict[str, Any]:
    """Return the whole answer as one object."""
    units = {counter.name: counter.unit for counter in ALL}
    return {
        "driver": found.driver,
        "nvml": found.nvml,
        "gpus": [
            {
                **{name: value for name, value in asdict(device).items() if name not in ("kind", "line_rate_bytes", "engine")},
                "visible": None if found.visible.keys is None else device.key in found.visible.keys,
                "values": [
                    {"name": name, "label": label, "value": value.value, "unit": units.get(name, ""), "at_unix_ns": at}
                    for (uuid, name, label), (at, value) in sorted(found.seen.last.items())
                    if uuid == device.key
                ],
                "absent": [
                    {"counter": each.counter, "code": each.code, "why": each.why, "absent": each.instead}
                    for each in found.absent
                    if each.device.key == device.key
                ],
                "stuck": [{"call": call, "seconds": seconds} for uuid, call, seconds in found.stuck if uuid == device.key],
            }
            for device in found.devices
        ],
        "lost": [{"index": index, "code": code, "why": failure(code).words} for index, code in found.lost.items()],
        "processes": [asdict(each) for each in found.processes],
        "visible": {"said_by": found.visible.variable, "notes": list(found.visible.notes)},
        "call_failures": {failure(code).name.lower(): count for code, count in found.failures.items()},
    }


def sample_json(sample: DeviceSample) -> dict[str, Any]:
    """Return one line of a recording: ``values`` by name, or ``name{label}``."""
    return {
        "uuid": sample.device.key,
        "index": sample.device.index,
        "at_unix_ns": sample.at_unix_ns,
        "took_ns": sample.took_ns,
        "values": {f"{each.name}{{{each.label}}}" if each.label else each.name: each.value for each in sample.values},
    }
