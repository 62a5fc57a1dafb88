"""Drive every reader of foreign input by one hostile input at a time.

It checks what must hold for every input.
A reader is a context manager.
``read`` returns the kind of its outcome, a few words. Whatever it raises is a fault of the product.
``good`` gives recorded input to the same object and returns the result, which is always the same.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

import uvloop
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from builders.plugin import fetch, publish, times
from builders.records import split_request
from faults import mutate
from faults.mutate import COMMON, Mutation, pieces
from handrail.otlp.decode import JSON, PROTOBUF
from handrail.otlp.messages import SHAPES
from handrail.otlp.payload import count_items, halves
from handrail.otlp.receiver.intake import Intake
from handrail.otlp.receiver.server import OtlpServer
from handrail.otlp.signals import Accepted, Rejected, Signal
from handrail.records import EngineSample, Exchange, LogFact, Observation, Process, Role
from handrail.wal.filesystem import MemoryFiles
from handrail.wal.log import LogLimits, SegmentLog
from handrail.wire.engine_samples import metrics_request
from handrail.wire.log_events import fact_log, logs_request
from handrail_collector.journal.journal import Journal
from handrail_collector.pipeline import Pipeline, PipelineSettings
from handrail_collector.stitch.stitcher import SECOND
from handrail_collector.store.publish import StorePublisher
from handrail_sidecar.engine_metrics.exposition import families_of
from handrail_sidecar.engine_metrics.page import PageReader
from handrail_sidecar.engine_metrics.report import schema_notes
from handrail_sidecar.export.evidence import EvidenceExport
from handrail_sidecar.export.exporter import Exporter, ExportSettings
from handrail_sidecar.export.resource import own_resource
from handrail_sidecar.proxy.exchange_observer import EndReason
from handrail_sidecar.proxy.head import END, HeadProbe, MalformedHeadError, RequestHead, parse_head
from handrail_sidecar.proxy.relay import Relay
from handrail_sidecar.proxy.request_framing import BadChunkError, ChunkedBody, encode
from handrail_sidecar.proxy.response import ResponseWatch
from handrail_sidecar.proxy.response_reader import End, ResponseReader
from handrail_sidecar.proxy.settings import ProxySettings
from handrail_sidecar.proxy.stats import ProxyStats
from handrail_sidecar.sources.engine_log import LogSettings, LogSource
from handrail_sidecar.sources.engine_metrics import MetricsSettings, MetricsSource, sample_of
from handrail_sidecar.sources.log_tail import LineSplitter, TailStats
from handrail_sidecar.sources.otlp_tap import OtlpTap
from handrail_sidecar.sources.plugin_socket import PluginSource
from harness.pipelines import Clock, batch, log_batch, plugin_batch, stored, sweep
from harness.proxy import Peer, Proxied, Upstream, proxied

DATA: Final = Path(__file__).parents[1] / "data"
NOW_UNIX_NS: Final = 1_796_000_000 * SECOND
BODY_BYTES: Final = 4 << 20
"""Bound of one export request here, so that a bomb is refused soon."""


class Reader(Protocol):
    """A reader under test; the module describes it."""

    @property
    def name(self) -> str: ...

    @property
    def mutations(self) -> Sequence[Mutation]: ...

    @property
    def every(self) -> int:
        """After how many hostile inputs a good one is given."""

    def __enter__(self) -> Reader: ...

    def __exit__(self, *_: object) -> None: ...

    def seeds(self) -> Sequence[bytes]: ...

    def read(self, data: bytes, rng: random.Random) -> str: ...

    def good(self) -> object: ...


class PropertyError(Exception):
    """A property that must hold for every input does not."""


def held(condition: object, what: str) -> None:
    """Raise ``PropertyError`` when the condition is false."""
    if not condition:
        raise PropertyError(what)


class _Loop:
    """An event loop of a reader's own; what it reports as unhandled is a fault."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.unhandled: list[Mapping[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        found = self.loop.run_until_complete(work)
        self.check()
        return found

    def check(self) -> None:
        if self.unhandled:
            context, self.unhandled = self.unhandled[0], []
            raise PropertyError(f"unhandled in the event loop: {context.get('message')}") from context.get("exception")

    def close(self) -> None:
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


# --- OTLP -----------------------------------------------------------------------------------------------------------------

_SIGNALS: Final = tuple(Signal)
_ENCODINGS: Final = ("", "gzip", "deflate", "br")


def _export(signal: Signal, body: bytes, *, as_json: bool = False, encoding: int = 0) -> bytes:
    """Pack one export request as a case.

    One byte holds the HTTP head, the body follows.
    """
    return bytes([_SIGNALS.index(signal) | as_json << 2 | encoding << 3]) + body


def _opened(case: bytes) -> tuple[Signal, bytes, str, str]:
    first = case[0] if case else 0
    return _SIGNALS[(first & 3) % 3], case[1:], JSON if first & 4 else PROTOBUF, _ENCODINGS[first >> 3 & 3]


