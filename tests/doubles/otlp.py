"""What the OTLP tests share: payloads, consumers, recorded inputs, free ports.

The consumers accept, refuse, fail or wait. ``until`` waits for a condition.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from handrail.otlp.signals import Rejected, Retryable, Signal

DATA = Path(__file__).parents[1] / "data"
RAW = sorted((DATA / "recordings" / "otlp_raw").glob("*.pb"))
CA = DATA / "otlp" / "tls" / "ca.pem"  # made for these tests; its key was thrown away
SERVER_CERT = DATA / "otlp" / "tls" / "server.pem"
SERVER_KEY = DATA / "otlp" / "tls" / "server.key"


def replay(name: str) -> Any:
    return json.loads((DATA / "replay" / "otlp" / name).read_text())


def span(number: int, name: str = "work", **fields: Any) -> Span:
    made = Span(name=name, trace_id=number.to_bytes(16, "big"), span_id=number.to_bytes(8, "big"))
    made.start_time_unix_nano, made.end_time_unix_nano = 1_700_000_000_000_000_000, 1_700_000_001_000_000_000
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def traces(*spans: Span, scope: str = "test", resource: dict[str, str] | None = None) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    entry = request.resource_spans.add()
    for key, value in (resource or {"service.name": "engine"}).items():
        entry.resource.attributes.add(key=key).value.string_value = value
    group = entry.scope_spans.add()
    group.scope.name = scope
    group.spans.extend(spans)
    return request


def spans_of(payloads: list[bytes]) -> list[Span]:
    return [
        item
        for payload in payloads
        for entry in ExportTraceServiceRequest.FromString(payload).resource_spans
        for group in entry.scope_spans
        for item in group.spans
    ]


def span_bytes(payloads: list[bytes]) -> list[bytes]:
    return [item.SerializeToString() for item in spans_of(payloads)]


@dataclass
class Keeping:
    """A consumer that accepts everything."""

    taken: list[tuple[Signal, bytes]] = field(default_factory=list)

    async def consume(self, signal: Signal, payload: bytes) -> None:
        self.taken.append((signal, payload))

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload in self.taken]


@dataclass
class Full(Keeping):
    """A consumer that refuses with a retryable error, the first ``times`` times."""

    times: int = 1_000_000
    delay_s: float = 2.5

    async def consume(self, signal: Signal, payload: bytes) -> None:
        if self.times > 0:
            self.times -= 1
            raise Retryable("the disk is full", self.delay_s)
        await Keeping.consume(self, signal, payload)


@dataclass
class Refusing(Keeping):
    """A consumer that rejects for good."""

    async def consume(self, signal: Signal, payload: bytes) -> None:
        raise Rejected("not from you")


@dataclass
class Faulty(Keeping):
    """A consumer that breaks its contract."""

    async def consume(self, signal: Signal, payload: bytes) -> None:
        raise KeyError("a bug")


@dataclass
class Gated(Keeping):
    """A consumer that accepts everything once ``gate`` is open."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    async def consume(self, signal: Signal, payload: bytes) -> None:
        self.entered.set()
        await self.gate.wait()
        await Keeping.consume(self, signal, payload)


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for ``condition``; fail when it does not become true in time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.01)
