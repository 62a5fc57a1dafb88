"""The request and response bodies of vLLM 0.32's OpenAI-compatible server.

Shapes are from recordings of it (tests/data/recordings). Pure functions: a request body in, an ``Ask`` out; tokens in, JSON out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handrail_sim.emulator.text import prefix_blocks, tokenize

Json = dict[str, Any]

MAX_CHOICES = 64  # prompts times n of one request
_TEMPLATE_TOKENS = 4  # tokens that a chat template adds to each message


class InvalidRequestError(ValueError):
    """The request is invalid: answer with ``status`` and vLLM's error body."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    ``text`` only serves to draw answers. A prompt of token ids becomes their decimal numbers.
    """

    text: str
    tokens: int
    blocks: tuple[int, ...]  # ids of its leading blocks, for prefix caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One completion or chat request. ``kv``: its ``kv_transfer_params`` as sent."""

    chat: bool
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    temperature: float
    top_p: float
    kv: Json | None


def parse(chat: bool, body: object, *, served: str, max_model_len: int) -> Ask:
    """Parse a request body. Raises ``BadRequestError`` with vLLM's wording."""
    if not isinstance(body, dict):
        raise InvalidRequestError(
            "[{'type': 'model_attributes_type', 'loc': ('body',), 'msg': 'Input should be a valid dictionary'}]"
        )
    model = body.get("model")
    if model is not None and model != served:
        raise InvalidRequestError(f"The model `{model}` does not exist.", status=404, kind="NotFoundError", param="model")
    prompts = _chat_prompt(body) if chat else _prompts(body)
    longest = max(prompt.tokens for prompt in prompts)
    room = max_model_len - longest
    limit = (
        _integer(body, "max_completion_tokens")
        if chat and body.get("max_completion_tokens") is not None
        else _integer(body, "max_tokens")
    )
    max_tokens = limit if limit is not None else (room if chat else 16)
    if max_tokens < 1 and limit is not None:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if room < 1 or max_tokens > room:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {limit or 0} output tokens "
            f"and your prompt contains {longest} input tokens. Please reduce the length of the input prompt or the number of "
            "requested tokens.",
            param="input_tokens",
        )
    n = _integer(body, "n") or 1
    if n < 1 or n * len(prompts) > MAX_CHOICES:
        raise InvalidRequestError(f"n must be between 1 and {MAX_CHOICES // len(prompts)}, got {n}.", param="n")
    kv = body.get("kv_transfer_params")
    if kv is not None and not isinstance(kv, dict):
        raise InvalidRequestError("kv_transfer_params: Input should be a valid dictionary", param="kv_transfer_params")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InvalidRequestError("stream_options: Input should be a valid dictionary", param="stream_options")
    if options and not body.get("stream"):
        raise InvalidRequestError("Stream options can only be defined when `stream=True`.", param="stream_options")
    return Ask(
        chat=chat,
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        min_tokens=_integer(body, "min_tokens") or 0,
        ignore_eos=bool(body.get("ignore_eos")),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        temperature=_number(body, "temperature", 1.0),
        top_p=_number(body, "top_p", 1.0),
        kv=kv,
    )


def _integer(body: Mapping[str, object], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{key}: Input should be a valid integer", param=key)
    return value


def _number(body: Mapping[str, object], key: str, default: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{key}: Input should be a valid number", param=key)
    return float(value)


def _prompts(body: Mapping[str, object]) -> tuple[Prompt, ...]:
    given = body.get("prompt")
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    items = given if isinstance(given, list) and several else [given]
    prompts = tuple(_prompt(item) for item in items)
    if len(prompts) > MAX_CHOICES:
        raise InvalidRequestError(f"at most {MAX_CHOICES} prompts", param="prompt")
    return prompts


def _prompt(item: object) -> Prompt:
    if isinstance(item, str):
        if not item:
            raise InvalidRequestError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        return Prompt(item, *tokenize(item))
    if isinstance(item, list) and item and all(isinstance(token, int) for token in item):
        return Prompt(" ".join(map(str, item)), len(item), prefix_blocks(item))
    raise InvalidRequestError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")


def _chat_prompt(body: Mapping[str, object]) -> tuple[Prompt, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages: Input should be a valid list", param="messages")
    parts: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequestError("messages: each needs a role", param="messages")
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        parts.append(f"{message['role']}: {content}")
    text = "\n".join(parts)
    tokens, blocks = tokenize(text)
    return (Prompt(text, tokens + _TEMPLATE_TOKENS * len(messages), blocks),)


def usage(prompt_tokens: int, made: int) -> Json:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + made, "completion_tokens": made}


def error_body(message: str, kind: str, code: int, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


INTERNAL_ERROR = error_body("Internal server error", "InternalServerError", 500)


def compact(body: Json) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def event(body: Json) -> bytes:
    return b"data: " + compact(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
# vLLM writes this one event with json.dumps' default separators
ERROR_EVENT = b"data: " + json.dumps(INTERNAL_ERROR).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class ResponseFrame:
    """The fields that all events and bodies of one response share."""

    chat: bool
    id: str  # cmpl-... or chatcmpl-...
    created: int
    model: str
    fingerprint: str

    def _event(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def role_event(self, index: int) -> Json:
        """Build the event that a chat stream sends before the first token."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return {**self._event([choice]), "prompt_token_ids": None, "prompt_text": None}

    def token_event(self, index: int, text: str, finish: str | None, counts: Json | None, *, final: bool) -> Json:
        """Build the event of new tokens.

        ``counts``: usage so far, where the request asked for it with every event. ``final``: no usage event will follow.
        """
        if self.chat:
            choice: Json = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
            if finish:
                choice["stop_reason"] = None
            choice["token_ids"] = None
        else:
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
            choice |= {"prompt_token_ids": None, "token_ids": None}
        body = self._event([choice])
        if counts:
            body["usage"] = counts
        if final:
            body["system_fingerprint"] = self.fingerprint
        return body

    def usage_event(self, counts: Json) -> Json:
        return {**self._event([]), "usage": counts, "system_fingerprint": self.fingerprint}

    def whole(self, texts: list[tuple[str, str]], counts: Json, kv: Json | None) -> Json:
        """Build a response that is not streamed.

        ``texts``: (text, finish reason) by choice index.
        """
        choices: list[Json] = []
        for index, (text, finish) in enumerate(texts):
            choice: Json = {"index": index}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
                choice["message"] |= {"function_call": None, "tool_calls": [], "reasoning": None}
            else:
                choice["text"] = text
            choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": None}
            if not self.chat:
                choice |= {"prompt_logprobs": None, "prompt_token_ids": None}
            choices.append(choice | {"routed_experts": None})
        body = self._event(choices)
        body["object"] = "chat.completion" if self.chat else "text_completion"
        body |= {"service_tier": None, "system_fingerprint": self.fingerprint}
        body["usage"] = counts | {"prompt_tokens_details": None, "completion_tokens_details": None}
        if self.chat:
            body |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return body | {"kv_transfer_params": kv, "ec_transfer_params": None}