def _json_exports() -> Iterator[tuple[Signal, bytes]]:
    for path in sorted((DATA / "otlp").glob("*.json")):
        body = path.read_bytes()
        signal = next((s for s in Signal if f"resource{s.value.capitalize()}".encode() in body), None)
        signal = Signal.TRACES if signal is None and b"resourceSpans" in body else signal
        if signal is not None and len(body) < 64 << 10:
            yield signal, body


def nested_value(data: bytes, rng: random.Random) -> bytes:
    """Put a deep ``AnyValue`` behind a message, as an attribute of a resource."""
    depth = rng.choice((10, 60, 99, 101, 300))
    value = b"\x18\x01"
    for _ in range(depth):
        value = _field(6, _field(1, _field(1, b"k") + _field(2, value))) if rng.random() < 0.5 else _field(5, _field(1, value))
    return data + _field(1, _field(1, _field(1, _field(1, b"deep") + _field(2, value))))


def group(data: bytes, rng: random.Random) -> bytes:
    """Put a deprecated protobuf group in a field's place, closed or not."""
    number = rng.choice((1, 2, 15))
    opening, closing = bytes([number << 3 | 3]), bytes([number << 3 | 4])
    inner = rng.choice((b"", b"\x08\x01", opening + closing, opening * 40, opening * 120 + closing * 120))
    at = rng.choice((0, 1, len(data)))
    return data[:at] + opening + inner + (closing if rng.random() < 0.8 else b"") + data[at:]


def unknown_field(data: bytes, rng: random.Random) -> bytes:
    """Insert a field that no message has, with a tag of any width."""
    tags = (
        b"\xf8\xff\xff\xff\x0f\x01",
        b"\xf8\xff\xff\xff\x1f\x01",
        b"\xfa\x01\x03abc",
        b"\x80\x80\x80\x80\x80\x01\x01",
        b"\x00\x01",
        b"\x8a\x00\x00",
    )
    at = rng.choice((0, 1, len(data), rng.randrange(len(data) + 1)))
    return data[:at] + rng.choice(tags) + data[at:]


def _field(number: int, content: bytes) -> bytes:
    size, length = len(content), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + content


def compressed(data: bytes, rng: random.Random) -> bytes:
    """Compress the body; the head may say so or not."""
    first = data[0] if data else 0
    return bytes([(first & 7) | (8 if rng.random() < 0.9 else 0)]) + mutate.gzipped(data[1:], rng)


_PROTOBUF: Final = (
    mutate.change_varint,
    mutate.change_varint,
    nested_value,
    group,
    unknown_field,
    compressed,
    mutate.nested_json,
)


def _exports() -> list[bytes]:
    """Return recorded requests of engines, examples of others, and sidecars' requests."""
    made = [_export(Signal.TRACES, path.read_bytes()) for path in sorted((DATA / "recordings/otlp_raw").glob("*.pb"))]
    for signal, body in _json_exports():
        made.append(_export(signal, body, as_json=True))
        request = SHAPES[signal].request()
        json_format.Parse(body, request, ignore_unknown_fields=True)
        made.append(_export(signal, request.SerializeToString()))
    for number in range(3):
        parts = split_request(f"req-{number}", f"t{number}")
        made.append(_export(Signal.TRACES, batch([r for r in parts.values() if isinstance(r, Exchange)], None)))
    d = times(Role.DECODE, 0, 10, 20, 90)
    made.append(_export(Signal.TRACES, plugin_batch([d, fetch(0), publish(0)], 1)))
    made.append(_export(Signal.LOGS, log_batch([replace(fetch(0), provisional=True)], 1)))
    made.append(_export(Signal.LOGS, logs_request(own_resource(_process()), [fact_log(f) for f in _facts()])))
    made.append(_export(Signal.METRICS, metrics_request(own_resource(_process()), [_sample()])))
    return made


def _process(role: Role = Role.DECODE) -> Process:
    return Process(role=role, instance="10.0.0.7:8100", host="h", sender="s" * 16)


def _sample() -> EngineSample:
    source = MetricsSource(MetricsSettings(url="http://127.0.0.1:1/metrics"), _process(), _refuse, lambda event: None)
    reading = PageReader().read((DATA / "recordings/metrics_decode.txt").read_bytes())
    return sample_of(reading, _process(), NOW_UNIX_NS, source.tracks)


async def _refuse(_: object) -> bool:
    return True


def _facts() -> list[LogFact]:
    with LogReader() as reader:
        for path in (DATA / "recordings/fail_fail.txt", DATA / "replay/logs/A25_mooncake_slices.log"):
            reader.read(path.read_bytes(), random.Random(0))
        return reader.facts[:40]


class _Taking:
    """A collector that takes everything, with the payloads since the last call."""

    def __init__(self) -> None:
        self.payloads: list[tuple[Signal, bytes]] = []

    async def send(self, signal: Signal, payload: bytes) -> Accepted:
        self.payloads.append((signal, payload))
        return Accepted()

    async def close(self) -> None:
        """Do nothing: nothing is open."""


