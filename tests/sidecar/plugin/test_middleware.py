"""The middleware in front of an application, and the sidecar's exchange.

The sidecar builds the exchange from what the middleware sends.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from builders.exchanges import PROCESS
from handrail.plugin import plugin as plugin_module
from handrail.plugin.events import SOCKET_ENV, datagrams
from handrail.plugin.middleware import HEAD_BYTES, Handrail, Message
from handrail.plugin.recorder import Recorder
from handrail.records import Exchange, Outcome, Source
from handrail_sidecar.plugin_merge.merge import Merge
from handrail_sidecar.sources.datagram import read_packet

MS = 1_000_000
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
App = Callable[[Any, Any, Any], Awaitable[None]]


class Quiet(Recorder):
    """A recorder that starts no thread."""

    def start(self, kind: str) -> None:
        self.kind = kind


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quiet:
    path = str(tmp_path / "nobody.sock")
    monkeypatch.setenv(SOCKET_ENV, path)
    found = Quiet(path)
    installed = plugin_module.Plugin(path)
    installed.recorder = found
    monkeypatch.setattr(plugin_module, "_installed", installed)
    return found


def scope(path: str = "/v1/completions", **headers: str) -> dict[str, Any]:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": path, "headers": given}


def answering(status: int, content_type: str, parts: list[bytes]) -> App:
    async def app(_: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type.encode())]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def run(app: App, request: dict[str, Any], bodies: list[bytes]) -> list[dict[str, Any]]:
    left = [{"type": "http.request", "body": body, "more_body": n + 1 < len(bodies)} for n, body in enumerate(bodies)]
    sent: list[dict[str, Any]] = []

    async def receive() -> Message:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(dict(message))

    await Handrail(app)(request, receive, send)
    return sent


def exchanges(recorder: Recorder) -> list[Exchange]:
    events = [recorder._events.popleft() for _ in range(len(recorder._events))]
    made, lost = datagrams(
        events, boot="b", pid=1, kind="api", sequence=1, monotonic_ns=10**9, unix_ns=1_800_000_000 * 10**9, lost=0
    )
    assert lost == 0
    merge = Merge(PROCESS, exists=lambda _: True, line=lambda *_: None)
    packets = [read_packet(data) for data in made]
    assert all(packet.unread == 0 for packet in packets)
    return [record for packet in packets for record in merge.take(packet) if isinstance(record, Exchange)]


def chunk(text: str, **more: Any) -> bytes:
    body = {"id": "cmpl-lab-1", "model": "tiny", "choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def test_a_client_that_takes_nothing_makes_a_gap_of_its_own(recorder: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    def clock() -> int:
        return now

    monkeypatch.setattr("handrail.plugin.middleware.time.monotonic_ns", clock)

    async def app(_: Any, receive: Any, send: Any) -> None:
        nonlocal now
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(40):
            now += 20 * MS
            await send({"type": "http.response.body", "body": chunk("t"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def slow(message: Message) -> None:
        nonlocal now
        if now == 400 * MS:
            now += 600 * MS

    left = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Message:
        return left.pop(0)

    await Handrail(app)(scope(content_type="application/json"), receive, slow)
    (seen,) = exchanges(recorder)
    assert seen.stalls is not None
    (stall,) = seen.stalls.longest
    assert (stall.gap_ns, stall.held_ns, stall.median_ns) == (620 * MS, 600 * MS, 20 * MS)


async def test_a_stream_is_the_exchange_that_a_proxy_would_have_seen(recorder: Quiet) -> None:
    parts = [chunk("ein"), chunk(" zwei"), chunk("", finish_reason="length"), b"data: [DONE]\n\n"]
    body = {
        "model": "tiny",
        "prompt": "p" * 10,
        "stream": True,
        "kv_transfer_params": {"remote_engine_id": "E", "remote_request_id": "R"},
    }
    request = scope(traceparent=TRACEPARENT, x_request_id="lab-1", content_type="application/json", authorization="Bearer secret")
    sent = await run(answering(200, "text/event-stream; charset=utf-8", parts), request, [json.dumps(body).encode()])
    assert b"".join(m.get("body", b"") for m in sent) == b"".join(parts)
    assert "secret" not in repr(recorder._events)
    (seen,) = exchanges(recorder)
    assert (seen.source, seen.outcome, seen.status, seen.stream, seen.operation) == (
        Source.MIDDLEWARE,
        Outcome.OK,
        200,
        True,
        "text_completion",
    )
    assert (seen.request_id, seen.response_id, seen.model) == ("lab-1", "cmpl-lab-1", "tiny")
    assert (seen.ids.trace_id, seen.ids.parent_span_id, seen.trace_origin) == (TRACEPARENT[3:35], TRACEPARENT[36:52], "inbound")
    assert (seen.events, seen.finish_reasons) == (2, ("length",))
    assert seen.kv_in is not None
    assert seen.kv_in.keys() == ("vllm:E:R",)
    assert seen.gaps is not None
    assert seen.gaps.count == 1
    assert seen.ttft_token_ns is not None
    assert 0 < seen.ttft_token_ns <= seen.duration_ns
    assert (seen.forwarded_ns, seen.first_delivered_ns) == (None, None)


async def test_a_prefill_answer_gives_its_connector_parameters(recorder: Quiet) -> None:
    answer = {
        "id": "cmpl-lab-2",
        "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1},
        "kv_transfer_params": {"remote_engine_id": "E", "remote_request_id": "R", "remote_block_ids": [[1, 2, 3]]},
    }
    await run(
        answering(200, "application/json", [json.dumps(answer).encode()]), scope(x_request_id="lab-2"), [b'{"prompt": "p"}']
    )
    (seen,) = exchanges(recorder)
    assert seen.kv_out is not None
    assert (seen.kv_out.remote_blocks, seen.prompt_tokens, seen.output_tokens) == (3, 5, 1)


async def test_a_long_body_is_known_by_its_ends(recorder: Quiet) -> None:
    end = b'", "kv_transfer_params": {"remote_engine_id": "E", "remote_request_id": "R"}, "stream": true}'
    body = b'{"model": "tiny", "prompt": "' + b"word " * (HEAD_BYTES // 2) + end
    pieces = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]
    await run(answering(200, "application/json", [b"{}"]), scope(), pieces)
    (seen,) = exchanges(recorder)
    assert seen.kv_in is not None
    assert (seen.model, seen.stream_requested, seen.inspected, seen.kv_in.keys()) == ("tiny", True, "partial", ("vllm:E:R",))


async def test_an_error_inside_a_stream_is_recorded(recorder: Quiet) -> None:
    parts = [b'data: {"error": {"message": "m", "type": "InternalServerError", "code": 500}}\n\n', b"data: [DONE]\n\n"]
    await run(answering(200, "text/event-stream", parts), scope(), [b"{}"])
    (seen,) = exchanges(recorder)
    assert (seen.outcome, seen.error_type) == (Outcome.STREAM_ERROR, "InternalServerError")


async def test_an_application_that_raises_is_recorded_and_raises(recorder: Quiet) -> None:
    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await run(app, scope(), [b"{}"])
    (seen,) = exchanges(recorder)
    assert seen.outcome is Outcome.UPSTREAM_DISCONNECT


async def test_a_client_that_leaves_is_recorded(recorder: Quiet) -> None:
    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": chunk("a"), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    await run(app, scope(), [b"{}"])
    (seen,) = exchanges(recorder)
    assert (seen.outcome, seen.events) == (Outcome.CLIENT_DISCONNECT, 1)


async def test_an_answer_to_a_client_that_has_gone_is_none(recorder: Quiet) -> None:
    """vLLM's own handlers return, and the framework sends an empty 200."""

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"null", "more_body": False})

    await run(app, scope(), [b"{}"])
    (seen,) = exchanges(recorder)
    assert (seen.outcome, seen.status) == (Outcome.CLIENT_DISCONNECT, None)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
async def test_other_paths_are_not_looked_at(recorder: Quiet, path: str) -> None:
    await run(answering(200, "application/json", [b"{}"]), scope(path), [b"{}"])
    assert not recorder._events


async def test_a_fault_of_ours_costs_the_record_not_the_request(recorder: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(recorder, "record", lambda event: broken(event) if event[0] != "degraded" else None)
    sent = await run(answering(200, "application/json", [b"{}"]), scope(), [b"{}"])
    assert [m["type"] for m in sent] == ["http.response.start", "http.response.body", "http.response.body"]


async def test_without_the_plugin_it_is_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_ENV, raising=False)
    monkeypatch.setattr(plugin_module, "_installed", None)
    sent = await run(answering(200, "application/json", [b"{}"]), scope(), [b"{}"])
    assert len(sent) == 3
