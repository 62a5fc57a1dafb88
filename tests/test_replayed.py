"""Every recording, played on hosts with different uptimes.

The host booted seconds, an hour or 400 days ago. The records are the same, moved in time.
"""

# ruff: noqa: ASYNC240 - a few calls on files of the test's own, nobody else on the loop

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import builders.replayed
from builders.exchanges import PROCESS
from doubles.otlp import RAW
from handrail.otlp.signals import Signal
from handrail.otlp.values import attributes_of
from handrail.records import EngineTimes, Iteration, KvFetch, KvPublish, LogFact, Observation
from handrail_collector.explain.request.request_row import Fleet, explain
from handrail_collector.stitch.decode import RecordDecoder, batches
from handrail_collector.stitch.stitcher import SECOND, Stitcher
from handrail_sidecar.sources.datagram import read_packet
from handrail_sidecar.sources.engine_log import LogSettings, LogSource
from handrail_sidecar.sources.plugin_socket import PluginSource
from harness.pipelines import Clock, running, sweep, taken

HOUR: Final = 3600 * SECOND
BOOTED_UNIX_NS: Final = 1_796_112_000 * SECOND
UPTIMES: Final = {"10 s": 10 * SECOND, "1 h": HOUR, "400 days": 400 * 24 * HOUR}
"""How long the host has been up when a recording begins."""

LENGTH: Final = 16 * SECOND  # more than the plugin's recordings last
uptimes = pytest.mark.parametrize("uptime", list(UPTIMES.values()), ids=list(UPTIMES))
roles = pytest.mark.parametrize("role", ["prefill", "decode"])


def moved(record: Any, origin_unix_ns: int, each_ns: int = 1) -> Any:
    """Return what a record says, with times counted from ``origin_unix_ns``.

    Ids that are drawn by chance are left out. ``each_ns``: the precision; recorded pairs of clocks were read one after the
    other.
    """
    if is_dataclass(record) and not isinstance(record, type):
        return {
            field.name: round((getattr(record, field.name) - origin_unix_ns) / each_ns)
            if field.name.endswith("_unix_ns") and getattr(record, field.name) is not None
            else moved(getattr(record, field.name), origin_unix_ns)
            for field in fields(record)
            if field.name not in ("ids", "fact_id", "inferred")
        }
    return record


# --- the plugin's datagrams -------------------------------------------------------------------------------------------------


async def played(folder: Path, data: Sequence[bytes], begin_ns: int) -> tuple[list[Observation], PluginSource]:
    """Play datagrams in their recorded rhythm from ``begin_ns`` on.

    Each arrives as long after ``begin_ns`` as it was sent after the first. The source looks twice a second, then comes the end.
    """
    clock = [begin_ns]
    records: list[Observation] = []
    source = PluginSource(
        folder / "engine.sock", PROCESS, records.append, clock=lambda: clock[0], wall=lambda: BOOTED_UNIX_NS + clock[0]
    )
    await source.start()
    first_ns = min(read_packet(each).monotonic_ns for each in data)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for each in data:
            due_ns = begin_ns + read_packet(each).monotonic_ns - first_ns
            while clock[0] + SECOND // 2 < due_ns:
                clock[0] += SECOND // 2
                source.look()
            clock[0] = due_ns
            sender.sendto(each, str(source.path))
            source.look()
    await source.shutdown(0.0)
    return records, source


@roles
@uptimes
async def test_the_plugins_words_make_the_same_records_however_long_the_host_is_up(
    tmp_path: Path, role: str, uptime: int
) -> None:
    end = uptime + LENGTH
    data = builders.replayed.plugin(role, end, BOOTED_UNIX_NS + end)
    first = min(read_packet(each).monotonic_ns for each in data)
    records, source = await played(tmp_path, data, first)
    reports = [moved(record, BOOTED_UNIX_NS + end) for record in records]

    reference = builders.replayed.plugin(role, 2 * HOUR, BOOTED_UNIX_NS + 2 * HOUR)
    others, _ = await played(tmp_path, reference, min(read_packet(each).monotonic_ns for each in reference))
    assert reports == [moved(record, BOOTED_UNIX_NS + 2 * HOUR) for record in others]
    assert not sum(source.stamps.displaced.values())
    final = [record for record in records if not getattr(record, "provisional", False)]
    assert sum(isinstance(record, KvFetch if role == "decode" else KvPublish) for record in final) == 6
    assert sum(isinstance(record, EngineTimes) for record in final) == 6
    rolled = [record for record in records if isinstance(record, Iteration) and not record.full]
    assert sum(record.prefill_tokens for record in rolled) == (6 if role == "decode" else 720)