class TapReader:
    """OTLP at the sidecar's tap.

    It covers intake, the resource's attributes, batch numbers, spool and sender.
    """

    name = "otlp_tap"
    mutations = (*COMMON, *_PROTOBUF)
    every = 200

    def __enter__(self) -> TapReader:
        self._loop = _Loop()
        self._collector = _Taking()
        self._exporter = Exporter(ExportSettings(), own_resource(_process()), lambda: self._collector)
        self._loop.run(self._exporter.start())
        resource = {"handrail.role": "decode", "handrail.instance": "10.0.0.7:8100"}
        serve = partial(OtlpServer, http=("127.0.0.1", 0), loopback_only=True)
        tap = OtlpTap(self._exporter.take, resource, serve)
        self._intake = _intake(tap, self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._exporter.shutdown(1.0))
        self._loop.close()

    def seeds(self) -> Sequence[bytes]:
        return _exports()

    def read(self, data: bytes, rng: random.Random) -> str:
        return str(self._loop.run(self._take(data)))

    async def _take(self, data: bytes) -> str:
        signal, body, content_type, encoding = _opened(data)
        before = self._intake.stats.items[signal]
        self._collector.payloads.clear()
        output = await _given(self._intake, signal, body, content_type, encoding)
        if not output.startswith("accepted"):
            return output
        items = self._intake.stats.items[signal] - before
        if items:
            while not self._collector.payloads or self._exporter.waiting_bytes:  # noqa: ASYNC110 - wait for the sender's turn
                await asyncio.sleep(0)
        sent = [payload for _, payload in self._collector.payloads]
        found = sum(count_items(payload) for payload in sent)
        held(found == items, f"{items} items were accepted and {found} sent on")
        for payload in sent:
            SHAPES[signal].request().ParseFromString(payload)
            parts = halves(payload)
            held(parts is None or sum(map(count_items, parts)) == items, "halves of a batch hold other items")
        return output

    def good(self) -> object:
        return [self.read(seed, random.Random(0)) for seed in _exports()[:6]]


def _intake(consumer: Any, loop: _Loop) -> Intake:
    async def make() -> Intake:
        return Intake(consumer, max_body_bytes=BODY_BYTES, max_in_flight_bytes=4 * BODY_BYTES, retry_delay_s=1.0)

    made: Intake = loop.run(make())
    return made


async def _given(intake: Intake, signal: Signal, body: bytes, content_type: str, encoding: str) -> str:
    """Return the kind of answer that an export request gets."""
    try:
        with intake.reservation() as reserved:
            accepted = await intake.take(signal, body, reserved, content_type, encoding)
    except Rejected as refusal:
        held(len(refusal.reason) < 500, "a long refusal")
        return f"{type(refusal).__name__} {refusal.reason[:24]}"
    finally:
        held(intake.in_flight_bytes == 0, "bytes stay counted as in flight")
    return f"accepted {content_type[12:]} {encoding} {min(accepted.rejected, 2)}"


class CollectorReader:
    """OTLP at the collector: intake, journal, stitcher, explanation, store."""

    name = "otlp_collector"
    mutations = (*COMMON, *_PROTOBUF)
    every = 150
    lives_of = 1500
    """Inputs before a new collector starts.

    The collector then holds little, so that a case stays cheap.
    """

    def __enter__(self) -> CollectorReader:
        self._loop = _Loop()
        self._received = Received("handrail_collector")
        self._numbers = count()
        self._given = 0
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._received.close()
        self._loop.close()

    def _open(self) -> None:
        shared = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="handrail-fuzz-", dir=shared if shared.is_dir() else None))
        self.clock = Clock()
        self._publisher = StorePublisher(self._folder / "store")
        recovered = self._publisher.open()
        log = SegmentLog("journal", LogLimits.within(64 << 20), files=MemoryFiles(), floor=recovered.end_offset)

        async def start() -> None:
            self._journal = Journal(log, now_unix_ns=self.clock)
            settings = PipelineSettings(flush_interval_ns=3600 * SECOND)
            self.pipeline = Pipeline(self._journal, self._publisher, recovered, settings, now_unix_ns=self.clock)
            await self._journal.start()
            self._task = asyncio.get_running_loop().create_task(self.pipeline.run())

        self._loop.run(start())
        self._intake = _intake(self._journal, self._loop)

    def _close(self) -> None:
        async def end() -> None:
            await self._journal.shutdown()
            await self._task

        self._loop.run(end())
        self._publisher.close()
        self._check()
        shutil.rmtree(self._folder)

    def _check(self) -> None:
        stats = self.pipeline.stats
        self._received.check()
        held(not stats.faults, f"{stats.faults} faults were contained")
        held(not stats.undecodable, "what was acknowledged could not be decoded")
        held(not stats.publish_failures, "a publish failed")

    def seeds(self) -> Sequence[bytes]:
        return _exports()

    def read(self, data: bytes, rng: random.Random) -> str:
        self._given += 1
        if self._given % self.lives_of == 0:
            self._close()
            self._open()
        return str(self._loop.run(self._take(data)))

    async def _take(self, data: bytes) -> str:
        signal, body, content_type, encoding = _opened(data)
        before = self.pipeline.stats.spans, self.pipeline.stats.log_records, self.pipeline.stats.samples, self.pipeline.stats.rows
        output = await _given(self._intake, signal, body, content_type, encoding)
        if not output.startswith("accepted"):
            return output
        while self.pipeline._position < self._journal.end:
            held(not self._task.done(), "the pipeline has ended")
            await asyncio.sleep(0)
        self._check()
        self.clock.now += SECOND // 4
        stats = self.pipeline.stats
        grown = (stats.spans, stats.log_records, stats.samples, stats.rows)
        return f"{output} {[min(3, a - b) for a, b in zip(grown, before, strict=True)]}"

    def good(self) -> object:
        """Send a request of P and D; it is decided and stored as exactly one row."""
        number = next(self._numbers)
        rid, trace = f"good-{number}", f"good-{number}"
        shift = self.clock.now - 50 * SECOND

        async def send() -> None:
            made = [r for r in split_request(rid, trace).values() if isinstance(r, Exchange)]
            first = min(r.arrival_unix_ns for r in made)
            for record in made:
                moved = replace(record, arrival_unix_ns=record.arrival_unix_ns - first + shift)
                await _given(self._intake, Signal.TRACES, batch([moved], None, record.process.role.value), PROTOBUF, "")
            while self.pipeline._position < self._journal.end:  # noqa: ASYNC110 - wait for the pipeline
                await asyncio.sleep(0)
            for _ in range(10):
                self.clock.now += 60 * SECOND
                sweep(self.pipeline, self.clock.now)
            await self.pipeline.flush()

        self._loop.run(send())
        self._check()
        rows = [row for row in stored(self._folder) if row.client_request_id == rid]
        held(len(rows) == 1, f"{len(rows)} rows of a good request")
        return (rows[0].scope, rows[0].outcome, [(p.phase, p.duration_ns) for p in rows[0].phases], rows[0].complete)


