"""The table of log lines, against vLLM's source, public wordings and hostile text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.records import LogKind
from handrail_sidecar.engine_logs.fields import IDS, NUMBERS, WORDS, reason_of
from handrail_sidecar.engine_logs.line_pattern import KEY_CHARS
from handrail_sidecar.engine_logs.lines import TABLE, recognise
from harness.vllm_log_ignored import IGNORED
from harness.vllm_log_source import Call, calls, read_line

_ENGINE = Path(os.environ.get("HANDRAIL_CACHE") or Path.home() / ".cache/handrail") / "vllm-0.32.0"
_SOURCES = sorted(_ENGINE.glob("venv/lib/python3*/site-packages/vllm"))
_LIST = Path(__file__).parents[2] / "golden/kv/vllm-0.32.0.tsv"


def committed() -> list[Call]:
    return [read_line(line) for line in _LIST.read_text(encoding="utf-8").splitlines()]


@pytest.mark.vllm
def test_the_committed_list_is_what_the_engine_can_log(golden: Callable[[Path | str, str], None]) -> None:
    golden("kv/vllm-0.32.0.tsv", "".join(f"{call.line()}\n" for call in calls(_SOURCES[-1])))


def test_every_warning_and_error_of_the_engine_is_recognised_or_ignored_for_a_reason() -> None:
    beginnings = tuple(each for group in IGNORED.values() for each in group)
    silent = [call for call in committed() if recognise(call.message()) is None and not call.template.startswith(beginnings)]
    assert not silent, "\n".join(f"{call.file}: {call.template}" for call in silent)


def test_nothing_is_both_ignored_and_recognised() -> None:
    beginnings = [each for group in IGNORED.values() for each in group]
    for beginning in beginnings:
        matching = [call for call in committed() if call.template.startswith(beginning)]
        assert matching, f"{beginning!r} is ignored, but the engine does not log it"
        assert all(recognise(call.message()) is None for call in matching), beginning


def test_rows_are_named_once_and_found_by_a_literal_beginning() -> None:
    assert not [name for name, count in Counter(row.name for row in TABLE).items() if count > 1]
    for row in TABLE:
        assert "{" not in row.template[:KEY_CHARS], row.template
        assert ".py:" not in row.template, row.template
        assert set(row.pattern.groupindex) <= {*IDS, *WORDS, *NUMBERS, "request_ids", "rest"}, row.name


def test_no_field_could_hold_a_prompt() -> None:
    """Every exported text matches a pattern without spaces.

    The content of ``rest`` goes only through readers.
    """
    secret = "the secret recipe"
    for row in TABLE:
        message = row.template
        for name in (*IDS, *WORDS, "request_ids", "rest", "_"):
            message = message.replace(f"{{{name}}}", secret)
        for name in NUMBERS:
            message = message.replace(f"{{{name}}}", "7")
        line = recognise(message)
        if line is not None:
            assert secret not in repr((line.texts, line.numbers, line.request_ids, line.reason)), row.name


@pytest.mark.parametrize(
    ("message", "row", "kind", "ids"),
    [
        (
            "Releasing expired KV blocks for request cmpl-a-0 which were retrieved by 2 decode worker(s) within 480 seconds.",
            "vllm.nixl.expired_old",
            LogKind.EXPIRED,
            ("cmpl-a-0",),
        ),
        (
            "NIXL transfer setup/initiation failed for request cmpl-a-0. Marking blocks as invalid.",
            "vllm.nixl.setup_failed_old",
            LogKind.FETCH_FAILED,
            ("cmpl-a-0",),
        ),
        (
            "Failing 2 request(s) due to KV load failure (failure_policy=fail, 240 tokens affected). Request IDs: {'a-1', 'b-2'}",
            "vllm.kv_load_failed",
            LogKind.REQUEST_FAILED_BY_KV,
            ("a-1", "b-2"),
        ),
        ("Recovered from KV load failure: 1 request(s) rescheduled", "vllm.kv_load_recovered_short", LogKind.RECOMPUTED, ()),
        (
            "Prefill bootstrap failed for request rank=0 req.rid='894d' req.bootstrap_room=38 with exception "
            "KVTransferError(bootstrap_room=38): Aborted by AbortReq.",
            "sglang.prefill_bootstrap",
            LogKind.HANDSHAKE_FAILED,
            ("894d",),
        ),
        (
            "Decode transfer failed for request rank=3 rid=63b1 bootstrap_room=65",
            "sglang.decode_transfer",
            LogKind.FETCH_FAILED,
            ("63b1",),
        ),
        (
            "pulling kv_caches for ['cmpl-a-0'] failed: Mooncake transfer engine returned -1",
            "vllm.mooncake.pull_failed",
            LogKind.FETCH_FAILED,
            ("cmpl-a-0",),
        ),
        (
            "Reqid: cmpl-a-0, Total tokens 5000, Inference Engine computed tokens: 0, LMCache hit tokens: 4, need to load: 4",
            "lmcache.lookup_computed",
            LogKind.CACHE_LOOKUP,
            ("cmpl-a-0",),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
def test_wordings_of_other_versions(message: str, row: str, kind: LogKind, ids: tuple[str, ...]) -> None:
    line = recognise(message)
    assert line is not None
    assert (line.row.name, line.kind, line.request_ids) == (row, kind, ids)


def test_sglang_names_the_peer_of_a_dead_session() -> None:
    line = recognise(
        "Prefill transfer failed for request rank=4 req.rid='ca27' req.bootstrap_room=6593551520068383758 with exception "
        "KVTransferError(bootstrap_room=6593551520068383758): Decode instance could be dead, remote mooncake session "
        "10.0.0.49:15295 is not alive"
    )
    assert line is not None
    assert dict(line.texts) == {"room": "6593551520068383758", "peer": "10.0.0.49:15295"}
    assert (dict(line.numbers), line.reason) == ({"rank": 4.0}, "peer_might_be_dead")


@pytest.mark.parametrize(
    "message",
    [
        "Received request cmpl-1: prompt: 'Releasing expired KV blocks for request cmpl-a-0 which were retrieved by 0 remote "
        "worker(s) before lease expired.'",
        " NIXL is not available",
        "",
        "NIXL",
    ],
    ids=["quoted_in_a_prompt", "not_at_the_start", "empty", "short"],
)
def test_only_the_beginning_of_a_message_counts(message: str) -> None:
    assert recognise(message) is None


@given(st.text(max_size=200), st.sampled_from([row.template for row in TABLE]), st.integers(4, 80))
def test_no_text_makes_it_raise(text: str, template: str, keep: int) -> None:
    recognise(text)
    recognise(template[:keep] + text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nixl_cu12._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT", "NIXL_ERR_REMOTE_DISCONNECT"),
        ("zmq.error.Again: Resource temporarily unavailable; RuntimeError", "RuntimeError"),
        ("UCX AM send failed with status -80 (Endpoint timeout)", "endpoint_timeout"),
        ("a prompt about nothing", None),
    ],
    ids=["nixl", "class", "phrase", "none"],
)
def test_a_reason_is_a_code_or_nothing(text: str, reason: str | None) -> None:
    assert reason_of(text) == reason


def test_the_table_needs_the_standard_library_only() -> None:
    """Import the table in an interpreter that finds only the standard library.

    This covers its own imports and theirs.
    """
    root = Path(sys.modules["handrail"].__file__ or "").parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); before = set(sys.modules); import handrail_sidecar.engine_logs.lines; "
    )
    code += "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert set(done.stdout.split()) - set(sys.stdlib_module_names) == {"handrail", "handrail_sidecar"}
