"""Read facts from a request body: whole, cut at both ends, or malformed.

Text inside a prompt is never a fact.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.records import KvParams
from handrail_sidecar.proxy.request_body import TAIL_BYTES, RequestFacts, RequestInspector, kv_params, operation_of
from handrail_sidecar.proxy.truncated_json import head_members, tail_members

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def inspect(
    found: object,
    path: str = CHAT,
    *,
    cap: int = 1 << 20,
    size: int = 1 << 16,
    sized: bool = True,
    media: str | None = "application/json",
    encoding: str | None = None,
    ended: bool = True,
    upto: int | None = None,
) -> RequestFacts:
    data = found if isinstance(found, bytes) else json.dumps(found).encode()
    inspector = RequestInspector(path, media, len(data) if sized else None, encoding, cap)
    for begin in range(0, len(data[:upto]), size):
        inspector.feed(data[:upto][begin : begin + size])
    return inspector.facts(ended=ended)


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/responses", "responses"),
        ("/v1/messages", "messages"),
        ("/openai/v1/chat/completions?api-version=1", "chat"),
        ("/a/b/v1/completions?x=/v1/messages", "text_completion"),
        ("/v1/models", None),
        ("/v1/completions/", None),
        ("/xv1/completions", None),
        ("/v1/chat/completions/123", None),
        ("/v1/messages/count_tokens", None),
        ("/metrics?x=/v1/messages", None),
        ("", None),
    ],
)
def test_operation(path: str, operation: str | None) -> None:
    assert operation_of(path) == operation


def test_whole_chat_body() -> None:
    found = {
        "model": "tiny",
        "messages": [{"role": "user", "content": '"stream": false, "model": "other"'}],
        "n": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 16,
        "max_tokens": 99,
    }
    assert inspect(found) == RequestFacts(
        operation="chat",
        model="tiny",
        stream_requested=True,
        choices=3,
        include_usage=True,
        continuous_usage=True,
        max_tokens=16,
        inspected="whole",
    )


def test_defaults_of_the_api_hold_where_the_whole_body_was_read() -> None:
    expected = RequestFacts(
        operation="chat", stream_requested=False, choices=1, include_usage=False, continuous_usage=False, inspected="whole"
    )
    assert inspect({}) == expected
    assert inspect({"n": None, "stream": None, "stream_options": None, "max_tokens": None, "model": None}) == expected


@pytest.mark.parametrize(
    ("members", "choices"),
    [
        pytest.param({"prompt": "a"}, 1, id="string"),
        pytest.param({"prompt": "a", "n": 2}, 2, id="string_n"),
        pytest.param({"prompt": ["a", "b", "c"], "n": 2}, 6, id="strings_n"),
        pytest.param({"prompt": [[1, 2], [3]]}, 2, id="token_lists"),
        pytest.param({"prompt": [1, 2, 3]}, 1, id="token_ids"),
        pytest.param({"prompt": []}, None, id="none"),
        pytest.param({"prompt": None}, None, id="null"),
        pytest.param({}, None, id="absent"),
        pytest.param({"prompt": "a", "n": 0}, None, id="n_0"),
        pytest.param({"prompt": "a", "n": "2"}, None, id="n_string"),
        pytest.param({"prompt": "a", "n": True}, None, id="n_bool"),
        pytest.param({"prompt": "a", "n": -1}, None, id="n_negative"),
    ],
)
def test_choices_are_n_times_prompts(members: dict[str, Any], choices: int | None) -> None:
    assert inspect(members, COMPLETIONS).choices == choices
    spaced = json.dumps(members, indent=3).encode()
    assert inspect(b" \n" + spaced + b"\n", COMPLETIONS).choices == choices


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_responses_and_messages_have_one_choice(path: str) -> None:
    facts = inspect({"model": "m", "max_output_tokens": 7, "n": 5}, path)
    assert (facts.choices, facts.max_tokens) == (1, 7)


@pytest.mark.parametrize("odd", [1, "x", [], {}, 1.5, True, ["a"], 10**30, "x" * 300, "a\nb"], ids=str)
def test_a_value_of_the_wrong_type_costs_that_value_only(odd: Any) -> None:
    names = ("stream_options", "max_tokens", "kv_transfer_params", "model", "bootstrap_room", "bootstrap_port")
    facts = inspect({**dict.fromkeys(names, odd), "stream": True})
    assert (facts.stream_requested, facts.choices, facts.inspected) == (True, 1, "whole")
    assert facts.model in (None, "x")
    assert inspect({"stream": odd}).stream_requested is (True if odd is True else None)


@pytest.mark.parametrize(
    "bad",
    [b"", b"{", b'{"stream":true', b'{"stream":true}x', b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"n":' + b"[" * 100_000],
    ids=["empty", "open", "cut", "garbage", "list", "null", "binary", "deep", "deep_member"],
)
@pytest.mark.parametrize("sized", [True, False])
def test_a_malformed_body_is_unknown(bad: bytes, sized: bool) -> None:
    assert inspect(bad, sized=sized) == RequestFacts(operation="chat")


@pytest.mark.parametrize(
    ("path", "media", "encoding"),
    [
        pytest.param("/v1/models", "application/json", None, id="path"),
        pytest.param(CHAT, "multipart/form-data; boundary=x", None, id="media"),
        pytest.param(CHAT, "application/json", "gzip", id="encoding"),
    ],
)
def test_what_cannot_be_read_is_not_kept(path: str, media: str, encoding: str | None) -> None:
    inspector = RequestInspector(path, media, None, encoding)
    inspector.feed(b'{"stream":true}')
    assert len(inspector._head) == 0
    assert inspector.facts() == RequestFacts(operation=operation_of(path))


@pytest.mark.parametrize("media", [None, "application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"])
def test_json_by_any_name_is_read(media: str | None) -> None:
    assert inspect({"stream": True}, media=media, encoding="identity").stream_requested is True


# --- kv_transfer_params -----------------------------------------------------------------------------------------------------

NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "3780e0c7-d215-4798-ab76-85327e69834f",
    "remote_request_id": "cmpl-lab-0001-0-9c60a41c",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 121,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}
NIXL_KV = KvParams(
    do_remote_prefill=True,
    do_remote_decode=False,
    remote_engine_id="3780e0c7-d215-4798-ab76-85327e69834f",
    remote_request_id="cmpl-lab-0001-0-9c60a41c",
    remote_host="127.0.0.1",
    remote_port=5600,
    remote_blocks=4,
    remote_num_tokens=121,
    transfer_mode="pull",
)


@pytest.mark.parametrize(
    ("found", "kv"),
    [
        pytest.param(NIXL, NIXL_KV, id="nixl"),
        pytest.param(
            {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None},
            KvParams(do_remote_decode=True, do_remote_prefill=False),
            id="prefill_leg",
        ),
        pytest.param({"remote_block_ids": [1, 2, 3]}, KvParams(remote_blocks=3), id="flat"),
        pytest.param({"remote_block_ids": [[1, 2], [3], []]}, KvParams(remote_blocks=3), id="groups"),
        pytest.param({"remote_block_ids": []}, KvParams(remote_blocks=0), id="no_blocks"),
        pytest.param({"remote_block_ids": ["x"]}, None, id="odd_blocks"),
        pytest.param(
            {"transfer_id": "xfer-1", "do_remote_prefill": True},
            KvParams(transfer_id="xfer-1", do_remote_prefill=True),
            id="mooncake",
        ),
        pytest.param(
            {"bootstrap_room": 7, "bootstrap_host": "h", "bootstrap_port": 8998},
            KvParams(bootstrap_room="7", remote_host="h", remote_port=8998),
            id="sglang",
        ),
        pytest.param(
            {
                "remote_port": "5600",
                "remote_host": 5,
                "do_remote_prefill": 1,
                "remote_engine_id": ["x"],
                "remote_num_tokens": True,
                "transfer_mode": {},
            },
            None,
            id="wrong_types",
        ),
        pytest.param({}, None, id="empty"),
        pytest.param(None, None, id="null"),
        pytest.param([NIXL], None, id="list"),
        pytest.param("x", None, id="string"),
    ],
)
def test_kv_params(found: object, kv: KvParams | None) -> None:
    assert kv_params(found) == kv
    if not isinstance(found, dict) or "bootstrap_room" not in found:
        assert inspect({"kv_transfer_params": found}).kv == kv


def test_sglang_sends_its_room_at_the_top_level() -> None:
    facts = inspect({"bootstrap_room": 7, "bootstrap_host": "h", "bootstrap_port": 8998})
    assert facts.kv == KvParams(bootstrap_room="7", remote_host="h", remote_port=8998)


# --- bodies above the cap ---------------------------------------------------------------------------------------------------


def test_E21_stream_at_the_end_of_64_mib() -> None:
    head, tail = b'{"model":"m","prompt":"', b'","stream":true,"kv_transfer_params":' + json.dumps(NIXL).encode() + b"}"
    length = 64 << 20
    piece = b'x\\"stream\\":false,' * 3641
    inspector = RequestInspector(COMPLETIONS, "application/json", length)
    tracemalloc.start()
    inspector.feed(head)
    left = length - len(head) - len(tail)
    while left:
        part = piece[:left] if left >= 18 else b"x" * left
        inspector.feed(part if part[-1:] != b"\\" else part[:-1] + b"x")
        left -= len(part)
    inspector.feed(tail)
    facts = inspector.facts()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert facts == RequestFacts(operation="text_completion", model="m", stream_requested=True, kv=NIXL_KV, inspected="partial")
    assert peak < 5 << 20


@pytest.mark.parametrize("size", [1 << 16, 1000, 7])
@pytest.mark.parametrize("sized", [True, False])
def test_both_ends_of_a_large_body(size: int, sized: bool) -> None:
    found = {"model": "m", "n": 2, "prompt": "p" * 300_000, "stream": True, "max_tokens": 5, "kv_transfer_params": NIXL}
    facts = inspect(found, COMPLETIONS, cap=1000, size=size, sized=sized)
    assert facts == RequestFacts(
        operation="text_completion", model="m", choices=2, stream_requested=True, max_tokens=5, kv=NIXL_KV, inspected="partial"
    )


def test_the_end_is_only_read_when_it_came() -> None:
    found = {"model": "m", "metadata": {"a": {"stream": True}}, "prompt": "p" * 2000, "stream": True}
    length = len(json.dumps(found))
    for options in ({"upto": 1500}, {"upto": 1500, "sized": False, "ended": False}, {"upto": length - 1}, {"ended": False}):
        facts = inspect(found, COMPLETIONS, cap=1000, **options)
        assert (facts.model, facts.stream_requested, facts.inspected) == ("m", None, "partial")
    assert inspect(found, COMPLETIONS, upto=20).model == "m"


def test_a_key_that_is_cut_off_is_unknown() -> None:
    found = {"kv_transfer_params": NIXL, "prompt": "p" * (2 * TAIL_BYTES), "model": "m" * (2 * TAIL_BYTES)}
    assert inspect(found, COMPLETIONS, cap=1000) == RequestFacts(operation="text_completion", kv=NIXL_KV, inspected="partial")


text = st.text(st.sampled_from('"\\{}[],: \n\u00e9' + "modelstrnu1"), max_size=30)
scraps = st.sampled_from(['"stream":true', '\\"stream\\":true,', '{"model":"bad"}', '","n":9,"x":"', "\\", '\\\\"', '"}', "}]"])
strings = st.lists(st.one_of(text, scraps), max_size=6).map("".join)
values = st.recursive(
    st.one_of(strings, st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(strings, st.sampled_from(["stream", "model", "n"])), inner, max_size=3),
    ),
    max_leaves=12,
)
bodies = st.dictionaries(
    st.one_of(strings, st.sampled_from(["prompt", "messages", "n", "stream", "model", "max_tokens"])), values, max_size=8
)


@settings(max_examples=300)
@given(bodies, st.integers(0, 120), st.sampled_from([1, 5, 1000]), st.sampled_from([None, 1]), st.booleans())
def test_a_part_never_says_what_the_whole_does_not(
    found: dict[str, Any], cap: int, size: int, indent: int | None, plain: bool
) -> None:
    data = json.dumps(found, indent=indent, ensure_ascii=plain).encode()
    whole = inspect(data, COMPLETIONS)
    part = inspect(data, COMPLETIONS, cap=cap, size=size)
    for name in ("model", "stream_requested", "choices", "max_tokens", "kv"):
        assert getattr(part, name) in (None, getattr(whole, name)), name


@settings(max_examples=300)
@given(bodies, st.integers(0, 200), st.sampled_from([None, 1]))
def test_members_found_in_a_part_are_members(found: dict[str, Any], cut: int, indent: int | None) -> None:
    data = json.dumps(found, indent=indent).encode()
    head, _ = head_members(data[:cut])
    tail = tail_members(data[-cut:] if cut else b"")
    for members in (head, tail):
        for key, value in members.items():
            assert found[json.loads(b'"' + key + b'"')] == json.loads(value)
    assert {key for key in found if "\\" not in json.dumps(key)} == {
        json.loads(b'"' + key + b'"') for key in head_members(data)[0]
    }


@given(st.binary(max_size=200), st.integers(1, 50), st.booleans(), st.booleans())
def test_random_bytes_never_raise(data: bytes, cap: int, wrapped: bool, ended: bool) -> None:
    facts = inspect(b'{"prompt":' + data + b"}" if wrapped else data, COMPLETIONS, cap=cap, ended=ended)
    assert facts.operation == "text_completion"
