"""Measure what it costs to parse and recognise a log line.

Lines with and without content about KV are measured separately.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from handrail.records import Process, Role, Source
from handrail_sidecar.engine_logs.aggregate import Folder
from handrail_sidecar.engine_logs.line_header import read_head
from handrail_sidecar.engine_logs.lines import recognise

_NOISE = (
    "(APIServer pid=20064) INFO 11-29 17:42:36 [loggers.py:335] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
    "throughput: 40.7 tokens/s, Running: 0 reqs, Waiting: 0 reqs, CPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
)
_EXPIRED = (
    "(EngineCore pid=1) WARNING 11-29 17:42:36 [base_worker.py:3032] Releasing expired KV blocks for request cmpl-{}-0-99ae74c8 "
    "which were retrieved by 0 remote worker(s) before lease expired."
)
_PROCESS = Process(role=Role.DECODE, instance="decode:8200", host="h1")
_LINES = 2000
_REPEATS = 7


def _line_us(lines: list[str]) -> float:
    taken = []
    for _ in range(_REPEATS):
        folder = Folder(_PROCESS, Source.LOG)
        now = time.time_ns()
        begin = time.process_time_ns()
        for text in lines:
            head = read_head(text, now)
            line = recognise(head.message)
            if line is None:
                folder.continued(head)
            else:
                folder.add(head, line, now)
        taken.append((time.process_time_ns() - begin) / len(lines) / 1000)
    return median(taken)


def _message_us() -> float:
    taken = []
    for _ in range(_REPEATS):
        begin = time.process_time_ns()
        for _ in range(_LINES):
            recognise("Running: 0 reqs, Waiting: 0 reqs")
        taken.append((time.process_time_ns() - begin) / _LINES / 1000)
    return median(taken)


def run() -> list[dict[str, Any]]:
    """Return the figures in microseconds of CPU a line."""
    return [
        _figure("log: a line about something else", _line_us([_NOISE] * _LINES), 25.0),
        _figure("log: an expiry, to a fact", _line_us([_EXPIRED.format(number) for number in range(_LINES)]), 100.0),
        _figure("log: a message about something else (in the engine)", _message_us(), 1.0),
    ]


def _figure(name: str, value: float, budget: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 2),
        "unit": "us",
        "budget": budget,
        "ratio": round(value / budget, 3),
        "met": value <= budget,
    }
