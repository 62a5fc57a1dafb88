"""The emulated engine over real sockets, against recordings of vLLM 0.32.

It has the same keys, the same framing and the same conventions.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from fleet.running import FAST, MODEL, SMALL, Received, attributes, engine, serving, until
from handrail_sim.emulator.faults import parse
from handrail_sim.emulator.metrics import COUNTERS, GAUGES, HISTOGRAMS

RECORDINGS = Path(__file__).parents[1] / "data/recordings"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


def body(chat: bool, **more: Any) -> dict[str, Any]:
    prompt = (
        {"messages": [{"role": "user", "content": "the first prompt of all"}]} if chat else {"prompt": "the first prompt of all"}
    )
    return {"model": MODEL, "max_tokens": 12, "ignore_eos": True, **prompt, **more}


def path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


async def ask(
    url: str, chat: bool, request_id: str = "t-1", headers: dict[str, str] | None = None, **more: Any
) -> tuple[int, str]:
    sent = {"X-Request-Id": request_id, **(headers or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path(chat), json=body(chat, **more), headers=sent) as answer,
    ):
        return answer.status, await answer.text()


def events(stream: str) -> list[Any]:
    assert stream.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]


def shape(value: Any) -> Any:
    """Return the keys and types of a JSON value, without texts and numbers."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return type(value).__name__


def recorded_stream(chat: bool) -> list[Any]:
    for line in (RECORDINGS / "sse/rec1.sse.jsonl").read_text().splitlines():
        recording = json.loads(line)
        if ("messages" in recording["request"]) == chat:
            return events("".join(text for _, text in recording["chunks"]))
    raise AssertionError("the recording lacks this kind")


BOTH_KINDS = pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])


@BOTH_KINDS
async def test_streams_have_the_shape_of_recorded_ones(chat: bool) -> None:
    async with engine("both") as (_, url):
        status, text = await ask(url, chat, stream=True, stream_options={"include_usage": True})
    assert status == 200
    mine, real = events(text), recorded_stream(chat)
    first_token = 1 if chat else 0
    assert shape(mine[0]) == shape(real[0])
    assert shape(mine[first_token]) == shape(real[first_token])
    assert shape(mine[-2]) == shape(real[-2])  # the one with finish_reason
    assert shape(mine[-1]) == shape(real[-1])  # usage
    assert list(mine[-1]) == list(real[-1])
    assert mine[-1]["usage"]["completion_tokens"] == 12
    assert {event["id"] for event in mine} == {"chatcmpl-t-1" if chat else "cmpl-t-1"}
    assert mine[-2]["choices"][0]["finish_reason"] == "length"


async def test_without_usage_the_last_token_carries_the_fingerprint() -> None:
    async with engine("both") as (_, url):
        mine = events((await ask(url, chat=False, stream=True))[1])
    recorded = re.search(r'^data: (\{.*"finish_reason":"length".*)$', (RECORDINGS / "fail_fail.txt").read_text(), re.MULTILINE)
    assert recorded
    assert shape(mine[-1]) == shape(json.loads(recorded[1]))


async def test_continuous_usage_counts_up() -> None:
    async with engine("both") as (_, url):
        options = {"include_usage": True, "continuous_usage_stats": True}
        mine = events((await ask(url, chat=False, stream=True, stream_options=options))[1])
    counts = [event["usage"]["completion_tokens"] for event in mine]
    assert counts == sorted(counts)
    assert counts[-1] == 12


async def test_a_whole_completion_has_the_recorded_keys() -> None:
    text = (RECORDINGS / "fail_recompute.txt").read_text()
    real = json.loads(next(line for line in text.splitlines() if line.startswith('{"id":"cmpl-f-blk2"')))
    async with engine("both") as (_, url):
        mine = json.loads((await ask(url, chat=False))[1])
    del real["metrics"]  # the recording ran with --enable-per-request-metrics
    assert list(mine) == list(real)
    assert list(mine["choices"][0]) == list(real["choices"][0])
    assert list(mine["usage"]) == list(real["usage"])


async def test_a_whole_chat_answer() -> None:
    async with engine("both") as (_, url):
        mine = json.loads((await ask(url, chat=True))[1])
    assert mine["object"] == "chat.completion"
    assert mine["choices"][0]["message"]["role"] == "assistant"
    assert mine["choices"][0]["message"]["content"]
    assert mine["usage"]["completion_tokens"] == 12


