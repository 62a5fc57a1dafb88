"""Builders of exchanges for tests.

``exchange(...)`` makes one; ``exchanges()`` is a hypothesis strategy.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from hypothesis import strategies as st

from handrail.records import Exchange, Gaps, Hint, KvParams, Outcome, Process, Role, Source, SpanIds
from handrail.stalls import KEPT, Stall, Stalls

PROCESS: Final = Process(
    role=Role.DECODE, instance="10.0.0.2:8200", host="ab" * 16, service="handrail-decode", sender="cd" * 16, host_name="node-2"
)


def exchange(number: int = 0, **changed: Any) -> Exchange:
    """Build a streamed chat request as a decode sidecar sees it.

    ``number`` determines its ids and, slightly, its times.
    """
    values: dict[str, Any] = {
        "process": PROCESS,
        "source": Source.PROXY,
        "ids": SpanIds(trace_id=f"{number + 1:032x}", span_id=f"{number + 1:016x}", parent_span_id="00f067aa0ba902b7", flags=1),
        "arrival_unix_ns": 1_800_000_000_000_000_000 + number * 1_000_000,
        "duration_ns": 412_345_678 + number,
        "outcome": Outcome.OK,
        "path": "/v1/chat/completions",
        "operation": "chat",
        "trace_origin": "inbound",
        "client_parent": "00f067aa0ba902b7",
        "request_id": f"req-{number}",
        "response_id": f"chatcmpl-req-{number}",
        "model": "tiny-llama",
        "choices": 1,
        "stream": True,
        "stream_requested": True,
        "status": 200,
        "forwarded_ns": 310_000,
        "request_done_ns": 350_000,
        "ttfb_ns": 51_000_000,
        "ttft_token_ns": 52_000_000,
        "ttft_text_ns": 52_000_000,
        "ttft_text_kind": "text",
        "last_content_ns": 410_000_000,
        "finish_ns": 411_000_000,
        "first_delivered_ns": 52_100_000,
        "events": 32,
        "gaps": Gaps(
            unit="chunk", count=31, sum_ns=358_000_000, max_ns=31_000_000, max_at_ns=222_000_000, sketch=bytes(range(40))
        ),
        "prompt_tokens": 128,
        "output_tokens": 32,
        "cached_tokens": 16,
        "finish_reasons": ("length",),
        "kv_in": KvParams(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_engine_id="6b0b6d5e-8d1c-4f7f-9c0e-2f3a4b5c6d7e",
            remote_request_id=f"chatcmpl-req-{number}-9f8e7d6c",
            remote_host="10.0.0.1",
            remote_port=5600,
            remote_blocks=8,
        ),
    }
    return Exchange(**{**values, **changed})


_text = st.text(max_size=20)
_number = st.integers(0, 2**53 - 1)
_hex = {size: st.binary(min_size=size, max_size=size).map(bytes.hex) for size in (8, 16)}
_gaps = st.builds(
    Gaps,
    unit=st.sampled_from(["chunk", "token"]),
    count=_number,
    sum_ns=_number,
    max_ns=_number,
    max_at_ns=_number,
    sketch=st.binary(max_size=40),
)


@st.composite
def _stalls(draw: st.DrawFn) -> Stalls:
    made = []
    for _ in range(draw(st.integers(0, KEPT))):
        end = draw(_number)
        made.append(
            Stall(
                end_ns=end,
                gap_ns=draw(st.integers(0, end)),
                median_ns=draw(_number),
                index=draw(_number),
                held_ns=draw(_number),
                turn=draw(_text),
            )
        )
    count = draw(st.integers(max(1, len(made)), 2**53 - 1))
    return Stalls(
        count=count, sum_ns=draw(_number), longest=tuple(made), times=draw(st.binary(max_size=20)), held_ns=draw(_number)
    )


_by_type: Final[dict[str, st.SearchStrategy[Any]]] = {
    "str": _text,
    "str | None": st.none() | _text,
    "int": _number,
    "int | None": st.none() | _number,
    "bool": st.booleans(),
    "bool | None": st.none() | st.booleans(),
    "Gaps | None": st.none() | _gaps,
    "Stalls | None": st.none() | _stalls(),
    "tuple[str, ...]": st.lists(_text, max_size=3).map(tuple),
    "tuple[Hint, ...]": st.lists(st.sampled_from(Hint), max_size=3).map(tuple),
    "Outcome": st.sampled_from(Outcome),
    "Source": st.sampled_from([Source.PROXY, Source.MIDDLEWARE]),
    "SpanIds": st.builds(
        SpanIds, trace_id=_hex[16], span_id=_hex[8], parent_span_id=st.just("") | _hex[8], flags=st.integers(0, 255)
    ),
    "Process": st.builds(
        Process, role=st.sampled_from(Role), instance=_text, host=_text, service=_text, sender=_text, host_name=_text
    ),
}
_by_type["KvParams | None"] = st.none() | st.builds(
    KvParams, **{field.name: _by_type[str(field.type)] for field in fields(KvParams)}
)


def exchanges() -> st.SearchStrategy[Exchange]:
    """Generate any valid exchange.

    A field added to ``Exchange`` takes part by its type, or the strategy fails and names the missing type.
    """
    by_name = {field.name: _by_type[str(field.type)] for field in fields(Exchange)}
    return st.builds(
        Exchange, **{**by_name, "arrival_unix_ns": st.integers(1, 2**62 - 1), "status": st.none() | st.integers(100, 999)}
    )
