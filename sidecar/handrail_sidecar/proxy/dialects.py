"""Read what a response of each API contains.

A dialect reads the data of one event, or one whole JSON body, into a ``Tally``.
responses: the OpenAI Responses events. messages: the Anthropic Messages events. chat and text_completion: ``completions.py``.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from handrail_sidecar.proxy.completions import Completions
from handrail_sidecar.proxy.json_access import loaded, mapping, text
from handrail_sidecar.proxy.response_state import Tally

Members = dict[str, msgspec.Raw]


class Dialect(Protocol):
    """A reader that writes into the tally it was made with.

    ``event`` raises nothing: it counts what cannot be read as lost. ``body`` raises ``ValueError`` when a member is not JSON.
    """

    def event(self, event_name: bytes, data: bytes, at_ns: int) -> None: ...

    def body(self, members: Members) -> None: ...


# --- responses ------------------------------------------------------------------------------------------------------------


class Responses:
    """The Responses API; it ends with an event of its own and sends no ``[DONE]``."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def event(self, event_name: bytes, data: bytes, at_ns: int) -> None:
        tally = self._tally
        found = _object(data, tally)
        if found is None:
            return
        kind = text(found.get("type")) or event_name.decode("ascii", "replace")
        if kind.endswith(".delta"):
            shown = _responses_kind(kind)
            if shown is not None and found.get("delta"):
                tally.chunk(0, at_ns, shown, False, None, None)
        elif kind == "response.output_text.done" and tally.events == 0 and found.get("text"):
            tally.chunk(0, at_ns, "text", False, None, None)  # servers that send no deltas
        elif kind == "error":
            tally.failed(found.get("error") if isinstance(found.get("error"), dict) else found)
        response = found.get("response")
        if isinstance(response, dict):
            self._response(kind, response, at_ns)

    def _response(self, kind: str, response: dict[str, Any], at_ns: int) -> None:
        tally = self._tally
        tally.named(response.get("id"), response.get("model"))
        tally.used(response.get("usage"))
        tally.handed_over(response.get("kv_transfer_params"))
        status = kind.removeprefix("response.")
        if status in ("completed", "failed", "incomplete", "cancelled"):
            self._ended(status, response.get("error"), response.get("incomplete_details"), at_ns)

    def _ended(self, status: str, error: object, details: object, at_ns: int | None) -> None:
        tally = self._tally
        tally.done = True
        if status == "failed":
            tally.finished(0, "error", at_ns)
            tally.failed(_error_with_code_as_type(error))
        elif status == "incomplete":
            tally.incomplete = True
            tally.finished(0, text(mapping(details).get("reason")) or status, at_ns)
        else:
            tally.finished(0, status, at_ns)

    def body(self, members: Members) -> None:
        status = _value(members, "status")
        if status in ("completed", "failed", "incomplete", "cancelled"):
            self._ended(status, _value(members, "error"), _value(members, "incomplete_details"), None)


def _responses_kind(kind: str) -> str | None:
    if "output_text" in kind:
        return "text"
    if "reasoning" in kind:
        return "reasoning"
    if "refusal" in kind:
        return "refusal"
    return "tool_call" if any(word in kind for word in ("arguments", "tool_call", "_call_")) else None


def _error_with_code_as_type(error: object) -> object:
    """Use the code of a Responses error as its type.

    Responses errors have a code and a message but no type; the code is the closest thing to one.
    """
    found = mapping(error)
    return {"type": found.get("type") or found.get("code"), "code": found.get("code")}


# --- messages -------------------------------------------------------------------------------------------------------------

_MESSAGE_DELTAS: Final = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "reasoning"),
    "input_json_delta": ("partial_json", "tool_call"),
}


class Messages:
    """The Anthropic Messages API.

    ``index`` numbers content blocks of the one choice there.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def event(self, event_name: bytes, data: bytes, at_ns: int) -> None:
        tally = self._tally
        found = _object(data, tally)
        if found is None:
            return
        kind = text(found.get("type")) or event_name.decode("ascii", "replace")
        if kind == "content_block_delta":
            delta = mapping(found.get("delta"))
            member, shown = _MESSAGE_DELTAS.get(text(delta.get("type")) or "", ("", ""))
            if shown and delta.get(member):
                tally.chunk(0, at_ns, shown, False, None, None)
        elif kind == "content_block_start":
            block = mapping(found.get("content_block"))
            if block.get("type") == "tool_use" and block.get("name"):
                tally.chunk(0, at_ns, "tool_call", False, None, None)
        elif kind == "message_start":
            message = mapping(found.get("message"))
            tally.named(message.get("id"), message.get("model"))
            tally.used(message.get("usage"))
        elif kind == "message_delta":
            tally.used(found.get("usage"))
            reason = text(mapping(found.get("delta")).get("stop_reason"))
            if reason is not None:
                tally.finished(0, reason, at_ns)
        elif kind == "message_stop":
            tally.done = True
        elif kind == "error":
            tally.failed(found.get("error"))

    def body(self, members: Members) -> None:
        reason = text(_value(members, "stop_reason"))
        if reason is not None:
            self._tally.finished(0, reason, None)


def dialect(operation: str | None, tally: Tally) -> Dialect | None:
    """The reader for an operation's responses; None for an unknown API."""
    if operation in ("chat", "text_completion"):
        return Completions(tally)
    if operation == "responses":
        return Responses(tally)
    return Messages(tally) if operation == "messages" else None


def read_body(data: bytes | bytearray, reader: Dialect | None, tally: Tally, failed: bool) -> None:
    """Read one whole JSON body: of a response that was not streamed, or of an error.

    ``failed``: the status says that it is an error. Text is skipped, not decoded. Raises ``ValueError`` when the body is no JSON
    object.
    """
    try:
        members = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as cause:
        raise ValueError("not a JSON object") from cause
    tally.named(_value(members, "id"), _value(members, "model"))
    tally.used(_value(members, "usage"))
    tally.handed_over(_value(members, "kv_transfer_params"))
    error = _value(members, "error")
    if error is not None:
        tally.failed(error)
    elif failed or _value(members, "object") == "error":
        tally.failed({key: _value(members, key) for key in ("type", "code")})
    if reader is not None:
        reader.body(members)


def _object(data: bytes, tally: Tally) -> dict[str, Any] | None:
    """The event's JSON object; None without one.

    A missing object counts as lost when the event should have one.
    """
    stripped = data.strip()
    if not stripped.startswith(b"{"):
        tally.done = tally.done or stripped == b"[DONE]"
        return None
    try:
        return mapping(loaded(data))
    except ValueError:
        tally.lost()
        return None


def _value(members: Members, key: str) -> Any:
    raw = members.get(key)
    return None if raw is None else loaded(raw)
