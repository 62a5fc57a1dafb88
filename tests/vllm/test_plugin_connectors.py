"""The plugin with other connectors than NIXL's pull.

Each hand-off is one fetch record. Each test starts a fresh pair, in turn.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.records import Direction, EngineTimes, KvFetch, KvPublish
from vllm.figures import Figures
from vllm.observed import ReceivedRecords, metric, observed_pair, post
from vllm.pair import MODEL_NAME, find_installation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

PROMPTS = [f"class C{n}:\n    value = {n}\n" * 12 for n in range(4)]


def only(received_records: ReceivedRecords, kind: type[KvFetch], count: int) -> list[KvFetch]:
    """Return the fetches once there are ``count``.

    If there are more, the caller's count fails.
    """
    return received_records.wait(kind, lambda found: len(found) >= count)


def test_nixl_push(tmp_path: Path, figures: Figures) -> None:
    push = {"kv_connector": "NixlPushConnector"}
    with observed_pair(find_installation(), tmp_path, prefill_connector=push, decode_connector=push) as pair:
        texts = [pair.two_step(prompt, f"push-{n}").text for n, prompt in enumerate(PROMPTS)]
        fetches = only(pair.decode, KvFetch, len(PROMPTS))
        publishes = {p.request_id: p for p in pair.prefill.wait(KvPublish, lambda found: len(found) >= len(PROMPTS))}
        assert (len(texts), len(fetches), len(publishes)) == (4, 4, 4)
        for f in fetches:
            p = publishes[f.peer_request_id or ""]
            assert (f.direction, f.mode, f.failure, f.connector) == (Direction.P_TO_D, "push", None, "NixlPushConnector")
            assert None not in (f.load_started_ns, f.posted_ns, f.done_ns, f.noticed_ns)
            assert p.bytes_moved == f.bytes_expected
            assert None not in (p.posted_ns, p.done_ns, p.freed_ns)
        moved = sum(p.bytes_moved or 0 for p in publishes.values())
        assert moved == metric(pair.pair.prefill.url, "vllm:nixl_bytes_transferred_sum")
        figures.add("plugin, other connectors", f"NixlPushConnector: {len(fetches)} fetches, {moved} bytes as NIXL counts them")


def test_multi(tmp_path: Path, figures: Figures) -> None:
    """The composite is not observed, its children are.

    Only the one that loads reports.
    """

    def connector(role: str, stored: Path) -> dict[str, object]:
        children: list[dict[str, object]] = [
            {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
            {
                "kv_connector": "ExampleConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"shared_storage_path": str(stored)},
            },
        ]
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}

    with observed_pair(
        find_installation(),
        tmp_path,
        prefill_connector=connector("kv_producer", tmp_path / "p"),
        decode_connector=connector("kv_consumer", tmp_path / "d"),
        flags=("--disable-hybrid-kv-cache-manager",),
    ) as pair:
        for n, prompt in enumerate(PROMPTS):
            assert pair.two_step(prompt, f"multi-{n}").status == 200
        fetches = only(pair.decode, KvFetch, len(PROMPTS))
        publishes = pair.prefill.wait(KvPublish, lambda found: len(found) >= len(PROMPTS))
        assert (len(fetches), len(publishes)) == (4, 4)
        for f in fetches:
            assert (f.connector, f.failure) == ("NixlPullConnector", None)
            assert f.bytes_moved == f.bytes_expected
        moved = sum(f.bytes_moved or 0 for f in fetches)
        assert moved == metric(pair.pair.decode.url, "vllm:nixl_bytes_transferred_sum")
        figures.add("plugin, other connectors", f"MultiConnector: {len(fetches)} fetches, {moved} bytes as NIXL counts them")


def test_example(tmp_path: Path, figures: Figures) -> None:
    """Shared storage has no peer and loads within the step.

    The second engine finds what the first has written.
    """
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "stored")},
    }
    flags = ("--disable-hybrid-kv-cache-manager",)
    with observed_pair(find_installation(), tmp_path, prefill_connector=example, decode_connector=example, flags=flags) as pair:
        for n, prompt in enumerate(PROMPTS):
            body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0}
            first = post(pair.pair.prefill.url, body, f"example-{n}")
            second = post(pair.pair.decode.url, body, f"example-{n}")
            assert first.text == second.text
        fetches = only(pair.decode, KvFetch, len(PROMPTS))
        times = pair.decode.wait(EngineTimes, lambda found: len(found) >= len(PROMPTS))
        assert (len(fetches), len(times)) == (4, 4)
        for f in fetches:
            assert (f.connector, f.direction, f.peer_engine_id, f.failure) == ("ExampleConnector", None, None, None)
            assert None not in (f.load_started_ns, f.done_ns, f.ended_ns)
            assert f.tokens_wanted
        assert all(t.external_tokens for t in times)
        figures.add("plugin, other connectors", f"ExampleConnector: {len(fetches)} fetches")
