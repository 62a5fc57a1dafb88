"""Which ids identify the same request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.identity import (
    IdOrigin,
    RequestKey,
    candidate_keys,
    clip_request_id,
    derive_trace_id,
    joinable,
    request_key,
    router_peers,
)

HEX32 = "e9be52619f15438e878260d85f15568b"
ROUTER = f"___prefill_addr_127.0.0.1:8100___decode_addr_127.0.0.1:8200_{HEX32}"


@pytest.mark.parametrize(
    ("raw", "origin", "expected"),
    [
        pytest.param("lab-0001", IdOrigin.CLIENT, RequestKey("lab-0001"), id="client header"),
        pytest.param("user-42-7", IdOrigin.CLIENT, RequestKey("user-42-7"), id="a client's own number stays"),
        pytest.param("cmpl-foo", IdOrigin.CLIENT, RequestKey("cmpl-foo"), id="a client's own prefix stays"),
        pytest.param("x-9c60a41c", IdOrigin.CLIENT, RequestKey("x-9c60a41c"), id="a client's own hex stays"),
        pytest.param("cmpl-lab-0001", IdOrigin.VLLM_RESPONSE, RequestKey("lab-0001"), id="response id, completions"),
        pytest.param("chatcmpl-lab-0002", IdOrigin.VLLM_RESPONSE, RequestKey("lab-0002"), id="response id, chat"),
        pytest.param("cmpl-lab-0001-0", IdOrigin.VLLM_EXTERNAL, RequestKey("lab-0001", 0), id="span id, completions"),
        pytest.param("cmpl-user-42-7-3", IdOrigin.VLLM_EXTERNAL, RequestKey("user-42-7", 3), id="span id, prompt 3"),
        pytest.param("chatcmpl-lab-0002", IdOrigin.VLLM_EXTERNAL, RequestKey("lab-0002"), id="span id, chat"),
        pytest.param("chatcmpl-user-42-7", IdOrigin.VLLM_EXTERNAL, RequestKey("user-42-7"), id="chat has no prompt index"),
        pytest.param("cmpl-lab-0001-0-9c60a41c", IdOrigin.VLLM_ENGINE, RequestKey("lab-0001", 0), id="engine id, completions"),
        pytest.param("chatcmpl-lab-0002-b6e1c6fd", IdOrigin.VLLM_ENGINE, RequestKey("lab-0002"), id="engine id, chat"),
        pytest.param("2_chatcmpl-lab-0002-b6e1c6fd", IdOrigin.VLLM_ENGINE, RequestKey("lab-0002", 2), id="engine id, choice 2"),
        pytest.param("cmpl-lab-0001-0", IdOrigin.VLLM_ENGINE, RequestKey("lab-0001", 0), id="engine id, suffix switched off"),
        pytest.param(ROUTER, IdOrigin.CLIENT, RequestKey(HEX32), id="router header at a worker"),
        pytest.param(f"cmpl-{ROUTER}", IdOrigin.VLLM_RESPONSE, RequestKey(HEX32), id="router id in the response"),
        pytest.param(f"cmpl-{ROUTER}-0", IdOrigin.VLLM_EXTERNAL, RequestKey(HEX32, 0), id="router id in the span"),
        pytest.param(f"cmpl-{ROUTER}-0-97af79b8", IdOrigin.VLLM_ENGINE, RequestKey(HEX32, 0), id="router id in the engine"),
        pytest.param("cmpl-", IdOrigin.VLLM_RESPONSE, RequestKey("cmpl-"), id="a bare prefix is no stem"),
        pytest.param("", IdOrigin.CLIENT, RequestKey(""), id="empty"),
    ],
)
def test_request_key_by_origin(raw: str, origin: IdOrigin, expected: RequestKey) -> None:
    assert request_key(raw, origin) == expected


def test_C08_the_same_engine_id_from_two_headers_is_two_keys() -> None:
    assert request_key("foo", IdOrigin.CLIENT) != request_key("cmpl-foo", IdOrigin.CLIENT)
    assert request_key("cmpl-cmpl-foo-0", IdOrigin.VLLM_EXTERNAL).key == "cmpl-foo"


@pytest.mark.parametrize(
    ("key", "expected"), [("1", False), ("42", False), ("", False), ("user-42", True), ("foo", True), ("1" * 18, True)]
)
def test_C27_small_counters_join_nothing(key: str, expected: bool) -> None:
    assert joinable(key) is expected


@given(st.text(min_size=1, max_size=40))
def test_a_clients_id_is_found_again_in_every_form_the_engine_gives_it(stem: str) -> None:
    forms = [
        (f"cmpl-{stem}", IdOrigin.VLLM_RESPONSE),
        (f"chatcmpl-{stem}", IdOrigin.VLLM_RESPONSE),
        (f"cmpl-{stem}-0", IdOrigin.VLLM_EXTERNAL),
        (f"cmpl-{stem}-0-0123abcd", IdOrigin.VLLM_ENGINE),
        (f"chatcmpl-{stem}-0123abcd", IdOrigin.VLLM_ENGINE),
    ]
    for raw, origin in forms:
        assert request_key(raw, origin).key == request_key(stem, IdOrigin.CLIENT).key
        assert request_key(stem, IdOrigin.CLIENT).key in candidate_keys(raw)


@given(st.text(max_size=60), st.text(max_size=60))
def test_different_client_ids_stay_different(one: str, two: str) -> None:
    if one != two and "___prefill_addr_" not in one + two:
        assert request_key(one, IdOrigin.CLIENT) != request_key(two, IdOrigin.CLIENT)


def test_router_peers() -> None:
    assert router_peers(f"cmpl-{ROUTER}-0") is None  # the prompt index is the engine's, not the router's
    assert router_peers(ROUTER) == ("127.0.0.1:8100", "127.0.0.1:8200")
    assert router_peers("lab-0001") is None


def test_C10_long_ids_are_clipped_and_hashed() -> None:
    clipped = clip_request_id(b"a" * 1_000_000)
    assert clipped.text == "a" * 128
    assert clipped.hash is not None
    assert clip_request_id(b"a" * 999_999).hash != clipped.hash
    assert clip_request_id(b"a\r\n b\xe9").text == "a?? b\ufffd"
    assert clip_request_id(b"a" * 128).hash is None
    long = request_key("b" * 1000, IdOrigin.CLIENT).key
    assert len(long) <= 128
    assert long != request_key("b" * 1001, IdOrigin.CLIENT).key


def test_derived_trace_ids_agree_between_processes_and_versions() -> None:
    assert derive_trace_id("lab-0001") == derive_trace_id("lab-0001") == "836c60543d2026d6998b03c680950119"
    assert derive_trace_id("lab-0001") != derive_trace_id("lab-0002")
