"""The case book's streams (kind e, A16, B16), by id.

Each is read whole, byte by byte, and with data after the end.
Where a case names an outcome differently, the names of DESIGN apply.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import Gaps, Hint, Outcome
from handrail_sidecar.proxy.request_body import operation_of
from handrail_sidecar.proxy.response_reader import End, ResponseReader, StreamFacts

FOLDER = Path(__file__).parents[1] / "data" / "replay" / "sse"
ENDS = {"clean": End.CLEAN, "left_open": End.IDLE_AFTER_FINISH, "fin_inside_chunk": End.UPSTREAM_CUT}
MS = 1_000_000
Reads = list[tuple[int, bytes]]


def load(name: str) -> dict[str, Any]:
    case: dict[str, Any] = json.loads((FOLDER / f"{name}.sse.json").read_text())
    return case


def reads_of(case: dict[str, Any]) -> Reads:
    return [(round(read["t"] * 1e9), base64.b64decode(read["b64"])) for read in case["reads"]]


def reader_of(case: dict[str, Any], choices: int | None, requested: bool | None = None) -> ResponseReader:
    headers = case["response"]["headers"]
    return ResponseReader(
        operation_of(case["endpoint"]),
        choices=choices,
        status=case["response"]["status"],
        content_type=headers["content-type"],
        content_encoding=headers.get("content-encoding"),
        continuous_usage=requested,
    )


def replay(name: str, choices: int | None = 1, requested: bool | None = None) -> StreamFacts:
    """Return the facts of a case.

    They are the same however its reads are cut, as long as each byte keeps its time.
    """
    case = load(name)
    reads = reads_of(case)
    end_ns = reads[-1][0]

    def fed(pieces: Reads) -> StreamFacts:
        reader = reader_of(case, choices, requested)
        for at_ns, data in pieces:
            reader.feed(data, at_ns)
        reader.finish(end_ns, ENDS[case["end"]])
        return reader.facts()

    whole = fed(reads)
    assert fed([(at_ns, data[i : i + 1]) for at_ns, data in reads for i in range(len(data))]) == whole
    garbage = fed([*reads, (end_ns, b"}\xff\x00 trailing: [garbage\r")])
    if "content-encoding" not in case["response"]["headers"]:
        assert garbage == whole
    assert replace(garbage, outcome=whole.outcome, hints=whole.hints) == whole
    return whole


def p50_ns(gaps: Gaps | None) -> int | None:
    return None if gaps is None else GapSketch.decode(gaps.sketch).quantile(0.5)


@pytest.mark.parametrize("variant", ["empty", "null"])
def test_E01_a_role_is_no_token(variant: str) -> None:
    facts = replay(f"E01_role_first_{variant}")
    assert (facts.ttfb_ns, facts.ttft_token_ns, facts.ttft_text_ns) == (5 * MS, 214 * MS, 214 * MS)
    assert facts.gaps is not None
    assert (facts.gaps.unit, facts.gaps.count, facts.gaps.sum_ns, facts.gaps.max_at_ns) == ("chunk", 1, 24 * MS, 238 * MS)
    assert (facts.prompt_tokens, facts.output_tokens, facts.tpot_mean_ns) == (9, 2, 24 * MS)
    assert (facts.outcome, facts.finish_reasons, facts.itl, facts.hints) == (Outcome.OK, ("stop",), None, ())


@pytest.mark.parametrize("requested", [True, False, None])
def test_E03_chunks_are_not_tokens(requested: bool | None) -> None:
    facts = replay("E03_multi_token_chunks", requested=requested)
    assert (facts.ttft_token_ns, facts.output_tokens, facts.tpot_mean_ns) == (300 * MS, 12, 13_636_364)
    assert facts.gaps is not None
    assert (facts.gaps.count, facts.gaps.sum_ns, facts.gaps.max_ns) == (4, 150 * MS, 60 * MS)
    if not requested:  # running totals that nobody requested and no sum confirmed
        assert facts.itl is None
        return
    expected = GapSketch()
    for gap_ms, tokens in ((10, 3), (10, 3), (30, 1), (15, 4)):
        expected.add(gap_ms * MS, tokens)
    assert facts.itl == Gaps(
        unit="token", count=11, sum_ns=150 * MS, max_ns=30 * MS, max_at_ns=390 * MS, sketch=expected.encode()
    )


def test_E04_usage_after_finish() -> None:
    facts = replay("E04_usage_after_finish")
    assert (facts.prompt_tokens, facts.output_tokens, facts.last_content_ns) == (42, 128, 200 * MS)
    assert (facts.gaps, facts.itl, facts.outcome) == (None, None, Outcome.OK)
    assert facts.finish_ns == 220 * MS


def test_E04_vllm_metrics_object_disturbs_nothing() -> None:
    case = load("E04_usage_after_finish")
    plain = replay("E04_usage_after_finish")
    metrics = b'"metrics":{"time_to_first_token_ms":26.89,"queue_time_ms":14.51,"speculative_decoding":null},'
    reader = reader_of(case, 1)
    for at_ns, data in reads_of(case):
        reader.feed(data.replace(b'"usage"', metrics + b'"usage"'), at_ns)
    reader.finish(plain.end_ns or 0, End.CLEAN)
    assert reader.facts() == plain


@pytest.mark.parametrize(
    ("name", "outcome", "reasons", "hints"),
    [
        pytest.param("a_no_terminal", Outcome.TRUNCATED, (), (), id="a"),
        pytest.param("b_finish_then_open", Outcome.OK, ("stop",), (Hint.CLOSE_MISSING,), id="b"),
        pytest.param("c_done_no_finish", Outcome.UNKNOWN_FINISH, (), (), id="c"),
    ],
)
def test_E06_ends(name: str, outcome: Outcome, reasons: tuple[str, ...], hints: tuple[Hint, ...]) -> None:
    facts = replay(f"E06_{name}")
    assert (facts.outcome, facts.finish_reasons, facts.hints) == (outcome, reasons, hints)
    assert (facts.events, facts.ttft_token_ns) == (12, 200 * MS)


def test_E07_cut_inside_a_chunk() -> None:
    facts = replay("E07_cut_inside_chunk")
    assert (facts.outcome, facts.ttfb_ns, facts.ttft_token_ns, facts.events) == (Outcome.UPSTREAM_DISCONNECT, 100 * MS, None, 0)


def test_E09_character_split_across_reads() -> None:
    facts = replay("E09_utf8_split")
    assert (facts.events, facts.ttft_token_ns, facts.ttft_text_ns, facts.lost_events) == (1, 150 * MS, 150 * MS, 0)


def test_E10_compression_holds_the_text_back() -> None:
    facts = replay("E10_gzip_buffered")
    assert (facts.ttfb_ns, facts.ttft_token_ns, facts.ttft_text_ns) == (1651 * MS, 3735 * MS, 3735 * MS)
    assert (facts.outcome, facts.hints, facts.tpot_mean_ns) == (Outcome.OK, (Hint.BUFFERED,), None)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, br", "rot13"])
def test_E10_an_unknown_encoding_gives_no_first_token(encoding: str) -> None:
    case = load("E01_role_first_null")
    case["response"]["headers"]["content-encoding"] = encoding
    reader = reader_of(case, 1)
    for at_ns, data in reads_of(case):
        reader.feed(data, at_ns)
    reader.finish(MS, End.CLEAN)
    facts = reader.facts()
    assert (facts.ttfb_ns, facts.ttft_token_ns, facts.events) == (5 * MS, None, 0)
    assert (facts.outcome, facts.hints) == (Outcome.UNKNOWN, (Hint.UNDECODABLE,))


@pytest.mark.parametrize("choices", [4, None], ids=["n_known", "n_unknown"])
def test_E12_interleaved_choices_have_gaps_of_their_own(choices: int | None) -> None:
    facts = replay("E12_n4_interleaved", choices)
    assert (facts.ttft_token_ns, facts.output_tokens, facts.outcome) == (300 * MS, 12, Outcome.OK)
    assert facts.gaps is not None
    assert (facts.gaps.count, facts.gaps.sum_ns, facts.gaps.max_ns) == (8, 640 * MS, 80 * MS)
    assert (facts.tpot_mean_ns, facts.finish_reasons) == (80 * MS, ("length",) * 4)


@pytest.mark.parametrize("choices", [1, None], ids=["n_1", "n_unknown"])
def test_E12_an_index_that_counts_tokens_is_one_choice(choices: int | None) -> None:
    case = load("E12_n4_interleaved")
    reader = reader_of(case, choices)
    for number in range(1, 11):
        chunk = {"choices": [{"index": number, "delta": {"content": "x"}, "finish_reason": "stop" if number == 10 else None}]}
        reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n", number * 20 * MS)
    reader.feed(b"data: [DONE]\n\n", 201 * MS)
    reader.finish(201 * MS, End.CLEAN)
    facts = reader.facts()
    assert facts.gaps is not None
    assert (facts.gaps.count, facts.gaps.max_ns, facts.outcome) == (9, 20 * MS, Outcome.OK)
    assert facts.finish_reasons == ("stop",)


def test_E12_a_batch_of_one_token_each_has_no_gaps() -> None:
    reader = reader_of(load("E12_n4_interleaved"), None)
    for number in range(5):
        chunk = {"choices": [{"index": number, "text": "x", "finish_reason": "length"}]}
        reader.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n", number * 20 * MS)
    reader.finish(201 * MS, End.CLEAN)
    assert (reader.facts().gaps, reader.facts().outcome, reader.facts().events) == (None, Outcome.OK, 5)


def test_E13_responses_end_without_done() -> None:
    facts = replay("E13_responses_ok")
    assert (facts.ttft_token_ns, facts.ttft_text_kind, facts.outcome) == (420 * MS, "text", Outcome.OK)
    assert (facts.prompt_tokens, facts.output_tokens, facts.response_id) == (7, 5, "resp_1")
    assert facts.gaps is not None
    assert (facts.gaps.count, facts.gaps.max_ns, facts.tpot_mean_ns) == (4, 20 * MS, 20 * MS)


def test_E13_a_failed_response_is_an_error() -> None:
    facts = replay("E13_responses_failed")
    assert (facts.outcome, facts.ttft_token_ns) == (Outcome.STREAM_ERROR, 420 * MS)
    assert (facts.error_type, facts.error_code) == ("server_error", "server_error")


def test_E19_a_burst_at_the_end_is_no_stream() -> None:
    facts = replay("E19_fake_stream")
    assert (facts.ttft_token_ns, facts.events, facts.hints) == (1699 * MS, 300, (Hint.FAKE_STREAM,))
    assert (facts.tpot_mean_ns, facts.itl) == (None, None)


def test_E23_tool_calls_are_content() -> None:
    facts = replay("E23_tool_calls_only")
    assert (facts.ttft_token_ns, facts.ttft_text_ns, facts.ttft_text_kind) == (900 * MS, 900 * MS, "tool_call")
    assert (facts.output_tokens, facts.outcome, facts.finish_reasons) == (41, Outcome.OK, ("tool_calls",))
    assert facts.gaps is not None
    assert (facts.gaps.unit, facts.gaps.max_ns, facts.itl) == ("chunk", 240 * MS, None)
    assert (facts.hints, facts.tpot_mean_ns) == ((Hint.BUFFERED,), None)


def test_A16_reasoning_without_content() -> None:
    facts = replay("A16_reasoning_garbage_empty_content")
    assert (facts.events, facts.ttft_text_kind, facts.ttft_text_ns) == (8, "reasoning", 600 * MS)
    assert (facts.last_content_ns, facts.outcome) == (740 * MS, Outcome.OK)
    assert facts.hints == (Hint.REASONING_ONLY,)  # HTTP 200, stop, and no message for the client


def test_B16_the_handoff_is_the_largest_gap() -> None:
    facts = replay("B16_first_token_from_prefill")
    assert facts.ttft_token_ns == 620 * MS
    assert facts.gaps is not None
    assert (facts.gaps.max_ns, facts.gaps.max_at_ns) == (1390 * MS, 2010 * MS)
    middle = p50_ns(facts.gaps)
    assert middle is not None
    assert abs(middle - 24 * MS) <= 0.01 * 24 * MS