@roles
@uptimes
async def test_a_recording_that_nobody_moved_is_known_by_its_arrival(tmp_path: Path, role: str, uptime: int) -> None:
    data = (builders.replayed.RECORDINGS / f"plugin/{role}.jsonl").read_bytes().splitlines()
    records, source = await played(tmp_path, data, uptime)
    reference = builders.replayed.plugin(role, 2 * HOUR, BOOTED_UNIX_NS + 2 * HOUR)
    begin = min(read_packet(each).monotonic_ns for each in reference)
    others, _ = await played(tmp_path, reference, begin)
    assert [moved(record, BOOTED_UNIX_NS + uptime, 10**6) for record in records] == [
        moved(record, BOOTED_UNIX_NS + begin, 10**6) for record in others
    ]
    reason = "future" if uptime < read_packet(data[0]).monotonic_ns else "old"
    assert source.stamps.displaced[reason] == len(data)


# --- the engine's log -------------------------------------------------------------------------------------------------------


async def read_log(path: Path, lines: Sequence[str], end_unix_ns: int, year: int) -> tuple[list[LogFact], LogSource]:
    """Append lines at their stamps and read them before the next second's."""
    path.write_bytes(b"")
    now = [end_unix_ns - 3 * 60 * SECOND]
    facts: list[LogFact] = []

    async def take(some: Sequence[LogFact]) -> bool:
        facts.extend(some)
        return True

    settings = LogSettings(paths=(str(path),), zone=timezone.utc)
    source = LogSource(settings, PROCESS, take, now_unix_ns=lambda: now[0], monotonic_s=lambda: now[0] / SECOND)
    await source._round()
    with path.open("a", encoding="utf-8") as log:
        for number, line in enumerate(lines):
            for at in builders.replayed.stamps(line, year):
                stamped = round(at.replace(tzinfo=timezone.utc).timestamp()) * SECOND
                now[0] = max(now[0], stamped)
            log.write(line + "\n")
            if number + 1 == len(lines) or list(builders.replayed.stamps(lines[number + 1], year)):
                log.flush()
                os.utime(path, ns=(now[0], now[0]))
                await source._round()
    await source._round(last=True)
    for tail in source._tails:
        tail.close()
    return facts, source


@roles
@uptimes
async def test_a_log_makes_the_same_facts_however_long_the_host_is_up(tmp_path: Path, role: str, uptime: int) -> None:
    reports = []
    for up in (uptime, 2 * HOUR):
        end = BOOTED_UNIX_NS + up + 180 * SECOND
        year = datetime.fromtimestamp(end // SECOND, timezone.utc).year
        facts, source = await read_log(tmp_path / "engine.log", builders.replayed.log_lines(role, end, timezone.utc), end, year)
        reports.append(([moved(fact, end) for fact in facts], source.stats.clocks_disagree))
    assert reports[0] == reports[1]
    assert reports[0][0]


# --- OTLP -------------------------------------------------------------------------------------------------------------------


def decided(payload: bytes, received_unix_ns: int) -> list[tuple[int, str, int, list[str]]]:
    """Return when each request of an export is decided, and why.

    The time is in seconds after it was received. Its start and its labels follow.
    """
    stitcher, reader = Stitcher(), RecordDecoder()
    for number, entry in enumerate(ExportTraceServiceRequest.FromString(payload).resource_spans):
        for batch in batches(entry):
            for span in batch.spans:
                record = reader.read(span, batch.scope, batch.process, attributes_of(span.attributes))
                if record is not None:
                    stitcher.add(record, number, received_unix_ns)
    made = []
    for second in range(4000):
        for decision in stitcher.sweep(received_unix_ns + second * SECOND):
            row = explain(decision.group, Fleet())
            labels = sorted(evidence.label for evidence in decision.group.evidence)
            made.append((second, decision.closing.value, row.started_unix_ns, labels))
    assert not len(stitcher)
    return made


@pytest.mark.parametrize("recording", RAW, ids=lambda path: path.name)
@uptimes
def test_spans_are_decided_alike_however_long_the_host_is_up(recording: Path, uptime: int) -> None:
    """Spans are moved to now, and also kept as they were recorded.

    A span that lies ahead or long ago is decided by its arrival.
    """
    now = BOOTED_UNIX_NS + uptime
    raw = recording.read_bytes()
    ours = decided(builders.replayed.otlp(raw, ExportTraceServiceRequest, now), now)
    later = decided(builders.replayed.otlp(raw, ExportTraceServiceRequest, 2 * now), 2 * now)
    assert [(*made[:2], made[3]) for made in ours] == [(*made[:2], made[3]) for made in later]
    assert [made[2] + now for made in ours] == [made[2] for made in later]
    assert [(*made[:2], made[3]) for made in decided(raw, now)] == [(*made[:2], made[3]) for made in ours]


@uptimes
async def test_a_collector_decides_within_its_waits_however_long_the_host_is_up(tmp_path: Path, uptime: int) -> None:
    """The collector takes all recordings at once."""
    clock = Clock.at(BOOTED_UNIX_NS + uptime)
    async with running(tmp_path, clock) as (journal, pipeline):
        for recording in RAW:
            await journal.consume(
                Signal.TRACES, builders.replayed.otlp(recording.read_bytes(), ExportTraceServiceRequest, clock.now)
            )
        await taken(pipeline, journal)
        clock.now += 15 * SECOND
        sweep(pipeline, clock.now)
        assert not [group for group in pipeline.stitcher.open_groups() if not group.alone_at_prefill()]
