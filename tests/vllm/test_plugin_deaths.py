"""Requests that end the decode engine, with the plugin or without it (vLLM 0.32): what is said of them. A fresh pair each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail.records import KvFetch, ProcessEventKind
from vllm.observed import Heard, ObservedPair, observed_pair
from vllm.pair import find_installation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PROMPT = "a question that is several blocks long, so that there is something to move. " * 8


def spoiled(pair: ObservedPair, name: str, change: Callable[[dict[str, Any]], None], timeout_s: float) -> None:
    """Send what ends D; whether the client gets an error or nothing is the engine's business."""
    params = pair.prefill_step(PROMPT, name)
    change(params)
    try:
        pair.decode_step(PROMPT, name, params, timeout_s)
    except OSError:
        return


def cores(heard: Heard) -> set[int]:
    return {p.pid for p in heard.source.merge.processes.alive.values() if p.kind == "core"}


def wait_open(heard: Heard, name: str) -> list[KvFetch]:
    deadline_s = time.monotonic() + 20
    while not (found := [f for f in heard.of(KvFetch) if f.provisional and f"-{name}-" in f.request_id]):
        assert time.monotonic() < deadline_s, "no open fetch was told"
        time.sleep(0.05)
    return found


def test_a_missing_engine_id_is_an_open_fetch_without_a_peer_and_then_a_dead_engine(tmp_path: Path) -> None:
    with observed_pair(find_installation(), tmp_path) as pair:
        (core,) = cores(pair.decode)
        spoiled(pair, "nobody", lambda params: params.pop("remote_engine_id"), 4.0)
        opened = wait_open(pair.decode, "nobody")
        assert opened[0].peer_engine_id is None
        assert opened[0].posted_ns is None
        assert (opened[0].seen_ns or 0) >= 10**9
        assert pair.decode.wait_event(ProcessEventKind.DEAD, core, timeout_s=40)
        fetch = pair.decode.fetch_of("nobody")
        assert fetch.request_status in {"aborted", "engine_lost"}
        assert fetch.done_ns is None


def test_too_few_blocks_end_the_engine_in_the_middle_of_the_load(tmp_path: Path) -> None:
    with observed_pair(find_installation(), tmp_path) as pair:
        (core,) = cores(pair.decode)
        spoiled(pair, "few", lambda params: params.update(remote_block_ids=[params["remote_block_ids"][0][:1]]), 30.0)
        assert pair.decode.wait_event(ProcessEventKind.DEAD, core, timeout_s=40)
        fetch = pair.decode.fetch_of("few")
        assert fetch.load_started_ns is not None
        assert (fetch.done_ns, fetch.noticed_ns) == (None, None)
        assert fetch.request_status in {"error", "aborted", "engine_lost"}
        assert any("EngineDead" in line or "died" in line or "fatal" in line for _, line in pair.decode.lines)
