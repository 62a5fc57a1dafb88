"""OTLP/gRPC receiver: the three Export services on raw bytes.

Nothing is parsed twice. Source: OTLP specification 1.x, "OTLP/gRPC".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc
import grpc.aio

from handrail.otlp.messages import SHAPES
from handrail.otlp.receiver.grpc_front import sender_of
from handrail.otlp.receiver.http_receiver import success_message
from handrail.otlp.receiver.intake import Intake
from handrail.otlp.responses import DETAILS_KEY, clip, status_bytes
from handrail.otlp.signals import ReceiverUnavailable, Rejected, Retryable, Signal
from handrail.security.tokens import AUTHORIZATION, Authenticator

_Context = grpc.aio.ServicerContext[bytes, bytes]
if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[bytes, bytes]
else:
    _Interceptor = grpc.aio.ServerInterceptor  # generic only in its stubs
_Behaviour = Callable[[bytes, _Context], Awaitable[bytes]]


def handlers(intake: Intake) -> tuple[grpc.GenericRpcHandler[bytes, bytes], ...]:
    """Generic handlers, one per service; request and response stay bytes."""
    return tuple(
        grpc.method_handlers_generic_handler(
            shape.service, {"Export": grpc.unary_unary_rpc_method_handler(_export(intake, signal))}
        )
        for signal, shape in SHAPES.items()
    )


class AuthInterceptor(_Interceptor):
    """Reject unauthorized exports before the message is read.

    The rejecting handler is one of streams, which reads on demand.
    """

    def __init__(self, guard: Authenticator) -> None:
        self._guard = guard

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        given = [str(value) for key, value in handler_call_details.invocation_metadata if key == AUTHORIZATION]
        denied = self._guard.denial(given)
        if denied is None:
            return await continuation(handler_call_details)

        async def turn_away(_messages: Any, context: _Context) -> bytes:
            self._guard.log_denial(denied, _host(context.peer()))
            return await _abort(context, grpc.StatusCode.UNAUTHENTICATED, denied.reason, None)

        return grpc.stream_unary_rpc_method_handler(turn_away)


def _export(intake: Intake, signal: Signal) -> Any:
    running: set[asyncio.Task[bytes]] = set()

    async def work(body: bytes) -> bytes:
        with intake.reservation() as reserved:
            return success_message(signal, await intake.take(signal, body, reserved))

    async def export(body: bytes, context: _Context) -> bytes:
        # A caller's deadline or cancellation cancels this coroutine; it must not cancel the consumer within a half-done write.
        task = asyncio.ensure_future(work(body))
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(_look_at)
        try:
            return await asyncio.shield(task)
        except Retryable as refusal:
            unavailable = isinstance(refusal, ReceiverUnavailable)
            code = grpc.StatusCode.UNAVAILABLE if unavailable else grpc.StatusCode.RESOURCE_EXHAUSTED
            return await _abort(context, code, refusal.reason, refusal.delay_s)
        except Rejected as refusal:
            return await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, refusal.reason, None)

    return export


def _host(peer: str) -> str:
    """Host ``10.0.0.7`` of gRPC's ``ipv4:10.0.0.7:4711``, or of our front's name."""
    return sender_of(peer) or unquote(peer).partition(":")[2].rpartition(":")[0] or peer


def _look_at(task: asyncio.Task[bytes]) -> None:
    """Fetch the result of a task.

    Without it, asyncio reports a refusal that nobody awaits any more as an unhandled exception.
    """
    if not task.cancelled():
        task.exception()


async def _abort(context: _Context, code: grpc.StatusCode, reason: str, delay_s: float | None) -> bytes:
    message = clip(reason)
    details = status_bytes(code.value[0], message, delay_s)
    await context.abort(code, message, trailing_metadata=((DETAILS_KEY, details),))
    raise AssertionError("abort raises")
