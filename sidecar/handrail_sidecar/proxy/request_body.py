"""Read the parameters of a request from its JSON body as it streams through.

The body is one of the OpenAI, Responses or Anthropic API. Only the fields named in ``RequestFacts`` are decoded. The decoder
skips prompts and messages; they never become Python strings. ``/v1/completions`` prompts are counted in their raw JSON.
Field names: the vLLM 0.32 protocol classes; ``kv_transfer_params`` as measured on a real pair (DESIGN section 4 and the
recordings under ``tests/data``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from handrail.records import KvParams
from handrail_sidecar.proxy.json_access import loaded, name, of_type, token_count, whole_number
from handrail_sidecar.proxy.truncated_json import head_members, tail_members

TAIL_BYTES: Final = 256 * 1024  # room for the block list of a prompt of half a million tokens

_OPERATIONS: Final = (
    ("/v1/chat/completions", "chat"),
    ("/v1/completions", "text_completion"),
    ("/v1/responses", "responses"),
    ("/v1/messages", "messages"),
)
_ABSENT: Final = msgspec.Raw(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Parameters of a request; None: not in the part that was read.

    Defaults of the API are filled in only when the whole body was read.
    """

    operation: str | None = None  # chat | text_completion | responses | messages
    model: str | None = None
    stream_requested: bool | None = None
    choices: int | None = None  # n x number of prompts
    include_usage: bool | None = None
    continuous_usage: bool | None = None
    max_tokens: int | None = None
    kv: KvParams | None = None
    inspected: str = "none"  # whole | partial | none


class _Fields(msgspec.Struct, gc=False):
    """The wanted members, each still raw JSON.

    One odd value does not cost the others, and no prompt is built.
    """

    model: msgspec.Raw = _ABSENT
    stream: msgspec.Raw = _ABSENT
    stream_options: msgspec.Raw = _ABSENT
    n: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    max_tokens: msgspec.Raw = _ABSENT
    max_completion_tokens: msgspec.Raw = _ABSENT
    max_output_tokens: msgspec.Raw = _ABSENT
    kv_transfer_params: msgspec.Raw = _ABSENT
    bootstrap_host: msgspec.Raw = _ABSENT
    bootstrap_port: msgspec.Raw = _ABSENT
    bootstrap_room: msgspec.Raw = _ABSENT


_WANTED: Final = {name.encode(): name for name in _Fields.__struct_fields__}
_DECODE_WHOLE: Final = msgspec.json.Decoder(_Fields).decode
_DECODE_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


def operation_of(path: str) -> str | None:
    """The API that a request path belongs to; None for any other path.

    Any prefix that a gateway put before it is ignored.
    """
    bare = path.partition("?")[0]
    return next((name for suffix, name in _OPERATIONS if bare.endswith(suffix)), None)


class RequestInspector:
    """Read every piece of one request body.

    It holds at most ``cap_bytes`` of its beginning and ``TAIL_BYTES`` of its end.
    ``content_length`` is the header's value, None when the body is chunked. Nothing is held for bodies that cannot be read
    (another path, not JSON, compressed).
    """

    def __init__(
        self,
        path: str,
        content_type: str | None,
        content_length: int | None,
        content_encoding: str | None = None,
        cap_bytes: int = 1 << 20,
    ) -> None:
        self._operation = operation_of(path)
        plain = not content_encoding or content_encoding.strip().lower() == "identity"
        json = content_type is None or "json" in content_type.lower()
        self._readable = self._operation is not None and plain and json
        self._length = content_length
        self._cap = cap_bytes
        self._seen = 0
        self._head = bytearray()
        self._tail: list[bytes] = []
        self._tail_bytes = 0

    def feed(self, data: bytes) -> None:
        """Read the next piece; copy only the part of it that is kept."""
        if not self._readable:
            return
        self._seen += len(data)
        room = self._cap - len(self._head)
        if room > 0:
            self._head += data if len(data) <= room else data[:room]
            data = data[room:]
        if data:
            self._keep_tail(data)

    def skip(self, size: int) -> None:
        """Note that a piece passed unread.

        The bytes fed so far are the beginning; those that follow are not their continuation.
        """
        self._seen += size
        self._cap = len(self._head)

    def _keep_tail(self, data: bytes) -> None:
        if len(data) >= TAIL_BYTES:
            self._tail, self._tail_bytes = [data[-TAIL_BYTES:]], TAIL_BYTES
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        if self._tail_bytes > 2 * TAIL_BYTES or len(self._tail) > 1024:
            self._tail = [b"".join(self._tail)[-TAIL_BYTES:]]
            self._tail_bytes = len(self._tail[0])

    def facts(self, *, ended: bool = True) -> RequestFacts:
        """Return what is known.

        ``ended``: the last piece was fed. Only then are the last bytes fed the end of the body.
        """
        if not self._readable or self._seen == 0:
            return RequestFacts(operation=self._operation)
        ended = ended and (self._length is None or self._seen >= self._length)
        if ended and self._seen <= self._cap:
            try:
                return self._facts(_DECODE_WHOLE(self._head), whole=True)
            except (msgspec.DecodeError, RecursionError):
                return RequestFacts(operation=self._operation)
        return self._facts(self._cut_fields(ended), whole=False)

    def _cut_fields(self, ended: bool) -> _Fields:
        head = bytes(self._head)
        members, cut = head_members(head)
        if cut is not None and cut[0] == b"prompt" and cut[1][:1] == b'"':
            members[b"prompt"] = b'""'  # one string, complete or not
        if ended:
            kept = b"".join(self._tail)
            gapless = self._seen == len(head) + len(kept)
            members.update(tail_members((head + kept if gapless else kept)[-TAIL_BYTES:]))
        return _Fields(**{_WANTED[key]: msgspec.Raw(value) for key, value in members.items() if key in _WANTED})

    def _facts(self, fields: _Fields, *, whole: bool) -> RequestFacts:
        options = of_type(_value(fields.stream_options), dict) or {}
        stream = of_type(_value(fields.stream), bool)
        reported = whole or bool(fields.stream_options)
        limits = (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens)
        return RequestFacts(
            operation=self._operation,
            model=name(_value(fields.model)),
            stream_requested=False if stream is None and whole and not _spoken(fields.stream) else stream,
            choices=self._choices(fields, whole=whole),
            include_usage=_flag(options, "include_usage", reported),
            continuous_usage=_flag(options, "continuous_usage_stats", reported),
            max_tokens=next((limit for limit in (token_count(_value(limit)) for limit in limits) if limit is not None), None),
            kv=_kv(fields),
            inspected="whole" if whole else "partial",
        )

    def _choices(self, fields: _Fields, *, whole: bool) -> int | None:
        if self._operation in ("responses", "messages"):
            return 1
        query = token_count(_value(fields.n))
        if query is None and whole and not _spoken(fields.n):
            query = 1
        prompts = 1 if self._operation == "chat" else _prompts(fields.prompt)
        return query * prompts if query and prompts else None