class Received(logging.Handler):
    """A log handler for a part of the product.

    An exception in the log is a contained fault, and here it counts as a fault.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.ERROR)
        self._log = logging.getLogger(name)
        self._records: list[logging.LogRecord] = []
        self._before = self._log.propagate
        self._log.addHandler(self)
        self._log.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def check(self) -> None:
        """Raise ``PropertyError`` for the first one since the last call."""
        records, self._records = self._records, []
        for record in records:
            raise PropertyError(record.getMessage()) from (record.exc_info[1] if record.exc_info else None)

    def close(self) -> None:
        self._log.removeHandler(self)
        self._log.propagate = self._before
        super().close()


# --- HTTP -----------------------------------------------------------------------------------------------------------------

_OK: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def _exchange(request: bytes, response: bytes = _OK) -> bytes:
    """Pack a request and its response as one case."""
    return struct.pack(">I", len(request)) + request + response


def _parted(case: bytes) -> tuple[bytes, bytes]:
    size = struct.unpack(">I", case[:4].ljust(4, b"\0"))[0] % (len(case) + 1)
    return case[4 : 4 + size], case[4 + size :]


def chunk_tricks(data: bytes, rng: random.Random) -> bytes:
    """Write sizes of chunks as request smugglers do."""
    sizes = (
        b"0x5",
        b"-5",
        b"+5",
        b"5;a=\xff",
        b"5 ",
        b"000000000000005",
        b"0000000000000005",
        b"ffffffffffffffff",
        b"fffffffffffffff",
        b"5\t",
        b"5\n",
        b"5\r",
        b"5;" + b"a" * 5000,
    )
    at = data.find(b"\r\n\r\n")
    at = rng.randrange(len(data) + 1) if at < 0 else at + 4
    trick = (
        rng.choice(sizes)
        + rng.choice((b"\r\n", b"\n", b"\r"))
        + b"hello"
        + rng.choice((b"\r\n", b"\n", b""))
        + b"0\r\n"
        + rng.choice((b"\r\n", b"X: y\r\n\r\n", b"X y\r\n\r\n", b""))
    )
    return data[:at] + trick + data[at:]


def header_tricks(data: bytes, rng: random.Random) -> bytes:
    """Insert header lines that two parsers read differently, or that break ids."""
    lines = (
        b"Content-Length: 5",
        b"Content-Length: +5",
        b"Content-Length: 18446744073709551615",
        b"Content-Length: 18446744073709551616",
        b"Content-Length: 0x10",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding:\x0bchunked",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding: gzip, chunked",
        b" folded: x",
        b"X-Request-Id: " + b"a" * 5000,
        b"X-Request-Id: \xff\xfe\xed\xa0\x80",
        b"X-Request-Id: ___prefill_addr_a___decode_addr_b_" + b"0" * 32,
        b"traceparent: 00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01",
        b"traceparent: ff-" + b"a" * 32 + b"-" + b"1" * 16 + b"-zz",
        b"b3: " + b"1" * 16 + b"-" + b"2" * 16 + b"-d-" + b"3" * 16,
        b"Content-Type: text/event-stream",
        b"Content-Type: \xff",
        b"Content-Encoding: gzip",
        b"Content-Encoding: gzip, gzip, gzip",
        b"Upgrade: websocket\r\nConnection: Upgrade",
        b"Expect: 100-continue",
        b"Connection: close",
        b"Host: [::1",
    )
    found = data.find(b"\r\n", rng.randrange(len(data) + 1))
    at = len(data) if found < 0 else found + 2
    return data[:at] + rng.choice(lines) + rng.choice((b"\r\n", b"\r\n", b"\n")) + data[at:]


def target_tricks(data: bytes, rng: random.Random) -> bytes:
    """Replace the request target."""
    targets = (
        b"http://[::1/v1/completions",
        b"http://[v1.x]/v1/completions",
        b"http://a:b@c:99999/v1/completions",
        b"http://\xe2\x84\x80.com/v1/completions",
        b"*",
        b"//v1/completions",
        b"/v1/completions?a=%ff#x",
        b"/v1/completions\xff",
        b"/" + b"a" * 9000 + b"/v1/completions",
        b"http:///v1/completions",
        b"?/v1/completions",
    )
    head = data[4:].split(b" ", 2)
    return data[:4] + b" ".join((head[0], rng.choice(targets), head[2])) if len(head) == 3 else data


_HTTP: Final = (chunk_tricks, header_tricks, header_tricks, target_tricks, mutate.nested_json)


def _exchanges() -> list[bytes]:
    """Return requests of every API with recorded responses, and heads of every kind."""
    bodies = [json.dumps(stream["request"]).encode()[:4000] for stream in _streams()[::6]]
    made = []
    for number, body in enumerate(bodies):
        path = ("/v1/completions", "/v1/chat/completions", "/v1/responses")[number % 3]
        request = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        made.append(_exchange(request))
        cut = [body[: len(body) // 2], body[len(body) // 2 :]]
        chunked = b"".join(map(encode, cut)) + b"0\r\nX-Sum: 1\r\n\r\n"
        head = (
            f"POST /gw{path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nX-Request-Id: user-42-{number}\r\n\r\n".encode()
        )
        made.append(_exchange(head + chunked))
    ask = (
        b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 44\r\n\r\n{"model":"m","stream":true,"messages":["x"]}'
    )
    for recorded in sorted((DATA / "replay/sse").glob("E*.json")):
        case = json.loads(recorded.read_text())
        if recorded.stat().st_size > 12_000 or "reads" not in case:
            continue
        head = (
            b"HTTP/1.1 200 OK\r\n" + b"".join(f"{k}: {v}\r\n".encode() for k, v in case["response"]["headers"].items()) + b"\r\n"
        )
        body = b"".join(base64.b64decode(read["b64"]) for read in case["reads"] if "b64" in read)
        framed = encode(body) + b"0\r\n\r\n" if b"chunked" in head else body
        made.append(_exchange(ask, head + framed))
    made += [
        _exchange(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"),
        _exchange(b"HEAD / HTTP/1.0\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n"),
        _exchange(
            b"POST http://h:1/v1/messages HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
            b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 500 X\r\n\r\nno",
        ),
        _exchange(
            b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        ),
    ]
    return made


def _streams() -> list[dict[str, Any]]:
    return [json.loads(line) for p in sorted((DATA / "recordings/sse").glob("*.jsonl")) for line in p.read_text().splitlines()]


class HttpReader:
    """Heads and bodies through the proxy's parsers and observers, without sockets."""

    name = "http"
    mutations = (*COMMON, *_HTTP)
    every = 500

    def __enter__(self) -> HttpReader:
        self._loop = _Loop()
        self._records: list[Observation] = []
        self._stats = ProxyStats()
        self._now = 10**15
        settings = ProxySettings(
            listen_host="127.0.0.1",
            listen_port=0,
            upstream_host="127.0.0.1",
            upstream_port=1,
            role=Role.EDGE,
            process=_process(Role.EDGE),
            record_all=True,
        )
        self._relay = Relay(settings, self._records.append, self._stats, clock=lambda: self._now, wall=lambda: NOW_UNIX_NS)
        self._exporter = Exporter(ExportSettings(), own_resource(_process()), _Taking)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def seeds(self) -> Sequence[bytes]:
        return _exchanges()

    def read(self, data: bytes, rng: random.Random) -> str:
        return str(self._loop.run(self._take(data, rng)))

    async def _take(self, data: bytes, rng: random.Random) -> str:
        request, response = _parted(data)
        end = request.find(END)
        if end < 0:
            return self._probe(request, rng)
        try:
            head = parse_head(request[: end + len(END)])
        except MalformedHeadError as error:
            return f"refused {str(error)[:40]}"
        flight = self._relay.begin(head, self._now, NOW_UNIX_NS)
        _same_request(head, flight.head_out)
        output = self._body(head, flight, request[end + len(END) :], rng)
        flight.request_done_ns = self._now
        watch = ResponseWatch(head.method == b"HEAD", flight.response_head)
        flight.first_delivered_ns = self._now
        for piece in pieces(response, rng):
            self._now += 1000
            if watch.feed(piece, self._now):
                break
        self._relay.finish(flight, rng.choice(list(EndReason)), self._now)
        self._relay.flush()
        held(not self._stats.observer_errors, "an observer failed and was contained")
        (record,) = self._records
        self._records.clear()
        self._exporter.sink(record)
        held(not any(self._exporter.stats.dropped.values()), "a record makes no span")
        self._exporter._exchanges.pending.clear()
        return f"{output} {watch.complete} {watch.unreadable} {watch.status and watch.status // 100}"

    def _probe(self, request: bytes, rng: random.Random) -> str:
        probe = HeadProbe()
        try:
            for piece in pieces(request[:65536], rng):
                probe.feed(piece)
        except MalformedHeadError as error:
            return f"refused early {str(error)[:40]}"
        return "no whole head"

    def _body(self, head: RequestHead, flight: Any, rest: bytes, rng: random.Random) -> str:
        if not head.chunked:
            flight.request_body(rest[: head.content_length or 0])
            return "length"
        body, seen = ChunkedBody(), bytearray()
        try:
            for piece in pieces(rest, rng):
                parts, _ = body.feed(piece)
                for part in parts:
                    flight.request_body(part)
                    seen += part
                if body.done:
                    break
        except BadChunkError as error:
            return f"bad chunk {str(error)[:30]}"
        again = ChunkedBody()
        parts, _ = again.feed((encode(bytes(seen)) if seen else b"") + b"0\r\n" + body.trailers + b"\r\n")
        held(again.done and b"".join(parts) == bytes(seen), "a body that was framed anew reads otherwise")
        return f"chunked {body.done}"

    def good(self) -> object:
        return [self.read(seed, random.Random(0)) for seed in _exchanges()[:12]]