async def test_equal_prompts_give_equal_answers_streamed_or_not() -> None:
    async with engine("both") as (_, one), engine("both", seed=7) as (_, other):
        whole = json.loads((await ask(one, chat=False))[1])["choices"][0]["text"]
        streamed = events((await ask(other, chat=False, stream=True))[1])
    assert "".join(event["choices"][0]["text"] for event in streamed) == whole


@BOTH_KINDS
async def test_the_handoff_parameters_are_those_of_vllm(chat: bool) -> None:
    recorded = re.search(
        r"kv_transfer_params: (\{.*?\"transfer_mode\": \"pull\"), \"remote_pre", (RECORDINGS / "fail_fail.txt").read_text()
    )
    assert recorded
    names = re.findall(r'"(\w+)":', recorded[1])
    async with engine("prefill") as (producer, url):
        kv = json.loads((await ask(url, chat, max_tokens=1, kv_transfer_params=KEEP))[1])["kv_transfer_params"]
    assert list(kv)[: len(names)] == names
    assert (kv["do_remote_prefill"], kv["do_remote_decode"], kv["remote_engine_id"]) == (True, False, producer.id)
    stem = "chatcmpl-t-1" if chat else "cmpl-t-1-0"
    assert re.fullmatch(stem + "-[0-9a-f]{8}", kv["remote_request_id"])
    assert [len(group) for group in kv["remote_block_ids"]] == [1]


async def handed_over(
    prefill: str, decode: str, *, change: Callable[[dict[str, Any]], None] | None = None, **more: Any
) -> tuple[int, str]:
    kv = json.loads((await ask(prefill, chat=False, max_tokens=1, kv_transfer_params=KEEP))[1])["kv_transfer_params"]
    if change is not None:
        change(kv)
    return await ask(decode, chat=False, kv_transfer_params=kv, **more)