def kv_params(found: object) -> KvParams | None:
    """Read a ``kv_transfer_params`` or SGLang's ``bootstrap_*`` members.

    ``kv_transfer_params`` comes decoded (vLLM NIXL, Mooncake). The ``bootstrap_*`` members come in an object.
    A value of the wrong type is None; the result is None when nothing of it is known. ``remote_block_ids`` is a list per KV-cache
    group or one flat list; only the total is kept.
    """
    if not isinstance(found, Mapping):
        return None
    params = KvParams(
        do_remote_prefill=of_type(found.get("do_remote_prefill"), bool),
        do_remote_decode=of_type(found.get("do_remote_decode"), bool),
        remote_engine_id=name(found.get("remote_engine_id")),
        remote_request_id=name(found.get("remote_request_id")),
        remote_host=name(found.get("remote_host", found.get("bootstrap_host"))),
        remote_port=whole_number(found.get("remote_port", found.get("bootstrap_port"))),
        remote_blocks=_blocks(found.get("remote_block_ids")),
        remote_num_tokens=whole_number(found.get("remote_num_tokens")),
        transfer_mode=name(found.get("transfer_mode")),
        transfer_id=_label(found.get("transfer_id")),
        bootstrap_room=_label(found.get("bootstrap_room")),
    )
    return params if params != KvParams() else None


def _label(value: object) -> str | None:
    number = whole_number(value)
    return str(number) if number is not None else name(value)


def _blocks(found: object) -> int | None:
    if not isinstance(found, list):
        return None
    total = 0
    for item in found:
        if isinstance(item, list):
            total += len(item)
        elif whole_number(item) is not None:
            total += 1
        else:
            return None
    return total


def _kv(fields: _Fields) -> KvParams | None:
    params = of_type(_value(fields.kv_transfer_params), dict)
    known = kv_params(params)
    if known is not None:
        return known
    room, host, port = (_value(raw) for raw in (fields.bootstrap_room, fields.bootstrap_host, fields.bootstrap_port))
    if room is None:
        return None
    return kv_params({"bootstrap_room": room, "bootstrap_host": host, "bootstrap_port": port})


def _prompts(raw: msgspec.Raw) -> int | None:
    """Count the prompts in a /v1/completions body.

    A string or a list of token ids is one prompt; a list of strings or of lists holds as many as its length.
    """
    lead = bytes(memoryview(raw)[:64])
    if lead[:1] == b'"':
        return 1
    if lead[:1] != b"[":
        return None
    if lead[1:].lstrip(b" \t\r\n")[:1].isdigit():
        return 1
    try:
        return len(_DECODE_ITEMS(raw)) or None
    except (msgspec.DecodeError, RecursionError):
        return None


def _value(raw: msgspec.Raw) -> Any:
    """The member's value; None for an absent, malformed or null one."""
    try:
        return loaded(raw) if raw else None
    except ValueError:
        return None


def _spoken(raw: msgspec.Raw) -> bool:
    """Whether the member is there and not null.

    A null takes the default like an absent member.
    """
    return bytes(raw) not in (b"", b"null")


def _flag(options: dict[Any, Any], key: str, reported: bool) -> bool | None:
    value = options.get(key)
    if value is None:
        return False if reported else None
    return value if isinstance(value, bool) else None