def _same_request(head: RequestHead, out: bytes) -> None:
    """Check that the upstream reads the same request, and reads one."""
    again = parse_head(out)
    held((again.method, again.target) == (head.method, head.target), "another request goes upstream")
    held((again.content_length, again.chunked) == (head.content_length, head.chunked), "another framing goes upstream")
    held(out.count(END) == 1, "two heads go upstream")


class ProxyReader:
    """Heads and bodies through a running proxy, over sockets.

    The upstream answers with the case's response.
    """

    name = "proxy_socket"
    mutations = (*COMMON, *_HTTP)
    every = 100

    def __enter__(self) -> ProxyReader:
        self._loop = _Loop()
        self._response = _OK
        self._stack = AsyncExitStack()
        self._proxy: Proxied = self._loop.run(self._start())
        return self

    async def _start(self) -> Proxied:
        upstream = await self._stack.enter_async_context(Upstream(self._answer))
        return await self._stack.enter_async_context(proxied(upstream.port, connect_timeout_s=5.0))

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._stack.aclose())
        self._loop.close()

    async def _answer(self, peer: Peer) -> None:
        """Send the response as soon as a connection has a head, whatever comes."""
        try:
            await peer.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        await peer.send(self._response)

    def seeds(self) -> Sequence[bytes]:
        return [seed for seed in _exchanges() if len(seed) < 16_000]

    def read(self, data: bytes, rng: random.Random) -> str:
        request, self._response = _parted(data)
        return str(self._loop.run(self._take(request, rng)))

    async def _take(self, request: bytes, rng: random.Random) -> str:
        stats = self._proxy.source.stats
        reader, writer = await asyncio.open_connection("127.0.0.1", self._proxy.port)
        try:
            for piece in pieces(request, rng)[:40]:
                writer.write(piece)
                await asyncio.sleep(0)
            answer = await asyncio.wait_for(reader.read(64), 0.003) if rng.random() < 0.9 else b""
        except (ConnectionError, asyncio.TimeoutError, RuntimeError):  # RuntimeError: uvloop on our closed transport
            answer = b""
        finally:
            transport = writer.transport
            transport.abort()
        held(not stats.observer_errors, "an observer failed and was contained")
        self._proxy.records.clear()
        return answer[:12].decode("latin-1")

    def good(self) -> object:
        self._response = _OK
        ask = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n{"model":"m"}'

        async def exchanged() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._proxy.port)
            writer.write(ask)
            found = await asyncio.wait_for(reader.readexactly(len(_OK)), 60)
            writer.transport.abort()
            return found

        async def empty() -> None:
            await asyncio.wait_for(self._gone(), 60)

        answer = self._loop.run(exchanged())
        self._loop.run(empty())
        return answer

    async def _gone(self) -> None:
        while self._proxy.source.stats.open_connections:  # noqa: ASYNC110 - nothing signals the end of a connection
            await asyncio.sleep(0.001)


