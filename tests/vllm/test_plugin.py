"""The plugin in a real pair that pulls by NIXL.

Each request has one record on each side; each hand-off is one fetch and one publish.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from handrail.records import (
    Direction,
    EngineFacts,
    EngineTimes,
    FetchEffect,
    KvFetch,
    KvPublish,
    ProcessEvent,
    ProcessEventKind,
)
from vllm.figures import Figures, spread
from vllm.observed import Answer, ObservedPair, metric, observed_pair, post
from vllm.pair import MODEL_NAME, START_S, EngineSettings, find_installation, start_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

PROMPTS = [f"def f{n}(x): return x + {n}\n" * 12 for n in range(8)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedPair]:
    flags = ("--enable-per-request-metrics",)
    with observed_pair(find_installation(), tmp_path_factory.mktemp("pull"), flags=flags) as pair:
        yield pair


@pytest.fixture(scope="module")
def answers(observed: ObservedPair) -> list[Answer]:
    """Return the answers to eight good requests, before any bad one."""
    return [observed.two_step(prompt, f"good-{n}") for n, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def good(answers: list[Answer]) -> list[str]:
    """Return their greedy texts."""
    return [answer.text for answer in answers]


def test_every_request_is_one_record_on_each_side(observed: ObservedPair, good: list[str]) -> None:
    for received_records in (observed.prefill, observed.decode):
        times = received_records.wait(EngineTimes, lambda found: len(found) >= len(good))
        assert sorted(t.request_id[:11] for t in times) == [f"cmpl-good-{n}" for n in range(len(good))]
        for t in times:
            offsets = [t.scheduled_ns, t.first_token_ns, t.finished_ns]
            assert None not in offsets
            assert offsets == sorted(offsets, key=lambda at: at or 0)
            assert t.status == "length_capped"


def test_every_hand_off_is_one_fetch_and_one_publish_with_nixls_bytes(
    observed: ObservedPair, good: list[str], figures: Figures
) -> None:
    fetches = observed.decode.wait(KvFetch, lambda found: len(found) >= len(good))
    publishes = observed.prefill.wait(KvPublish, lambda found: len(found) >= len(good))
    assert (len(fetches), len(publishes)) == (len(good), len(good))
    by_id = {p.request_id: p for p in publishes}
    for f in fetches:
        p = by_id[f.peer_request_id or ""]
        assert (f.peer_engine_id, f.direction, f.mode, f.failure) == (p.engine_id, Direction.P_TO_D, "pull", None)
        assert (f.ids.trace_id, f.ids.parent_span_id) == (p.ids.trace_id, p.ids.span_id)
        assert f.bytes_moved == f.bytes_expected == (f.blocks or 0) * (f.block_bytes or 0) == p.kv_bytes
        assert p.readers == 1
        assert p.expired_ns is None
        offsets = [f.load_started_ns, f.posted_ns, f.done_ns, f.noticed_ns]
        assert None not in offsets
        assert offsets == sorted(offsets, key=lambda at: at or 0)
    moved = sum(f.bytes_moved or 0 for f in fetches)
    assert moved == metric(observed.pair.decode.url, "vllm:nixl_bytes_transferred_sum")
    assert sum(f.descriptors or 0 for f in fetches) == metric(observed.pair.decode.url, "vllm:nixl_num_descriptors_sum")
    figures.add("plugin, pull", f"{len(fetches)} fetches, {moved} bytes as NIXL counts them")


def test_times_agree_with_vllms_own_stamps_and_nixls(observed: ObservedPair, answers: list[Answer], figures: Figures) -> None:
    """Another observer measures the same times.

    It uses vLLM's own queue and first-token stamps and the transfer times of NIXL's telemetry.
    """
    times = {t.request_id[:11]: t for t in observed.decode.wait(EngineTimes, lambda found: len(found) >= len(answers))}
    queue_ms, token_ms = [], []
    for n, answer in enumerate(answers):
        t, theirs = times[f"cmpl-good-{n}"], answer.body["metrics"]
        assert t.scheduled_ns is not None
        assert t.first_token_ns is not None
        queue_ms.append(abs(t.scheduled_ns / 1e6 - theirs["queue_time_ms"]))
        token_ms.append(abs((t.first_token_ns - t.scheduled_ns) / 1e6 - theirs["time_to_first_token_ms"]))
    fetches = observed.decode.wait(KvFetch, lambda found: len(found) >= len(answers))
    ours_s = sum((f.done_ns or 0) - (f.posted_ns or 0) for f in fetches[: len(answers)]) / 1e9
    theirs_s = metric(observed.pair.decode.url, "vllm:nixl_xfer_time_seconds_sum")
    figures.add("plugin, against vLLM's own stamps", f"queued to scheduled: difference {spread(queue_ms)}")
    figures.add("plugin, against vLLM's own stamps", f"scheduled to first token: difference {spread(token_ms)}")
    figures.add("plugin, against NIXL's telemetry", f"transfers in all: {ours_s * 1e3:.2f} ms, NIXL says {theirs_s * 1e3:.2f} ms")
    assert median(queue_ms) <= 1
    assert median(token_ms) <= 1
    assert abs(ours_s - theirs_s) / len(answers) <= 0.001


def test_a_local_hit_moves_only_the_rest(observed: ObservedPair, good: list[str]) -> None:
    before = metric(observed.pair.decode.url, "vllm:nixl_bytes_transferred_sum")
    observed.two_step(PROMPTS[0] + "and then some more of it, so that a block is new" * 3, "longer-0")
    fetch = observed.decode.fetch_of("longer-0")
    assert fetch.tokens_local
    assert fetch.bytes_moved == fetch.bytes_expected
    assert fetch.bytes_moved == metric(observed.pair.decode.url, "vllm:nixl_bytes_transferred_sum") - before


def test_facts_name_both_ends(observed: ObservedPair, good: list[str]) -> None:
    sides = [received_records.of(EngineFacts)[-1] for received_records in (observed.prefill, observed.decode)]
    assert [f.connector_role for f in sides] == ["kv_producer", "kv_consumer"]
    for f in sides:
        assert (f.engine_version, f.dtype, f.block_size, f.missing) == ("0.32.0", "bfloat16", 32, ())
    events = {e.kind for e in observed.decode.of(ProcessEvent)}
    assert events - {ProcessEventKind.PAUSED} == {ProcessEventKind.STARTED}  # on a busy machine it waits now and then


def test_a_bad_block_id_is_a_failed_fetch_with_its_type(observed: ObservedPair, good: list[str]) -> None:
    def spoil(params: dict[str, object]) -> None:
        blocks = params["remote_block_ids"]
        assert isinstance(blocks, list)
        params["remote_block_ids"] = [[900_001 + n for n, _ in enumerate(group)] for group in blocks]

    answer = observed.two_step("a prompt of its own, whose blocks nobody has " * 6, "bad-0", change=spoil)
    fetch = observed.decode.fetch_of("bad-0")
    assert answer.status == 500
    assert (fetch.failure, fetch.failure_error, fetch.effect) == (
        "transfer_setup_failed",
        "NIXL_ERR_INVALID_PARAM",
        FetchEffect.FAILED,
    )
    assert fetch.bytes_moved is None
    assert any("NIXL transfer failure" in line for _, line in observed.decode.lines)


def test_the_answers_are_those_of_an_engine_without_it(good: list[str], tmp_path: Path) -> None:
    """The answers of an engine with the plugin match those without it.

    They are compared token by token, greedy, with an engine beside the pair.
    """
    engine = start_engine(find_installation(), "decode", EngineSettings(), logs=tmp_path)
    try:
        engine.wait_healthy(time.monotonic() + START_S)
        bodies = [{"model": MODEL_NAME, "prompt": p, "max_tokens": 12, "temperature": 0} for p in PROMPTS]
        plain = [post(engine.url, body, f"plain-{n}").text for n, body in enumerate(bodies)]
    finally:
        engine.child.stop()
    assert plain == good
