"""OTLP/gRPC: the three Export services on raw bytes, so that nothing is parsed twice.

Source: OTLP specification 1.x, "OTLP/gRPC".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from handrail.otlp.contract import Rejected, Retryable, Signal
from handrail.otlp.http_receiver import success_message
from handrail.otlp.intake import Intake
from handrail.otlp.messages import SHAPES
from handrail.otlp.refusals import Unavailable
from handrail.otlp.status import DETAILS_KEY, clip, status_bytes

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Behaviour = Callable[[bytes, _Context], Awaitable[bytes]]


def handlers(intake: Intake) -> tuple[grpc.GenericRpcHandler[bytes, bytes], ...]:
    """One generic handler a service; request and response stay bytes."""
    return tuple(
        grpc.method_handlers_generic_handler(
            shape.service, {"Export": grpc.unary_unary_rpc_method_handler(_export(intake, signal))}
        )
        for signal, shape in SHAPES.items()
    )


def _export(intake: Intake, signal: Signal) -> Any:
    running: set[asyncio.Task[bytes]] = set()

    async def work(body: bytes) -> bytes:
        with intake.reservation() as reserved:
            return success_message(signal, await intake.take(signal, body, reserved))

    async def export(body: bytes, context: _Context) -> bytes:
        # A caller's deadline or cancellation cancels this coroutine; the consumer must not be torn out of a half-done write.
        task = asyncio.ensure_future(work(body))
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(_look_at)
        try:
            return await asyncio.shield(task)
        except Retryable as refusal:
            unavailable = isinstance(refusal, Unavailable)
            code = grpc.StatusCode.UNAVAILABLE if unavailable else grpc.StatusCode.RESOURCE_EXHAUSTED
            return await _abort(context, code, refusal.reason, refusal.delay_s)
        except Rejected as refusal:
            return await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, refusal.reason, None)

    return export


def _look_at(task: asyncio.Task[bytes]) -> None:
    """Fetch the result, so that a refusal nobody waits for any more is not reported as an unhandled exception."""
    if not task.cancelled():
        task.exception()


async def _abort(context: _Context, code: grpc.StatusCode, reason: str, delay_s: float | None) -> bytes:
    message = clip(reason)
    details = status_bytes(code.value[0], message, delay_s)
    await context.abort(code, message, trailing_metadata=((DETAILS_KEY, details),))
    raise AssertionError("abort raises")