# --- streams --------------------------------------------------------------------------------------------------------------

_OPERATIONS: Final = ("chat", "text_completion", "responses", "messages", None)
_TYPES: Final = ("text/event-stream", "application/json", None, "text/event-stream; charset=\xff")
_CODINGS: Final = (None, "gzip", "deflate", "br")


class SseReader:
    """The body of a response: decoder, event parser, dialects, figures."""

    name = "sse"
    mutations = (*COMMON, mutate.crossed_lines, mutate.nested_json, compressed)
    every = 500

    def __enter__(self) -> SseReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is open."""

    def seeds(self) -> Sequence[bytes]:
        made = []
        for stream in _streams()[::3]:
            body = "".join(f"{line}\n" for _, line in stream["chunks"][:60]).encode().replace(b"\n\n\n", b"\n\n")
            made.append(bytes([0 if "messages" in stream["request"] else 1, 0]) + body)
        for path in sorted((DATA / "replay/sse").glob("*.json")):
            case = json.loads(path.read_text())
            operation = next(
                (i for i, o in enumerate(("chat", "/v1/completions", "responses", "messages")) if o in case.get("endpoint", "")),
                0,
            )
            body = b"".join(base64.b64decode(read["b64"]) for read in case.get("reads", ()) if "b64" in read)
            if 0 < len(body) < 16_000:
                made.append(bytes([operation, 8 if body[:2] == b"\x1f\x8b" else 0]) + body)
        made.append(
            bytes([0, 1])
            + b'{"id":"x","model":"m","choices":[{"index":0,"finish_reason":"stop"}],"usage":{"completion_tokens":3}}'
        )
        made.append(
            bytes([3, 0])
            + b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":3}}}\n\n'
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}\n\n'
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        )
        return made

    def read(self, data: bytes, rng: random.Random) -> str:
        first, second, body = data[:1] or b"\0", data[1:2] or b"\0", data[2:]
        reader = ResponseReader(
            _OPERATIONS[first[0] % 5],
            choices=(1, None, 4)[first[0] // 5 % 3],
            status=500 if first[0] > 200 else 200,
            content_type=_TYPES[second[0] & 3],
            content_encoding=_CODINGS[second[0] >> 3 & 3],
            continuous_usage=(None, True, False)[second[0] >> 5 & 3] if second[0] >> 5 & 3 < 3 else None,
        )
        reports: list[Any] = []
        reader.follow(reports.extend, reports.extend)
        at = 0
        for piece in pieces(body, rng):
            at += 10**6
            reader.feed(piece, at)
        reader.tell()
        reader.finish(at, rng.choice(list(End)))
        facts = reader.facts([(0, 10)])
        for found in (facts.response_id, facts.model, facts.error_type, facts.error_code, *facts.finish_reasons):
            held(found is None or (found.isprintable() and len(found) <= 256), "an unbounded or unprintable word")
        held(len(facts.finish_reasons) <= 4096, "reasons without bound")
        counts = min(facts.events, 3), min(facts.lost_events, 2)
        return f"{facts.outcome.value} {facts.ttft_text_kind} {counts} {[h.value for h in facts.hints]}"

    def good(self) -> object:
        return [self.read(seed, random.Random(0)) for seed in self.seeds()[:10]]


# --- the plugin, logs, metrics pages -------------------------------------------------------------------------------------


_SEQUENCE: Final = re.compile(rb'^(\[1,"\w+",\d+,"[a-z]+",)\d+')


class DatagramReader:
    """Datagrams of the plugin.

    They cover the packet, the merge of an engine's processes, and the records as spans and log records.
    """

    name = "datagram"
    mutations = (*COMMON, mutate.nested_json, mutate.change_number)
    every = 400

    def __enter__(self) -> DatagramReader:
        self._received = Received("handrail_sidecar")
        self._lines = _datagrams()
        self._kinds: set[str] = set()
        self._numbers = count()
        self._now = 12_770 * SECOND
        self._exporter = Exporter(ExportSettings(max_pending_spans=10**6), own_resource(_process()), _Taking)
        self._source = PluginSource(
            Path("/nowhere"), _process(), self._sink, line=lambda unix_ns, level, line: None, clock=lambda: self._now
        )
        self._source.merge.processes._exists = lambda pid: True
        return self

    def __exit__(self, *_: object) -> None:
        self._received.close()

    def seeds(self) -> Sequence[bytes]:
        return _datagrams()

    def read(self, data: bytes, rng: random.Random) -> str:
        stats = self._source.stats
        before = stats.bad_datagrams, stats.records, self._source.merge.stats.unread_events
        data = _SEQUENCE.sub(rb"\g<1>%d" % (1000 + next(self._numbers)), data, count=1)  # otherwise it was taken before
        self._kinds.clear()
        self._source._take(data, rng.choice((None, 1, 4000)))
        if rng.random() < 0.05:
            self._now += SECOND // 2
            self._source._say(self._source.merge.tick(self._now, 0))
        self._empty()
        after = stats.bad_datagrams, stats.records, self._source.merge.stats.unread_events
        return f"{[min(2, a - b) for a, b in zip(after, before, strict=True)]} {sorted(self._kinds)}"

    def _sink(self, record: Observation) -> None:
        self._kinds.add(type(record).__name__)
        self._exporter.sink(record)

    def _empty(self) -> None:
        exporter = self._exporter
        for lane in exporter._lanes:
            lane.pending.clear()
        dropped = {why.value: n for why, n in exporter.stats.dropped.items() if n}
        exporter.stats.dropped = dict.fromkeys(exporter.stats.dropped, 0)
        held(not dropped, f"records were dropped: {dropped}")

    def good(self) -> object:
        """Give the recorded datagrams of a new engine: its fetches and requests."""
        number = next(self._numbers)
        boots: dict[str, str] = {}
        records: list[Observation] = []
        source = self._source
        sink, source._sink = source._sink, records.append
        for line in self._lines:
            packet = json.loads(line)
            packet[1] = boots.setdefault(packet[1], f"good-{number}-{len(boots)}")
            text = json.dumps(packet, separators=(",", ":"))
            text = text.replace("cmpl-", f"cmpl-g{number}-")
            source._take(text.encode(), None)
        source._say(source.merge.tick(self._now, 0))
        source._sink = sink
        own = [r for r in records if f"cmpl-g{number}-" in (getattr(r, "request_id", None) or "")]
        kinds = [type(r).__name__ for r in own if not getattr(r, "provisional", False)]
        return kinds.count("KvFetch"), kinds.count("EngineTimes")


def _datagrams() -> list[bytes]:
    return [line for path in sorted((DATA / "recordings/plugin").glob("*.jsonl")) for line in path.read_bytes().splitlines()]


class LogReader:
    """Lines of an engine's log.

    They cover bytes to lines, line heads, what lines say about KV, facts and log records.
    """

    name = "log_lines"
    mutations = (*COMMON, mutate.crossed_lines, mutate.nested_json, mutate.change_number)
    every = 200

    def __enter__(self) -> LogReader:
        self.facts: list[LogFact] = []
        self._now = NOW_UNIX_NS
        self._source = LogSource(
            LogSettings(paths=()), _process(), _refuse, now_unix_ns=lambda: self._now, monotonic_s=lambda: 0.0
        )
        self._stats = TailStats()
        self._received = Received("handrail_sidecar.sources.engine_log")
        return self

    def __exit__(self, *_: object) -> None:
        self._received.close()

    def seeds(self) -> Sequence[bytes]:
        return _logs()

    def read(self, data: bytes, rng: random.Random) -> str:
        self._now += SECOND  # at most so many facts a second are reported
        splitter = LineSplitter(self._stats)
        lines: list[str] = []
        for piece in pieces(data, rng):
            lines += splitter.feed(piece)
        lines += splitter.end()
        for line in lines:
            self._source._line(line, self._now, self._now, live=rng.random() < 0.5)
        self._received.check()
        held(not self._source.stats.faults, "a line was a contained fault")
        found = self.facts = list(self._source.folder.take(self._now, all_of_them=True))
        if found:
            request = ExportLogsServiceRequest.FromString(logs_request(own_resource(_process()), [fact_log(f) for f in found]))
            held(sum(len(s.log_records) for r in request.resource_logs for s in r.scope_logs) == len(found), "facts are missing")
        return str(sorted({fact.recogniser for fact in found}))

    def good(self) -> object:
        return [self.read(seed, random.Random(0)) for seed in _logs()[:4]]


def _logs() -> list[bytes]:
    paths = [
        *sorted((DATA / "replay/logs").glob("*.log")),
        *(DATA / "recordings" / n for n in ("fail_fail.txt", "fail_recompute.txt", "log_decode.txt", "log_prefill.txt")),
    ]
    made = []
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True)
        made += [b"".join(lines[at : at + 40]) for at in range(0, min(len(lines), 160), 40)]
    return made


class PageReaderReader:
    """A metrics page: samples, families, the schema's report, the record as metrics."""

    name = "metrics_page"
    mutations = (*COMMON, mutate.crossed_lines, mutate.change_number)
    every = 100

    def __enter__(self) -> PageReaderReader:
        self._loop = _Loop()
        self._received = Received("handrail_sidecar.sources.engine_metrics")
        self._taking = _Taking()
        self._taken: list[Signal] = []

        async def take(signal: Signal, payload: bytes) -> None:
            SHAPES[signal].request().ParseFromString(payload)
            self._taken.append(signal)

        evidence = EvidenceExport(own_resource(_process()), take)
        self._source = MetricsSource(
            MetricsSettings(url="http://127.0.0.1:1/metrics"),
            _process(),
            evidence.sample,
            lambda event: None,
            now_unix_ns=lambda: NOW_UNIX_NS,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._received.close()
        self._loop.close()

    def seeds(self) -> Sequence[bytes]:
        return _pages()

    def read(self, data: bytes, rng: random.Random) -> str:
        self._taken.clear()
        self._loop.run(self._source._look(data, NOW_UNIX_NS))
        self._received.check()
        schema_notes(families_of(data))
        reading = self._source.reading
        held(len(self._source.reader.scanner._known) <= 50_000, "the scanner's memory is over its bound")
        counted = sorted(reading.invalid) if reading is not None else None
        return f"{sorted(s.value for s in self._taken)} {reading is not None and min(2, len(reading.values))} {counted}"

    def good(self) -> object:
        page = (DATA / "recordings/metrics_decode.txt").read_bytes()
        self.read(page, random.Random(0))
        reading = self._source.reading
        assert reading is not None
        return sorted((key, value) for key, value in reading.values.items() if key[0] in ("requests_running", "prompt_tokens"))


def _pages() -> list[bytes]:
    paths = [
        *sorted((DATA / "replay/metrics").glob("*.prom")),
        *sorted((DATA / "metrics").glob("*.prom")),
        *sorted((DATA / "recordings").glob("metrics_*.txt")),
    ]
    made = []
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True)
        made += [b"".join(lines[at : at + 120]) for at in range(0, min(len(lines), 480), 120)]
    return made


READERS: Final[Mapping[str, Callable[[], Any]]] = {
    each.name: each
    for each in (
        TapReader,
        CollectorReader,
        HttpReader,
        ProxyReader,
        SseReader,
        DatagramReader,
        LogReader,
        PageReaderReader,
    )
}
