"""Send OTLP: one payload, once, over gRPC or HTTP.

``retry.deliver`` retries; ``diagnose`` finds the mistake. Source: OTLP specification 1.x. Environment proxies are not used:
telemetry stays inside the cluster by default.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import grpc
import grpc.aio

from handrail.otlp import diagnose, responses
from handrail.otlp.decode import PROTOBUF, deflate
from handrail.otlp.endpoint import Endpoint, WireProtocol, parse_endpoint
from handrail.otlp.messages import SHAPES
from handrail.otlp.responses import DETAILS_KEY, clip
from handrail.otlp.retry import Backoff, DeliveryStats, RetryingSender, Sender, deliver
from handrail.otlp.security import ClientSecurity
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, AuthFailed, ConnectionClosed, Rejected, Retryable, Signal, Untrusted

__all__ = ["Backoff", "ClientSettings", "DeliveryStats", "OtlpClient", "RetryingSender", "Sender", "deliver"]

_MAX_ANSWER_BYTES = 64 << 10  # an answer is one short message; the rest of a longer one is not read
_OFF_LOOP_BYTES = 64 << 10
_USER_AGENT = "handrail"
_CHECK_S = 5.0
# gRPC reports a failed handshake by these words, in the details of UNAVAILABLE
_CLOSED = ("Socket closed", "Connection reset", "recvmsg", "Broken pipe")  # and a cut connection by these
_NO_TLS = ("Ssl handshake", "SSL_ERROR_SSL", "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")

log = logging.getLogger(__name__)


class OtlpClient:
    """Client of one OTLP endpoint.

    ``send`` may run concurrently; connections are opened on the first use and kept. ``security`` is shared with other clients of
    this peer; by default it is made from the settings. When its files change, the next ``send`` uses new connections.
    Raises ``ValueError`` for settings that cannot be used, ``OSError`` for files that cannot be read.
    """

    def __init__(
        self,
        settings: ClientSettings,
        security: ClientSecurity | None = None,
        *,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        problems = settings.problems()
        if problems:
            raise ValueError("; ".join(problems))
        self.settings = settings
        self.endpoint: Endpoint = parse_endpoint(settings.endpoint, protocol=settings.protocol)
        self.security = security if security is not None else ClientSecurity(self.endpoint, settings)
        self._transport: _Http | _Grpc
        if self.endpoint.protocol is WireProtocol.GRPC:
            self._transport = _Grpc(self.endpoint, settings, self.security)
        else:
            self._transport = _Http(self.endpoint, settings, self.security, now_unix_s)

    async def send(self, signal: Signal, payload: bytes) -> Accepted:
        """Send an encoded ``Export…ServiceRequest`` once.

        Raises ``Retryable`` (delay 0: the peer named none) or ``Rejected``. It logs when an ``AuthFailed`` begins and when it is
        over.
        """
        try:
            accepted = await self._sent(signal, payload)
        except AuthFailed as refusal:
            if self.security.troubled(refusal):
                log.warning(
                    "%s does not accept data (%s); Handrail keeps it and retries: %s",
                    self.endpoint,
                    refusal.reason,
                    self.security.remedy(refusal),
                )
            raise
        if self.security.settled():
            log.info("%s accepts data again", self.endpoint)
        return accepted

    async def _sent(self, signal: Signal, payload: bytes) -> Accepted:
        try:
            return await self._transport.send(signal, payload, self.settings.timeout_s)
        except ConnectionClosed:
            context = self.security.context
            objection = await diagnose.objection(self.endpoint, context) if context is not None else ""
            if not objection:
                raise
            raise Untrusted(f"it seems to require a client certificate, or a different one: {objection}", 0.0) from None

    async def check(self, signal: Signal = Signal.TRACES) -> str | None:
        """Send an empty export; None on success, else one line that names the mistake.

        Takes at most 5 s. The caller reports a failed authentication; ``send`` does not log it again.
        """
        try:
            await asyncio.wait_for(self._transport.send(signal, b"", _CHECK_S / 2), _CHECK_S / 2 + 0.1)
        except (Rejected, Retryable) as refusal:
            if isinstance(refusal, AuthFailed):
                self.security.troubled(refusal)
            reason = refusal.reason
        except asyncio.TimeoutError:
            reason = f"no answer within {_CHECK_S / 2:g} s"
        else:
            return None
        timeout_s = _CHECK_S / 2 - 0.2
        return await diagnose.diagnose(
            self.endpoint, signal, reason, self.security.context, self.settings.names, timeout_s=timeout_s
        )

    async def close(self) -> None:
        """Close the connections.

        Works twice and without a ``send``; a later ``send`` opens them again.
        """
        await self._transport.close()


class _Http:
    def __init__(
        self, endpoint: Endpoint, settings: ClientSettings, security: ClientSecurity, now_unix_s: Callable[[], float]
    ) -> None:
        self._endpoint = endpoint
        self._gzip = settings.compression == "gzip"
        self._headers = {**settings.headers, "Content-Type": PROTOBUF, "User-Agent": _USER_AGENT}
        if self._gzip:
            self._headers["Content-Encoding"] = "gzip"
        self._security = security
        self._now_unix_s = now_unix_s
        self._session: aiohttp.ClientSession | None = None

    async def send(self, signal: Signal, payload: bytes, timeout_s: float) -> Accepted:
        body = payload
        if self._gzip:
            large = len(payload) > _OFF_LOOP_BYTES
            body = await asyncio.to_thread(deflate, payload) if large else deflate(payload)
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession()
        context = self._security.context
        try:
            async with self._session.post(
                self._endpoint.url(signal),
                data=body,
                headers={**self._headers, **self._security.headers},
                ssl=context if context is not None else True,  # connections are kept by context: a new one opens new ones
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                answer = await _start_of(response.content)
                return responses.read_http(signal, response.status, response.headers, answer, self._now_unix_s())
        except asyncio.TimeoutError:
            raise Retryable(f"no answer within {timeout_s:g} s", 0.0) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: aiohttp's complaint about an answer that is no HTTP.
            raise _lost(error) from None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _Grpc:
    _OPTIONS = (
        ("grpc.enable_retries", 0),  # deliver retries: a second layer would multiply attempts
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 5_000),  # how long one attempt to connect may take; 20 s by default
        ("grpc.max_reconnect_backoff_ms", 5_000),  # 120 s by default: a restarted collector would wait that long
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.primary_user_agent", _USER_AGENT),
    )

    def __init__(self, endpoint: Endpoint, settings: ClientSettings, security: ClientSecurity) -> None:
        self._target = endpoint.authority
        self._security = security
        self._credentials: grpc.ChannelCredentials | None = None  # those of the channel
        self._closing: set[asyncio.Task[None]] = set()
        self._compression = grpc.Compression.Gzip if settings.compression == "gzip" else grpc.Compression.NoCompression
        self._metadata = tuple((key.lower(), value) for key, value in settings.headers.items())
        self._channel: grpc.aio.Channel | None = None

    async def send(self, signal: Signal, payload: bytes, timeout_s: float) -> Accepted:
        call = self._open(timeout_s).unary_unary(SHAPES[signal].method, None, None)
        try:
            answer = await call(payload, timeout=timeout_s, metadata=(*self._metadata, *self._security.headers.items()))
        except grpc.aio.AioRpcError as error:
            details = clip(error.details() or "")
            if error.code() is grpc.StatusCode.UNAVAILABLE and any(word in details for word in _NO_TLS):
                raise Untrusted(f"gRPC UNAVAILABLE: {details}"[:300], 0.0) from None
            if error.code() is grpc.StatusCode.UNAVAILABLE and any(word in details for word in _CLOSED):
                raise ConnectionClosed(f"gRPC UNAVAILABLE: {details}"[:300], 0.0) from None
            trailers: Any = error.trailing_metadata()  # pairs; the stubs do not say so
            status = next((bytes(value) for key, value in trailers or () if key == DETAILS_KEY), None)
            raise responses.grpc_refusal(error.code(), error.details() or "", status) from None
        return responses.read_grpc(signal, answer)

    def _open(self, timeout_s: float) -> grpc.aio.Channel:
        credentials = self._security.credentials
        if self._channel is not None and credentials is not self._credentials:
            # Calls that run on the old channel end there.
            old, self._channel = self._channel, None
            closing = asyncio.ensure_future(old.close(timeout_s))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if self._channel is None:
            self._credentials = credentials
            if credentials is None:
                self._channel = grpc.aio.insecure_channel(self._target, self._OPTIONS, self._compression)
            else:
                self._channel = grpc.aio.secure_channel(self._target, credentials, self._OPTIONS, self._compression)
        return self._channel

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
        await asyncio.gather(*self._closing, return_exceptions=True)


async def _start_of(content: aiohttp.StreamReader) -> bytes:
    answer = bytearray()
    while len(answer) < _MAX_ANSWER_BYTES:
        part = await content.read(_MAX_ANSWER_BYTES - len(answer))
        if not part:
            break
        answer += part
    return bytes(answer)


def _lost(error: Exception) -> Retryable:
    """Error for a missing answer: no TLS, a cut connection, or another cause."""
    reason = f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, (aiohttp.ClientSSLError, ssl.SSLError)) or isinstance(error.__cause__, ssl.SSLError):
        return Untrusted(reason, 0.0)
    if isinstance(error, aiohttp.ClientConnectorError):
        return Retryable(reason, 0.0)
    return (ConnectionClosed if isinstance(error, (aiohttp.ServerDisconnectedError, OSError)) else Retryable)(reason, 0.0)
