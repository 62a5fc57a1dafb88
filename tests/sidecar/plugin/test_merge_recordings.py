"""Datagrams recorded from a real pair become the right records.

The pair is vLLM 0.32 with NixlConnector; six requests went through a two-step proxy.
The order in which the processes' datagrams arrive does not matter, nor whether they arrive twice or not at all.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TypeVar

import pytest

from handrail.records import (
    Direction,
    EngineFacts,
    EngineTimes,
    Iteration,
    KvFetch,
    KvPublish,
    Observation,
    Process,
    ProcessEvent,
    ProcessEventKind,
    Role,
)
from handrail_sidecar.plugin_merge.merge import Merge
from handrail_sidecar.sources.datagram import Packet, read_packet

RECORDINGS = Path(__file__).parents[2] / "data/recordings/plugin"
BYTES_OF_NIXL = 786_432
"""``vllm:nixl_bytes_transferred_sum`` on D after the run."""

R = TypeVar("R")


def packets(role: str) -> list[Packet]:
    return [read_packet(line) for line in (RECORDINGS / f"{role}.jsonl").read_bytes().splitlines()]


def merged(role: str, taken: list[Packet]) -> list[Observation]:
    merge = Merge(
        Process(role=Role(role), instance="10.0.0.1:8100", host="h"), exists=lambda _: True, line=lambda *_: pytest.fail("a line")
    )
    records: list[Observation] = []
    for packet in taken:
        records += merge.take(packet)
    end = max(packet.monotonic_ns for packet in taken)
    for step in range(8):
        records += merge.tick(end + step * 500_000_000)
    return records


def of(kind: type[R], records: list[Observation]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def final(kind: type[R], records: list[Observation]) -> list[R]:
    return [record for record in of(kind, records) if not getattr(record, "provisional", False)]


def test_each_request_on_p_is_one_record_and_one_publish() -> None:
    records = merged("prefill", packets("prefill"))
    times, publishes = final(EngineTimes, records), final(KvPublish, records)
    assert [t.request_id[:10] for t in times] == [f"cmpl-lab-{n}" for n in range(6)]
    assert [p.request_id for p in publishes] == [t.request_id for t in times]
    for t in times:
        assert t.scheduled_ns is not None
        assert t.first_token_ns is not None
        assert t.finished_ns is not None
        assert 0 < t.scheduled_ns < t.first_token_ns <= t.finished_ns
        assert (t.status, t.prompt_tokens, t.output_tokens, t.external_tokens) == ("length_capped", 120, 1, 0)
    for p in publishes:
        assert (p.blocks, p.kv_bytes, p.tokens, p.lease_ns) == (4, 131_072, 120, 30 * 10**9)
        assert (p.direction, p.mode, p.readers, p.expired_ns) == (Direction.P_TO_D, "pull", 1, None)
        assert p.read_ns is not None
        assert p.freed_ns is not None
        assert 0 < p.read_ns <= p.freed_ns


def test_each_request_on_d_is_one_record_and_one_fetch_with_every_time() -> None:
    records = merged("decode", packets("decode"))
    times, fetches = final(EngineTimes, records), final(KvFetch, records)
    assert (len(times), len(fetches)) == (6, 6)
    assert [t.external_tokens for t in times] == [120] * 6
    for f in fetches:
        order = [f.load_started_ns, f.posted_ns, f.done_ns, f.noticed_ns]
        assert all(at is not None for at in order)
        assert order == sorted(order, key=lambda at: at or 0)
        assert f.ended_ns == f.noticed_ns
        assert f.done_bound_ns <= (f.done_ns or 0) - (f.posted_ns or 0)
        assert (f.blocks, f.block_bytes, f.bytes_expected, f.bytes_moved, f.descriptors) == (4, 32_768, 131_072, 131_072, 2)
        assert (f.ranks, f.ranks_done, f.failure, f.policy, f.tokens_local) == (1, 1, None, "fail", 0)
    assert sum(f.bytes_moved or 0 for f in fetches) == BYTES_OF_NIXL


def test_only_the_first_contact_has_a_handshake() -> None:
    first, *rest = final(KvFetch, merged("decode", packets("decode")))
    assert first.handshake_begin_ns is not None
    assert first.handshake_end_ns is not None
    assert first.load_started_ns is not None
    assert first.posted_ns is not None
    assert first.load_started_ns <= first.handshake_begin_ns < first.handshake_end_ns <= first.posted_ns
    assert [(f.handshake_begin_ns, f.handshake_end_ns) for f in rest] == [(None, None)] * 5


def test_a_fetch_names_the_publish_that_it_reads() -> None:
    publishes = {p.request_id: p for p in final(KvPublish, merged("prefill", packets("prefill")))}
    for f in final(KvFetch, merged("decode", packets("decode"))):
        p = publishes[f.peer_request_id or ""]
        assert f.peer_engine_id == p.engine_id
        assert (f.ids.trace_id, f.ids.parent_span_id) == (p.ids.trace_id, p.ids.span_id)
        assert f.publish_span_id == p.ids.span_id


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_facts_and_starts_are_records(role: str) -> None:
    records = merged(role, packets(role))
    facts = of(EngineFacts, records)[-1]
    assert (facts.engine_version, facts.connector, facts.block_size, facts.dtype) == (
        "0.32.0",
        "NixlPullConnector",
        32,
        "bfloat16",
    )
    assert facts.missing == ()
    assert "nixl.get_xfer_telemetry" in facts.capabilities
    assert len(facts.agents) == 1
    assert [e.kind for e in of(ProcessEvent, records)] == [ProcessEventKind.STARTED] * 2


def test_rollups_hold_every_token() -> None:
    rollups = [i for i in of(Iteration, merged("decode", packets("decode"))) if not i.full]
    assert sum(i.decode_tokens for i in rollups) == 6 * 11
    assert sum(i.prefill_tokens for i in rollups) == 6
    assert sum(i.kv_landing_steps for i in rollups) == 6


@pytest.mark.parametrize("seed", range(20))
def test_the_order_between_processes_does_not_matter(seed: int) -> None:
    def stable(records: list[Observation]) -> list[tuple[object, ...]]:
        found = final(KvFetch, records)
        return sorted((f.request_id, f.posted_ns, f.done_ns, f.noticed_ns, f.bytes_moved, f.handshake_end_ns) for f in found)

    ordered = packets("decode")
    chance = random.Random(seed)
    queues = {boot: [p for p in ordered if p.boot == boot] for boot in {p.boot for p in ordered}}
    shuffled = []
    while queues:
        boot = chance.choice(sorted(queues))
        shuffled.append(queues[boot].pop(0))
        if not queues[boot]:
            del queues[boot]
    assert stable(merged("decode", shuffled)) == stable(merged("decode", ordered))


@pytest.mark.parametrize("seed", range(20))
def test_any_part_of_it_in_any_order_gives_no_negative_time(seed: int) -> None:
    chance = random.Random(seed)
    part = [p for p in packets("decode") + packets("prefill") if chance.random() < 0.7]
    part += chance.sample(part, len(part) // 4)
    chance.shuffle(part)
    for record in merged("decode", part):
        if isinstance(record, (EngineTimes, KvFetch, KvPublish)):
            values = [getattr(record, name) for name in type(record).__slots__ if name.endswith("_ns")]
            assert all(value is None or value >= 0 for value in values)
