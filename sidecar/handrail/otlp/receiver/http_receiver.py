"""OTLP/HTTP receiver: POST /v1/{traces,metrics,logs}, protobuf or JSON.

Source: OTLP specification 1.x, "OTLP/HTTP".
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Final

import grpc
from aiohttp import web

from handrail.otlp.decode import JSON, PROTOBUF, media_type
from handrail.otlp.messages import SHAPES
from handrail.otlp.receiver.intake import Intake, Reservation
from handrail.otlp.responses import clip, status_bytes
from handrail.otlp.signals import Accepted, ReceiverUnavailable, Rejected, Retryable, Signal, TooLarge, TooSlow, Unsupported
from handrail.security.tokens import AUTHORIZATION, Authenticator

_PATHS: Final = {f"/v1/{signal.value}": signal for signal in Signal}
_WELCOME: Final = f"OTLP/HTTP receiver: POST {', '.join(_PATHS)} as {PROTOBUF} or {JSON}, gzip or not.\n"
_OK_EMPTY: Final = {PROTOBUF: b"", JSON: b"{}"}
# HTTP status and google.rpc.Code of each kind of refusal, most special first.
_REFUSALS: Final[tuple[tuple[type[Exception], int, grpc.StatusCode], ...]] = (
    (ReceiverUnavailable, 503, grpc.StatusCode.UNAVAILABLE),
    (Retryable, 429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TooLarge, 413, grpc.StatusCode.INVALID_ARGUMENT),
    (Unsupported, 415, grpc.StatusCode.INVALID_ARGUMENT),
    (TooSlow, 408, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Rejected, 400, grpc.StatusCode.INVALID_ARGUMENT),
)


class HttpReceiver:
    """HTTP half of ``OtlpServer``: one aiohttp application over an ``Intake``."""

    def __init__(self, intake: Intake, guard: Authenticator, *, read_timeout_s: float) -> None:
        self._intake = intake
        self._guard = guard
        self._read_timeout_s = read_timeout_s

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/", self._welcome)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _welcome(self, request: web.Request) -> web.Response:
        return web.Response(text=_WELCOME)

    async def _handle(self, request: web.Request) -> web.Response:
        signal = _PATHS.get(request.path)
        if signal is None:
            return _refusal(JSON, 404, grpc.StatusCode.NOT_FOUND, f"not an OTLP path; valid paths: {', '.join(_PATHS)}")
        if request.method != "POST":
            answer = _refusal(JSON, 405, grpc.StatusCode.UNIMPLEMENTED, f"{request.path} accepts only POST")
            answer.headers["Allow"] = "POST"
            return answer
        denied = self._guard.denial(request.headers.getall(AUTHORIZATION, []))
        if denied is not None:
            self._guard.log_denial(denied, request.remote or "?")
            answer = _refusal(JSON, denied.status, grpc.StatusCode.UNAUTHENTICATED, denied.reason)
            answer.headers.update(denied.headers)
            answer.force_close()  # its body is not read
            return answer
        answer_type = JSON  # until the request's own type is known to be one of OTLP's
        try:
            with self._intake.reservation() as reserved:
                answer_type = media_type(request.headers.get("Content-Type", ""))
                body = await self._body(request, reserved)
                encoding = request.headers.get("Content-Encoding", "")
                accepted = await self._intake.take(signal, body, reserved, answer_type, encoding)
        except (Retryable, Rejected) as refusal:
            return _refused(answer_type, refusal)
        return web.Response(body=_success(signal, accepted, answer_type), content_type=answer_type)

    async def _body(self, request: web.Request, reserved: Reservation) -> bytes:
        """Body as sent, still compressed.

        Raises ``TooLarge``, ``Retryable``, ``TooSlow``, ``Rejected``.
        """
        limit = self._intake.max_body_bytes
        announced = request.content_length
        if announced is not None and announced > limit:
            raise TooLarge(f"the body has {announced} bytes; at most {limit} are allowed")
        try:
            return await asyncio.wait_for(_read(request, reserved, limit), self._read_timeout_s)
        except asyncio.TimeoutError:
            raise TooSlow(f"the body did not arrive within {self._read_timeout_s:g} s") from None
        except ConnectionError:
            raise Rejected("the connection was lost before the body was whole") from None
        except web.RequestPayloadError:
            raise Rejected("the body's chunks are malformed") from None


async def _read(request: web.Request, reserved: Reservation, limit: int) -> bytes:
    """Read the body and reserve memory for the bytes that have arrived.

    The announced length does not count: a peer that only announces must not take the budget from the others.
    """
    body = bytearray()  # not a list of parts: chunks of one byte would cost forty times their size
    async for part in request.content.iter_any():
        if len(body) + len(part) > limit:
            raise TooLarge(f"the body has more than {limit} bytes")
        reserved.hold(len(body) + len(part))
        if not body and request.content.at_eof():
            return part  # nearly every request: no copy
        body += part
    return bytes(body)


def _success(signal: Signal, accepted: Accepted, answer_type: str) -> bytes:
    if not accepted.rejected and not accepted.message:
        return _OK_EMPTY[answer_type]
    if answer_type == PROTOBUF:
        return success_message(signal, accepted)
    # int64 is a string in protobuf's JSON.
    partial = {SHAPES[signal].rejected_json: str(accepted.rejected), "errorMessage": clip(accepted.message)}
    return json.dumps({"partialSuccess": partial}).encode()


def success_message(signal: Signal, accepted: Accepted) -> bytes:
    """Encode the ``Export…ServiceResponse``.

    It is empty on full success, as the specification requires.
    """
    if not accepted.rejected and not accepted.message:
        return b""
    shape = SHAPES[signal]
    response = shape.response()
    setattr(response.partial_success, shape.rejected_field, accepted.rejected)
    response.partial_success.error_message = clip(accepted.message)
    encoded: bytes = response.SerializeToString()
    return encoded


def _refused(answer_type: str, refusal: Retryable | Rejected) -> web.Response:
    http_status, code = next((status, code) for kind, status, code in _REFUSALS if isinstance(refusal, kind))
    answer = _refusal(answer_type, http_status, code, refusal.reason)
    if isinstance(refusal, Retryable):
        answer.headers["Retry-After"] = str(max(1, math.ceil(refusal.delay_s)))  # whole seconds; 0 would cause a burst of retries
    if isinstance(refusal, (TooLarge, TooSlow)):
        answer.force_close()  # the rest of the body is still on its way
    return answer


def _refusal(answer_type: str, http_status: int, code: grpc.StatusCode, message: str) -> web.Response:
    number = code.value[0]
    if answer_type == PROTOBUF:
        body = status_bytes(number, message)
    else:
        body = json.dumps({"code": number, "message": clip(message)}).encode()
    return web.Response(status=http_status, body=body, content_type=answer_type)