async def scrape(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
        text = await answer.text()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(
                str(value) for key, value in sorted(sample.labels.items()) if key not in ("engine", "model_name", "le")
            )
            samples[f"{sample.name}{'/' + labels if labels else ''}"] = sample.value
    return samples


async def test_a_handoff_frees_the_blocks_and_counts_on_the_decode_side() -> None:
    async with engine("prefill") as (_, prefill), engine("decode") as (_, decode):
        status, text = await handed_over(prefill, decode)
        p, d = await scrape(prefill), await scrape(decode)
    assert status == 200
    assert json.loads(text)["kv_transfer_params"] is None
    assert p["vllm:kv_cache_usage_perc"] == d["vllm:kv_cache_usage_perc"] == 0
    assert (p["vllm:nixl_xfer_time_seconds_count"], d["vllm:nixl_xfer_time_seconds_count"]) == (0, 1)
    prompt = d["vllm:prompt_tokens_total"]
    assert d["vllm:nixl_bytes_transferred_sum"] == prompt * 131_072
    assert d["vllm:prompt_tokens_by_source_total/external_kv_transfer"] == prompt
    assert p["vllm:prompt_tokens_by_source_total/local_compute"] == prompt
    assert d["vllm:request_success_total/length"] == 1


def _unknown_request(kv: dict[str, Any]) -> None:
    kv["remote_request_id"] += "0"


def _unknown_blocks(kv: dict[str, Any]) -> None:
    kv["remote_block_ids"] = [[900001]]


def _unknown_engine(kv: dict[str, Any]) -> None:
    kv["remote_engine_id"] = "00000000-dead-beef-0000-000000000000"


def _dead_port(kv: dict[str, Any]) -> None:
    kv["remote_port"] = 1


FAILURES = pytest.mark.parametrize("change", [_unknown_request, _unknown_blocks, _unknown_engine, _dead_port])


@FAILURES
async def test_a_failed_load_is_a_500_or_an_error_inside_200(change: Callable[[dict[str, Any]], None]) -> None:
    recorded = (RECORDINGS / "fail_fail.txt").read_text()
    whole = next(line for line in recorded.splitlines() if line.startswith('{"error"'))
    in_stream = next(line for line in recorded.splitlines() if line.startswith('data: {"error"'))
    patience_s = 0.2 if change is _dead_port else 60.0  # all of it passes, since nothing listens
    async with engine("prefill") as (_, prefill), engine("decode", handshake_timeout_s=patience_s) as (_, decode):
        assert await handed_over(prefill, decode, change=change) == (500, whole)
        assert await handed_over(prefill, decode, change=change, stream=True) == (200, f"{in_stream}\n\ndata: [DONE]\n\n")
        d = await scrape(decode)
    assert d["vllm:nixl_num_failed_transfers_total"] == 2
    assert d["vllm:request_success_total/error"] == 2
    assert d["vllm:request_queue_time_seconds_sum"] < 0  # as in vLLM: minus the machine's uptime
    assert d["vllm:kv_cache_usage_perc"] == 0


async def test_a_dead_prefill_fails_the_load_after_a_good_one() -> None:
    async with engine("decode", handshake_timeout_s=4.0) as (_, decode):  # all of it passes in the end
        async with engine("prefill") as (_, prefill):
            assert (await handed_over(prefill, decode))[0] == 200
            kv = json.loads((await ask(prefill, chat=False, max_tokens=1, kv_transfer_params=KEEP))[1])["kv_transfer_params"]
        status, _ = await ask(decode, chat=False, kv_transfer_params=kv)
    assert status == 500


async def test_unread_blocks_expire() -> None:
    async with engine("prefill", lease_s=3600.0) as (_, prefill):
        await ask(prefill, chat=False, max_tokens=1, kv_transfer_params=KEEP)
        held = await scrape(prefill)
    async with engine("prefill", lease_s=0.05) as (producer, prefill):
        await ask(prefill, chat=False, max_tokens=1, kv_transfer_params=KEEP)
        await until(lambda: producer._core.kv_usage == 0)
        gone = await scrape(prefill)
    assert held["vllm:nixl_num_kv_expired_reqs_total"] == 0
    assert held["vllm:kv_cache_usage_perc"] > 0
    assert gone["vllm:nixl_num_kv_expired_reqs_total"] == 1


async def test_a_leaving_client_aborts_its_request() -> None:
    async with engine("both") as (running, url), aiohttp.ClientSession() as session:
        async with session.post(url + path(False), json=body(False, max_tokens=20_000, stream=True)) as answer:
            await answer.content.readline()
            assert running._core.load().running == 1
            answer.close()
        await until(lambda: running._core.load().running == 0 and running._core.kv_usage == 0)
    assert not running._calls


async def test_a_request_without_keys_hangs_until_its_client_leaves() -> None:
    async with engine("decode") as (running, url):
        hanging = asyncio.create_task(ask(url, chat=False, kv_transfer_params={"do_remote_prefill": True}))
        await until(lambda: running._core.load().loading == 1)
        hanging.cancel()
        await until(lambda: running._core.load().loading == 0)
    assert not running._fetches


async def test_more_than_the_batch_holds_waits() -> None:
    async with engine("both") as (running, url):
        tasks = [asyncio.create_task(ask(url, chat=False, request_id=f"t-{index}", max_tokens=600)) for index in range(12)]
        await until(lambda: running._core.load().waiting == 4)
        assert running._core.load().running == 8
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


async def test_prompts_and_samples_become_choices() -> None:
    async with engine("both") as (_, url):
        mine = json.loads((await ask(url, chat=False, prompt=["one", [1, 2, 3]], n=2))[1])
        streamed = events((await ask(url, chat=True, n=3, stream=True))[1])
    assert [choice["index"] for choice in mine["choices"]] == [0, 1, 2, 3]
    assert mine["usage"] == {**mine["usage"], "prompt_tokens": 4, "completion_tokens": 48}
    assert {choice["index"] for event in streamed for choice in event["choices"]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("more", "status", "kind"),
    [
        ({"model": "other"}, 404, "NotFoundError"),
        ({"prompt": ""}, 400, "BadRequestError"),
        ({"prompt": None}, 400, "BadRequestError"),
        ({"max_tokens": 0}, 400, "BadRequestError"),
        ({"max_tokens": 1_000_000}, 400, "BadRequestError"),
        ({"max_tokens": "many"}, 400, "BadRequestError"),
        ({"n": 1000}, 400, "BadRequestError"),
        ({"kv_transfer_params": []}, 400, "BadRequestError"),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError"),
    ],
    ids=["model", "empty", "none", "no tokens", "too many", "no number", "samples", "kv", "options"],
)
async def test_bad_requests_are_refused(more: dict[str, Any], status: int, kind: str) -> None:
    async with engine("both") as (_, url):
        got, text = await ask(url, chat=False, **more)
    assert got == status
    error = json.loads(text)["error"]
    assert (error["type"], error["code"]) == (kind, status)


async def test_a_body_that_is_not_json_is_refused() -> None:
    async with engine("both") as (_, url), aiohttp.ClientSession() as session:
        for data in (b"{", b"[]", b"\xff"):
            async with session.post(url + "/v1/completions", data=data) as answer:
                assert answer.status == 400


async def test_the_small_routes() -> None:
    async with engine("both", echo_request_id=True) as (_, url), aiohttp.ClientSession() as session:
        async with session.get(url + "/health") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        async with session.get(url + "/v1/models") as answer:
            assert (await answer.json())["data"][0]["id"] == MODEL
        async with session.get(url + "/version") as answer:
            assert await answer.json() == {"version": "0.32.0"}
        async with session.post(url + path(True), json=body(True), headers={"X-Request-Id": "mine"}) as answer:
            assert answer.headers["X-Request-Id"] == "mine"
        async with session.post(url + path(True), json=body(True)) as answer:
            assert "X-Request-Id" not in answer.headers
            assert re.fullmatch("chatcmpl-[0-9a-f]{32}", (await answer.json())["id"])


# --- /metrics -------------------------------------------------------------------------------------------------------------


def families(text: str) -> dict[str, tuple[str, frozenset[str], tuple[str, ...]]]:
    """Return type, label names and buckets of every family."""
    found = {}
    for family in text_string_to_metric_families(text):
        labels = frozenset(key for sample in family.samples for key in sample.labels if key != "le")
        buckets = tuple(dict.fromkeys(sample.labels["le"] for sample in family.samples if "le" in sample.labels))
        found[family.name] = (family.type, labels, buckets)
    return found


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_metric_families_equal_the_recorded_ones(role: str) -> None:
    real = families((RECORDINGS / f"metrics_{role}.txt").read_text())
    async with engine(role) as (_, url), aiohttp.ClientSession() as session:
        await ask(url, chat=False)
        async with session.get(url + "/metrics") as answer:
            mine = families(await answer.text())
    ours = {name: family for name, family in mine.items() if name.startswith(("vllm:", "http_"))}
    assert ours == {name: real.get(name) for name in ours}
    assert {*HISTOGRAMS, *COUNTERS, *GAUGES} <= {*ours, "vllm:iteration_tokens_total"}


# --- spans ----------------------------------------------------------------------------------------------------------------


def recorded_request() -> tuple[Any, Any, Any]:
    message = ExportTraceServiceRequest.FromString((RECORDINGS / "otlp_raw/0008.http.pb").read_bytes())
    resource_spans = message.resource_spans[0]
    return resource_spans.resource, resource_spans.scope_spans[0].scope, resource_spans.scope_spans[0].spans[0]


async def spans_of(engines: dict[str, Any] | None = None, **more: Any) -> tuple[Received, Any, Any]:
    """Return what P and D export for one request with a hand-off.

    These are the receiver, P's span and D's span.
    """
    received = Received()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with serving(received.app()) as collector:
        otlp = {"otlp_endpoint": collector + "/v1/traces", "otlp_protocol": "http", **(engines or {})}
        async with engine("prefill", **otlp) as (_, prefill), engine("decode", **otlp) as (_, decode):
            kept = await ask(prefill, chat=False, headers=headers, max_tokens=1, kv_transfer_params=KEEP)
            kv = json.loads(kept[1])["kv_transfer_params"] | more
            await ask(decode, chat=False, headers=headers, kv_transfer_params=kv)
    spans = sorted(received.spans(), key=lambda span: int(span.start_time_unix_nano))
    assert len(spans) == 2
    return received, spans[0], spans[1]


async def test_spans_have_the_recorded_attributes_and_resource() -> None:
    received, p, d = await spans_of()
    resource, scope, real = recorded_request()
    assert [each.key for each in d.attributes] == [each.key for each in real.attributes]
    kinds = [each.value.WhichOneof("value") for each in d.attributes]
    assert kinds == [each.value.WhichOneof("value") for each in real.attributes]
    mine = received.requests[0].resource_spans[0]
    assert {each.key for each in mine.resource.attributes} == {each.key for each in resource.attributes}
    assert mine.scope_spans[0].scope == scope
    assert (d.name, d.kind, d.flags, d.status) == (real.name, real.kind, real.flags, real.status)
    for span in (p, d):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert attributes(span)["gen_ai.request.id"] == "cmpl-t-1-0"
        assert not span.events
        assert not span.links


async def test_a_clock_that_runs_too_fast_shows_longer_durations() -> None:
    # 10 %, both clocks from one moment on: otherwise the spans' order would depend on when the engines started
    drifting = {"faults": (parse("clock_drift:*:100000", SMALL.hosts()),), "began_unix_ns": time.time_ns()}
    _, _, d = await spans_of(engines=drifting)
    named = {key.rpartition(".")[2]: value for key, value in attributes(d).items()}
    assert named["time_in_model_decode"] >= 1.1 * 11 * 0.001  # eleven steps of a millisecond


async def test_decode_queue_time_holds_the_whole_kv_wait() -> None:
    _, _, d = await spans_of(engines={"profile": replace(FAST, handshake_ns=100_000_000)})
    named = {key.rpartition(".")[2]: value for key, value in attributes(d).items()}
    assert named["time_in_queue"] > 0.1 + 5 * FAST.transfer_per_token_ns / 1e9
    parts = named["time_in_queue"] + named["time_in_model_prefill"] + named["time_in_model_decode"]
    assert parts <= named["e2e"] + 1e-6  # they follow each other; the answer's end comes after the last
    assert named["completion_tokens"] == 12


FAILED = [json.loads(line) for line in (RECORDINGS / "otlp_failed_loads.jsonl").read_text().splitlines()]


def never_scheduled(fields: dict[str, Any]) -> bool:
    """Tell whether vLLM 0.32 reports a request that was never scheduled.

    It does so for a request whose load failed. Its scheduled timestamp is 0. So its queue time lasts from the machine's start
    back to when it was queued, and its prefill time from then to its end.
    """
    named = {key.rpartition(".")[2]: value for key, value in fields.items()}
    both = named["time_in_queue"] + named["time_in_model_prefill"]  # from queued to the end
    return (
        named["time_in_queue"] < -1
        and -1e-6 <= both <= named["e2e"] + 1e-6  # the difference of two uptimes, as floats
        and named["e2e"] == pytest.approx(named["time_to_first_token"], abs=0.001)
        and named["time_in_model_inference"] == named["time_in_model_prefill"]
        and (named["completion_tokens"], named["time_in_model_decode"]) == (0, 0.0)
    )


@pytest.mark.parametrize("recorded", FAILED, ids=lambda span: str(span["attributes"]["gen_ai.request.id"]))
def test_vllms_spans_of_failed_loads_are_of_this_form(recorded: dict[str, Any]) -> None:
    assert never_scheduled(recorded["attributes"])
    assert recorded["status"]["code"] == 0


async def test_a_failed_request_has_the_span_of_one_that_was_never_scheduled_without_a_status() -> None:
    _, _, d = await spans_of(remote_request_id="nobody")
    assert d.status.code == 0
    assert never_scheduled(attributes(d))


@pytest.mark.parametrize(
    ("fault", "ahead_s"), [("clock_offset:d0:-2", -2.0), ("clock_drift:d0:100000", 0.1 * 3600)], ids=["offset", "drift"]
)
async def test_a_wrong_clock_stamps_the_spans_of_its_host_alone(fault: str, ahead_s: float) -> None:
    wrong = {"faults": (parse(fault, SMALL.hosts()),), "began_unix_ns": (before_ns := time.time_ns()) - 3_600_000_000_000}
    _, p, d = await spans_of(engines=wrong)
    after_ns = time.time_ns()
    by_host = {attributes(span)["gen_ai.usage.completion_tokens"]: span for span in (p, d)}  # one at P, twelve at D
    assert before_ns <= by_host[1].start_time_unix_nano <= by_host[1].end_time_unix_nano <= after_ns
    ahead_ns, grown_ns = round(ahead_s * 1e9), (after_ns - before_ns) // 10  # the drift's part of this test's own time
    assert before_ns + ahead_ns <= by_host[12].start_time_unix_nano <= after_ns + ahead_ns + grown_ns


async def test_an_unsampled_request_makes_no_span() -> None:
    received = Received()
    async with (
        serving(received.app()) as collector,
        engine("both", otlp_endpoint=collector + "/v1/traces", otlp_protocol="http") as (_, url),
    ):
        await ask(url, chat=False, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await ask(url, chat=False, request_id="sampled")
    assert [attributes(span)["gen_ai.request.id"] for span in received.spans()] == ["cmpl-sampled-0"]
