"""Follow-up turns: D keeps the KV of its answer, P reads it for the next turn.

This is NIXL's bidirectional transfer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.records import Direction, EngineTimes
from vllm.figures import Figures
from vllm.observed import metric, observed_pair, post
from vllm.pair import MODEL_NAME, find_installation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

BOTH_WAYS = {"kv_connector_extra_config": {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}}
FIRST = "the first question of a long conversation, told at some length. " * 6


def test_the_next_turn_reads_back_from_d(tmp_path: Path, figures: Figures) -> None:
    with observed_pair(find_installation(), tmp_path, prefill_connector=BOTH_WAYS, decode_connector=BOTH_WAYS) as pair:
        answer = pair.two_step(FIRST, "turn-1")
        params = answer.body["kv_transfer_params"]
        assert params["do_remote_decode"]
        before = metric(pair.pair.prefill.url, "vllm:nixl_bytes_transferred_sum")
        body = {"model": MODEL_NAME, "prompt": FIRST + answer.text + " and more", "max_tokens": 1, "temperature": 0}
        second = post(pair.pair.prefill.url, {**body, "kv_transfer_params": params}, "turn-2")
        assert second.status == 200
        fetch = pair.prefill.fetch_of("turn-2")
        kept = pair.decode.publish_of("turn-1", lambda p: p.read_ns is not None)
        assert (kept.direction, kept.lease_ns, kept.readers) == (Direction.D_TO_P, 480 * 10**9, 1)
        assert (fetch.direction, fetch.failure) == (Direction.D_TO_P, None)
        assert (fetch.peer_engine_id, fetch.peer_request_id) == (kept.engine_id, kept.request_id)
        moved = metric(pair.pair.prefill.url, "vllm:nixl_bytes_transferred_sum") - before
        assert fetch.bytes_moved == moved
        (times,) = [t for t in pair.prefill.wait(EngineTimes, lambda found: len(found) >= 2) if "-turn-2-" in t.request_id]
        saved = (times.cached_tokens or 0) + (times.external_tokens or 0)
        assert times.external_tokens == fetch.tokens_wanted
        assert saved > 0
        figures.add("plugin, turns", f"turn 2 saved {saved} of {times.prompt_tokens} prompt tokens, {moved:.0f} bytes read back")
