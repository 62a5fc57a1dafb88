"""ASGI middleware that observes requests as a proxy in front of the engine would.

Started with ``--middleware handrail.plugin.middleware.Handrail``. It is a pure ASGI class: bytes pass through untouched. Of one
request it hands on a few headers, the beginning and the end of the body, and each part of the response with the time at which the
engine handed it over. The sidecar reads them with the proxy's own reader (``sources/middleware.py``), keeps times, counts and
ids, and discards the text. Nothing is parsed here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from handrail.plugin.events import (
    API,
    HTTP_BODY,
    HTTP_END,
    HTTP_HEAD,
    HTTP_HELD,
    HTTP_PART,
    HTTP_REQUEST,
    MAX_PART_CHARS,
    REQUEST_HEADERS,
)
from handrail.plugin.guard import HookGuard
from handrail.plugin.plugin import recorder
from handrail.plugin.recorder import Recorder

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEAD_BYTES: Final = 64 * 1024  # of a request's body, kept until it is whole
TAIL_BYTES: Final = 64 * 1024
HELD_NS: Final = 5_000_000  # a server that takes a message later than this waits for its client (uvicorn: flow control)
MAX_ANSWER_BYTES: Final = 256 * 1024  # of a response that is no stream; its end is what matters there
_PATHS: Final = ("/completions", "/responses", "/messages")
_numbers = itertools.count(1)


class Handrail:
    """ASGI middleware, inert where the plugin is inert.

    An inert one passes every call straight to the application.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._recorder = recorder()
        self._guard = HookGuard(self._recorder) if self._recorder is not None else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        found, guard = self._recorder, self._guard
        if (
            found is None
            or guard is None
            or scope["type"] != "http"
            or scope["method"] != "POST"
            or not scope["path"].endswith(_PATHS)
        ):
            await self._app(scope, receive, send)
            return
        seen = _ExchangeState(found, scope)

        async def receiving() -> Message:
            message = await receive()
            guard("middleware", seen.received, message)
            return message

        async def sending(message: Message) -> None:
            begin_ns = time.monotonic_ns()
            guard("middleware", seen.sent, message, begin_ns)
            await send(message)
            if time.monotonic_ns() - begin_ns >= HELD_NS:
                guard("middleware", seen.held, begin_ns)

        try:
            await self._app(scope, receiving, sending)
        except BaseException:
            guard("middleware", seen.ended, "failed")
            raise
        guard("middleware", seen.ended, "clean")


class _ExchangeState:
    """One exchange in progress."""

    def __init__(self, recorder: Recorder, scope: Message) -> None:
        self._arrival_ns = time.monotonic_ns()
        self._recorder = recorder
        self._record = recorder.record
        self._scope = scope
        self._number = next(_numbers)
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0
        self._reported = False
        self._whole = False
        self._client_gone = False
        self._streams = False
        self._answered = 0

    def received(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self._client_gone = not self._whole
            return
        body: bytes = message.get("body", b"")
        self._size += len(body)
        room = HEAD_BYTES - len(self._head)
        self._head += body[:room]
        rest = body[room:] if room < len(body) else b""
        if rest:
            self._tail += rest
            del self._tail[:-TAIL_BYTES]
        if not message.get("more_body", False):
            self._tell_request()

    def sent(self, message: Message, at_ns: int) -> None:
        self._tell_request()
        if self._client_gone:  # a message after the client has gone is no answer
            return
        if message["type"] == "http.response.start":
            headers = {bytes(key).lower(): bytes(value).decode("latin-1") for key, value in message.get("headers", ())}
            kind = headers.get(b"content-type")
            self._streams = bool(kind) and str(kind).lower().startswith("text/event-stream")
            self._record((HTTP_HEAD, at_ns, self._number, message["status"], kind, headers.get(b"content-encoding")))
        elif message["type"] == "http.response.body":
            body: bytes = message.get("body", b"")
            self._whole = not message.get("more_body", False)
            if body and (self._streams or self._answered < MAX_ANSWER_BYTES):
                self._answered += len(body)
                self._parts(HTTP_BODY, at_ns, body)

    def held(self, begin_ns: int) -> None:
        """Record that the server took a part, handed over at ``begin_ns``, only now."""
        if self._reported:
            self._record((HTTP_HELD, time.monotonic_ns(), self._number, begin_ns))

    def ended(self, how: str) -> None:
        if self._reported:
            self._record((HTTP_END, time.monotonic_ns(), self._number, "client_gone" if self._client_gone else how))

    def _tell_request(self) -> None:
        """Send the request's event once.

        The moment is when the body is whole, or when the application answers without it.
        """
        if self._reported:
            return
        self._reported = True
        if not self._recorder.running:
            self._recorder.start(API)
        headers: dict[str, list[str]] = {}
        for key, value in self._scope["headers"]:
            if key.lower() in REQUEST_HEADERS:
                headers.setdefault(key.lower().decode(), []).append(value[:512].decode("latin-1"))
        now, scope = time.monotonic_ns(), self._scope
        self._record(
            (HTTP_REQUEST, now, self._number, self._arrival_ns, scope["method"], scope["path"][:512], headers, self._size)
        )
        self._parts(HTTP_PART, now, bytes(self._head), False)
        self._parts(HTTP_PART, now, bytes(self._tail), True)
        self._head.clear()
        self._tail.clear()

    def _parts(self, name: str, at_ns: int, data: bytes, *more: Any) -> None:
        if len(data) <= MAX_PART_CHARS:
            if data:
                self._record((name, at_ns, self._number, data.decode("latin-1"), *more))
            return
        for start in range(0, len(data), MAX_PART_CHARS):
            self._record((name, at_ns, self._number, data[start : start + MAX_PART_CHARS].decode("latin-1"), *more))
