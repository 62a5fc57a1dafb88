"""Read chunks of ``/v1/chat/completions`` and ``/v1/completions``.

The objects are OpenAI's as vLLM 0.32 sends them. This is the hot path of the proxy: it decodes only the few members that
matter, with types. It looks at generated text and never keeps it. Data that does not fit the types is read once more without
types, so unusual servers cost time and no facts.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from handrail_sidecar.proxy.json_access import items, loaded, mapping, text, token_count
from handrail_sidecar.proxy.response_state import Tally

_DONE: Final = b"[DONE]"


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: Any = None


class _Finish(msgspec.Struct, gc=False):
    """One choice of a whole body, without its text."""

    index: int = 0
    finish_reason: str | None = None


class Completions:
    """Reader for chat and text_completion."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def event(self, event_name: bytes, data: bytes, at_ns: int) -> None:
        tally = self._tally
        try:
            chunk = self._decode(data)
        except (msgspec.DecodeError, RecursionError):
            self._odd(event_name, data, at_ns)
            return
        if tally.model is None:
            tally.named(chunk.id, chunk.model)
        choices = chunk.choices
        usage = chunk.usage
        total: int | None = None
        if usage is not None:
            total = token_count(usage.completion_tokens)
            details = usage.prompt_tokens_details
            cached = token_count(details.cached_tokens) if details is not None else None
            # With one choice in the chunk the count is that choice's running total; otherwise it covers the whole response.
            one = len(choices) == 1
            tally.counts(token_count(usage.prompt_tokens), None if one else total, cached)
            if not one:
                total = None
        for choice in choices:
            ids = choice.token_ids
            self._choice(choice, at_ns, total, None if ids is None else len(ids))
        if chunk.kv_transfer_params is not None:
            tally.handed_over(chunk.kv_transfer_params)
        if chunk.error is not None:
            tally.failed(chunk.error)
        elif not choices and (event_name == b"error" or b'"error"' in data):
            _plain_error(event_name, data, tally)

    def _choice(self, choice: _Choice, at_ns: int, total: int | None, ids: int | None) -> None:
        tally = self._tally
        delta = choice.delta
        reason = choice.finish_reason
        if delta is not None:
            kind = "text" if delta.content else _kind(delta)
            presumed = kind is None and delta.content == "" and delta.role is None and reason is None
        else:
            kind = "text" if choice.text else None
            presumed = kind is None and choice.text == "" and reason is None
        index = choice.index
        tally.chunk(index, at_ns, kind, presumed, total, ids)
        if reason is not None:
            tally.finished(index, reason, at_ns)

    def _odd(self, event_name: bytes, data: bytes, at_ns: int) -> None:
        """Read data that does not fit the types.

        It is the end marker, an error of another shape, or the output of an unusual server.
        """
        tally = self._tally
        stripped = data.strip()
        if stripped == _DONE:
            tally.done = True
            return
        if not stripped.startswith(b"{"):
            return  # no chunk: some servers send data lines only to keep the connection open
        try:
            found = loaded(data)
        except ValueError:
            tally.lost()
            return
        tally.named(found.get("id"), found.get("model"))
        choices = [choice for choice in items(found.get("choices")) if isinstance(choice, dict)]
        usage = mapping(found.get("usage"))
        total = token_count(usage.pop("completion_tokens", None)) if len(choices) == 1 else None
        tally.used(usage)
        for choice in choices:
            ids = choice.get("token_ids")
            self._choice(_tolerant(choice), at_ns, total, len(ids) if isinstance(ids, list) else None)
        tally.handed_over(found.get("kv_transfer_params"))
        if found.get("error") is not None:
            tally.failed(found["error"])
        else:
            _plain_error(event_name, data, tally)

    def body(self, members: dict[str, msgspec.Raw]) -> None:
        tally = self._tally
        for choice in _finishes(members):
            if choice.finish_reason is not None:
                tally.finished(choice.index, choice.finish_reason, None)


def _kind(delta: _Delta) -> str | None:
    """What a delta without text contains."""
    if delta.reasoning or delta.reasoning_content:
        return "reasoning"
    for call in delta.tool_calls or ():
        if call.id or (call.function and (call.function.name or call.function.arguments)):
            return "tool_call"
    if delta.function_call and (delta.function_call.name or delta.function_call.arguments):
        return "tool_call"
    return "refusal" if delta.refusal else None


def _tolerant(found: dict[str, Any]) -> _Choice:
    """Read a choice with unusual types.

    Only the presence of text matters, so content in parts (a list) becomes any text.
    """
    delta = found.get("delta")
    index = found.get("index")
    return _Choice(
        index=index if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < 1 << 31 else 0,
        delta=_tolerant_delta(delta) if isinstance(delta, dict) else None,
        text=text(found.get("text")),
        finish_reason=text(found.get("finish_reason")),
    )


def _tolerant_delta(delta: dict[str, Any]) -> _Delta:
    content = delta.get("content")
    calls = [call for call in items(delta.get("tool_calls")) if isinstance(call, dict)]
    return _Delta(
        role=text(delta.get("role")),
        content="parts" if isinstance(content, list) and content else text(content),
        reasoning=text(delta.get("reasoning")),
        reasoning_content=text(delta.get("reasoning_content")),
        tool_calls=[_ToolCall(id=text(call.get("id")), function=_tolerant_function(call.get("function"))) for call in calls],
        function_call=_tolerant_function(delta.get("function_call")),
        refusal=text(delta.get("refusal")),
    )


def _tolerant_function(found: object) -> _Function:
    function = mapping(found)
    arguments = function.get("arguments")
    return _Function(name=text(function.get("name")), arguments="parts" if isinstance(arguments, dict) else text(arguments))


def _finishes(members: dict[str, msgspec.Raw]) -> list[_Finish]:
    try:
        return msgspec.json.decode(members.get("choices", b"[]"), type=list[_Finish])
    except (msgspec.DecodeError, RecursionError):
        return []


def _plain_error(event_name: bytes, data: bytes, tally: Tally) -> None:
    """Read an error that has no ``error`` member.

    It is an event of that name, or vLLM's older ``{"object": "error", "type": ...}``.
    """
    try:
        found = mapping(loaded(data))
    except ValueError:
        found = {}
    if event_name == b"error" or found.get("object") == "error":
        tally.failed(found)
