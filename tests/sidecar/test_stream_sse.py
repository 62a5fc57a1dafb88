"""The event stream parser against the standard's rules and its bounds.

The tests also feed the reader any split and any bytes.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.records import Hint, Outcome
from handrail_sidecar.proxy.inflate import OUTPUT_LIMIT_BYTES, Inflate, UndecodableError, decoder
from handrail_sidecar.proxy.response_reader import End, ResponseReader, StreamFacts
from handrail_sidecar.proxy.sse import Event, SseParser

BOM = b"\xef\xbb\xbf"


def parsed(data: bytes, size: int | None = None, limit: int = 1 << 20) -> list[Event]:
    parser = SseParser(limit)
    pieces = [data] if size is None else [data[i : i + size] for i in range(0, len(data), size)]
    return [event for piece in pieces for event in parser.push(piece)]


@pytest.mark.parametrize(
    ("data", "events"),
    [
        pytest.param(b"data: a\n\n", [(b"", b"a")], id="lf"),
        pytest.param(b"data: a\r\rdata: b\r\r", [(b"", b"a"), (b"", b"b")], id="cr"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [(b"", b"a"), (b"", b"b")], id="crlf"),
        pytest.param(b"data: a\n\r\ndata: b\r\n\n", [(b"", b"a"), (b"", b"b")], id="mixed"),
        pytest.param(b"data:a\n\n", [(b"", b"a")], id="no_space"),
        pytest.param(b"data:  a\n\n", [(b"", b" a")], id="one_space_goes"),
        pytest.param(b"data: a\ndata: b\n\n", [(b"", b"a\nb")], id="lines_join"),
        pytest.param(b"data\ndata\n\n", [(b"", b"\n")], id="empty_lines_join"),
        pytest.param(b"data:\n\n", [(b"", b"")], id="empty_data"),
        pytest.param(b": ping\n\n:\n\ndata: a\n\n", [(b"", b"a")], id="comments"),
        pytest.param(b"event: ping\n\ndata: a\n\n", [(b"", b"a")], id="no_data_no_event"),
        pytest.param(b"event: error\ndata: a\n\ndata: b\n\n", [(b"error", b"a"), (b"", b"b")], id="name_is_for_one"),
        pytest.param(b"event:x\nevent\ndata: b\n\n", [(b"", b"b")], id="name_reset"),
        pytest.param(b"id: 1\nretry: 5\nfoo: bar\ndata: a\n\n", [(b"", b"a")], id="other_fields"),
        pytest.param(b"datas: a\n data: b\ndata: c\n\n", [(b"", b"c")], id="near_misses"),
        pytest.param(BOM + b"data: a\n\n", [(b"", b"a")], id="bom"),
        pytest.param(BOM + BOM + b"data: a\n\ndata: b\n\n", [(b"", b"b")], id="one_bom_only"),
        pytest.param(b"data: a\n\ndata: never ended\n", [(b"", b"a")], id="unfinished"),
        pytest.param(b"\n\n\r\r\n\ndata: a\n\n\n\n", [(b"", b"a")], id="empty_lines"),
    ],
)
@pytest.mark.parametrize("size", [None, 1, 2, 3])
def test_events(data: bytes, events: list[Event], size: int | None) -> None:
    assert parsed(data, size) == events


@pytest.mark.parametrize("size", [None, 1, 7])
@pytest.mark.parametrize(
    ("data", "events"),
    [
        pytest.param(b"data: " + b"x" * 200 + b"\n\ndata: a\n\n", [(b"", None), (b"", b"a")], id="one_line"),
        pytest.param(b"data: xxxxx\n" * 20 + b"\ndata: a\n\n", [(b"", None), (b"", b"a")], id="many_lines"),
        pytest.param(b"data\n" * 500 + b"\ndata: a\n\n", [(b"", None), (b"", b"a")], id="many_empty_lines"),
        pytest.param(b":" + b"x" * 200 + b"\ndata: a\n\n", [(b"", b"a")], id="long_comment"),
        pytest.param(b"event: e\ndata: " + b"x" * 200 + b"\ndata: b\n\n", [(b"e", None)], id="keeps_the_name"),
    ],
)
def test_an_event_above_the_limit_is_passed_over(data: bytes, events: list[Event], size: int | None) -> None:
    assert parsed(data, size, limit=64) == events


def test_memory_stays_within_the_limit() -> None:
    parser = SseParser(1000)
    for _ in range(100):
        assert parser.push(b"x" * 500) == []
        assert len(parser._partial) <= 1500


@given(
    st.lists(st.sampled_from([b"data: a", b"data", b":c", b"event: e", b"\n", b"\r", b"\r\n", BOM, b"x", b"\xff"]), max_size=40),
    st.data(),
)
def test_any_split_gives_the_same_events(parts: list[bytes], data: st.DataObject) -> None:
    text = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser = SseParser()
    events = [e for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for e in parser.push(text[a:b])]
    assert events == parsed(text)


# --- the reader -----------------------------------------------------------------------------------------------------------


def read(pieces: list[bytes], operation: str = "chat", encoding: str | None = None, choices: int | None = None) -> StreamFacts:
    reader = ResponseReader(
        operation,
        choices=choices,
        status=200,
        content_type="text/event-stream",
        content_encoding=encoding,
        continuous_usage=None,
    )
    for piece in pieces:
        reader.feed(piece, 7)
    reader.finish(9, End.CLEAN)
    return reader.facts()


def split(text: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


texts = st.sampled_from(["", "a", "é", "你好", "\n", '"error"', "data: [DONE]\n\n", None])
deltas = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["assistant", None]),
        "content": texts,
        "reasoning": texts,
        "refusal": texts,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {"index": st.integers(0, 2)}, optional={"id": texts, "function": st.fixed_dictionaries({"arguments": texts})}
            ),
            max_size=2,
        ),
    },
)
odd = st.sampled_from([None, 1, "x", [], {}, True, 1.5, [1], {"a": 1}, 10**30])
choices = st.fixed_dictionaries(
    {"index": st.one_of(st.integers(0, 3), odd), "delta": st.one_of(deltas, odd)},
    optional={
        "finish_reason": st.sampled_from(["stop", "length", None, "abort", "error", 3]),
        "token_ids": st.one_of(st.lists(st.integers(0, 9), max_size=3), odd),
        "text": texts,
    },
)
chunks = st.fixed_dictionaries(
    {"choices": st.one_of(st.lists(choices, max_size=2), odd)},
    optional={
        "id": st.one_of(texts, odd),
        "model": st.one_of(texts, odd),
        "usage": st.one_of(
            odd,
            st.fixed_dictionaries({"completion_tokens": st.one_of(st.integers(0, 50), odd), "prompt_tokens": st.integers(0, 9)}),
        ),
        "error": st.one_of(odd, st.fixed_dictionaries({"type": texts, "code": st.integers(400, 599)})),
        "kv_transfer_params": st.one_of(odd, st.fixed_dictionaries({"remote_engine_id": texts})),
    },
)
streams = st.lists(chunks, max_size=6).map(
    lambda found: (
        b"".join(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in found) + b"data: [DONE]\n\n"
    )
)
cut_places = st.lists(st.integers(0, 5000), max_size=10)


@settings(max_examples=200)
@given(streams, cut_places, st.sampled_from([None, 1, 3]))
def test_any_split_gives_the_same_facts(text: bytes, cuts: list[int], choices: int | None) -> None:
    whole = read([text], choices=choices)
    assert read(split(text, cuts), choices=choices) == whole
    one_event_a_read = [event + b"\n\n" for event in text.split(b"\n\n")[:-1]]
    assert read(one_event_a_read, choices=choices) == whole


@given(streams, cut_places, st.sampled_from(["gzip", "x-gzip", "deflate", "raw deflate", "identity", "GZIP , identity"]))
def test_any_split_of_a_compressed_stream_gives_the_facts_of_the_plain_one(text: bytes, cuts: list[int], encoding: str) -> None:
    if "gzip" in encoding.lower():
        packed = gzip.compress(text[:20]) + gzip.compress(text[20:]) + b"\0\0\0"
    elif encoding == "raw deflate":
        maker = zlib.compressobj(wbits=-15)
        packed = maker.compress(text) + maker.flush()
    else:
        packed = text if encoding == "identity" else zlib.compress(text)
    facts = read(split(packed, cuts), encoding=encoding.removeprefix("raw "))
    assert replace(facts, hints=()) == replace(read([text]), hints=())


@given(
    st.one_of(st.binary(max_size=300), st.binary(max_size=60).map(lambda x: b'data: {"choices":[' + x + b"\n\n")),
    cut_places,
    st.sampled_from(["chat", "text_completion", "responses", "messages", None]),
    st.sampled_from([None, "gzip", "deflate", "br"]),
    st.sampled_from(["text/event-stream", "application/json", None]),
    st.sampled_from([200, 500]),
    st.sampled_from(list(End)),
)
def test_random_bytes_never_raise(
    text: bytes, cuts: list[int], operation: str | None, encoding: str | None, media: str | None, status: int, end: End
) -> None:
    reader = ResponseReader(
        operation, choices=None, status=status, content_type=media, content_encoding=encoding, continuous_usage=True
    )
    assert reader.facts().outcome is Outcome.UNKNOWN
    for piece in split(text, cuts):
        reader.feed(piece, 1)
    reader.finish(2, end)
    facts = reader.facts()
    assert facts.outcome is not Outcome.UNKNOWN or Hint.UNDECODABLE in facts.hints


deep = b"[" * 100_000


@pytest.mark.parametrize(
    "bad", [b'{"choices":[{', b'{"choices":[{"delta":{"content":"\xff"}}]}', b'{"choices":' + deep], ids=["cut", "utf8", "deep"]
)
def test_a_malformed_event_before_the_first_token_takes_the_first_token_away(bad: bytes) -> None:
    good = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
    after = read([good, b"data: " + bad + b"\n\n", good])
    assert (after.ttft_token_ns, after.lost_events, after.hints, after.gaps) == (7, 1, (Hint.UNDECODABLE,), None)
    before = read([b"data: " + bad + b"\n\n", good])
    assert (before.ttft_token_ns, before.ttft_text_ns, before.lost_events, before.outcome) == (None, None, 1, Outcome.OK)


def test_lines_that_keep_the_connection_open_lose_nothing() -> None:
    facts = read([b"data: \n\ndata: ping\n\n: x\n\n", b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'])
    assert (facts.ttft_token_ns, facts.lost_events, facts.hints) == (7, 0, ())


def test_decoded_output_is_bounded() -> None:
    bomb = zlib.compress(b"\n" * (OUTPUT_LIMIT_BYTES + 1))
    with pytest.raises(UndecodableError):
        Inflate(gzip=False).push(bomb)
    facts = read([bomb, b"x"], encoding="deflate")
    assert (facts.hints, facts.outcome, facts.ttfb_ns) == ((Hint.UNDECODABLE,), Outcome.UNKNOWN, 7)


def test_what_follows_the_last_member_is_no_part_of_the_body() -> None:
    stream = Inflate(gzip=True)
    assert (
        b"".join(stream.push(bytes([byte])) for byte in gzip.compress(b"one") + b"\x1fgarbage" + gzip.compress(b"two")) == b"one"
    )
    assert decoder("br") is None


def test_an_endless_stream_takes_no_memory() -> None:
    reader = ResponseReader(
        "chat", choices=None, status=200, content_type="text/event-stream", content_encoding=None, continuous_usage=None
    )
    rng = random.Random(1)
    for number in range(20_000):
        reader.feed(b'data: {"choices":[{"index":%d,"delta":{"content":"a"}}]}\n\n' % number, rng.randrange(10**12))
    cadence = reader._tally.cadence
    assert len(cadence._choices) == len(reader._tally._begun) == 4096
    single = reader._tally._single
    assert single is not None
    assert len(single._gaps._fresh) < 512
    facts = reader.facts()
    assert facts.gaps is not None
    assert (facts.gaps.count, len(facts.gaps.sketch) < 4000) == (19_999, True)
