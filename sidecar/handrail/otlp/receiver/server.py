"""OTLP receiver: gRPC and HTTP, three signals, one consumer.

The sidecar's tap and the collector use it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc.aio as grpc_aio
from grpc import (
    ServerCertificateConfiguration,
    ServerCredentials,
    dynamic_ssl_server_credentials,
    ssl_server_certificate_configuration,
)

from handrail.config.types import Address as Place
from handrail.otlp.decode import MAX_BODY_BYTES
from handrail.otlp.receiver import grpc_receiver
from handrail.otlp.receiver.grpc_front import DESCRIPTORS, GrpcFront
from handrail.otlp.receiver.http_receiver import HttpReceiver
from handrail.otlp.receiver.intake import Intake, IntakeStats
from handrail.otlp.signals import Consumer
from handrail.runtime.connections import Gate, own_gate
from handrail.runtime.http_server import HttpServer
from handrail.security.tls import ServerTls, TlsMaterial
from handrail.security.tokens import Authenticator

_LOG = logging.getLogger(__name__)
Address = tuple[str, int]
DEFAULT_IN_FLIGHT_BYTES: Final = 256 << 20
DEFAULT_RETRY_DELAY_S: Final = 1.0
_LAST_WORDS_S: Final = 1.0  # for answers still being written, and for the rest of a body that was refused
_STREAMS_PER_CONNECTION: Final = 64  # further calls wait at the sender: HTTP/2 flow control, not an error


class OtlpServer:
    """Receive OTLP; acknowledge a request after ``consumer.consume`` has returned.

    ``grpc``, ``http``: (host, port) to bind, port 0 for a free one, None for off. ``max_body_bytes`` bounds one request, before
    and after decompression; ``max_in_flight_bytes`` bounds all requests at once. A request over it is refused for now, with a
    delay. ``loopback_only`` refuses any other address with ``ValueError``. ``grpc_tls``, ``http_tls``: None for plaintext; their
    files may change while it runs. ``grpc_guard``, ``http_guard``: authenticators of the senders. ``grpc_gate``, ``http_gate``:
    bounds on connections. ``start`` raises ``OSError`` when an address cannot be bound.
    ``shutdown`` refuses new requests and gives running ones ``drain_s``; it works without ``start`` and twice.
    """

    def __init__(
        self,
        consumer: Consumer,
        *,
        grpc: Address | None = None,
        http: Address | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_in_flight_bytes: int = DEFAULT_IN_FLIGHT_BYTES,
        retry_delay_s: float = DEFAULT_RETRY_DELAY_S,
        read_timeout_s: float = 30.0,
        loopback_only: bool,
        grpc_tls: ServerTls | None = None,
        http_tls: ServerTls | None = None,
        grpc_guard: Authenticator | None = None,
        http_guard: Authenticator | None = None,
        grpc_gate: Gate | None = None,
        http_gate: Gate | None = None,
    ) -> None:
        if grpc is None and http is None:
            raise ValueError("an OTLP receiver needs at least one of grpc and http, e.g. grpc=('127.0.0.1', 4317)")
        if loopback_only:
            for name, address in (("grpc", grpc), ("http", http)):
                if address is not None and not Place(*address).loopback:
                    raise ValueError(
                        f"{name} address {address[0]!r}: must be a loopback address, since everyone who "
                        "reaches this port can add "
                        "evidence; valid: 127.0.0.1, ::1, localhost"
                    )
        self._wanted_grpc, self._wanted_http = grpc, http
        self._grpc_tls, self._http_tls = grpc_tls, http_tls
        self._grpc_guard, self._http_guard = grpc_guard or Authenticator("otlp_grpc"), http_guard or Authenticator("otlp_http")
        self.grpc_gate = grpc_gate or own_gate("otlp_grpc", descriptors=DESCRIPTORS)
        self.http_gate = http_gate or own_gate("otlp_http")
        self._credentials: ServerCredentials | None = None
        self._max_body_bytes = max_body_bytes
        self._consumer = consumer
        self._limits = {"max_body_bytes": max_body_bytes, "max_in_flight_bytes": max_in_flight_bytes}
        self._retry_delay_s = retry_delay_s
        self._read_timeout_s = read_timeout_s
        self._intake: Intake | None = None
        self._grpc: grpc_aio.Server | None = None
        self._front: GrpcFront | None = None
        self._http: HttpServer | None = None
        self.grpc_address: Address | None = None
        self.http_address: Address | None = None

    @property
    def stats(self) -> IntakeStats:
        """Counters; all zero before ``start``."""
        return self._intake.stats if self._intake is not None else IntakeStats()

    @property
    def in_flight_bytes(self) -> int:
        return self._intake.in_flight_bytes if self._intake is not None else 0

    async def start(self) -> None:
        self._intake = Intake(self._consumer, **self._limits, retry_delay_s=self._retry_delay_s)
        try:
            if self._wanted_http is not None:
                self.http_address = await self._start_http(self._intake, self._wanted_http)
            if self._wanted_grpc is not None:
                self.grpc_address = await self._start_grpc(self._intake, self._wanted_grpc)
        except BaseException:
            await self.shutdown(0.0)
            raise

    async def shutdown(self, drain_s: float = 5.0) -> None:
        if self._intake is not None:
            self._intake.stopping = True
        server, self._grpc = self._grpc, None
        front, self._front = self._front, None
        http, self._http = self._http, None
        stops = []
        if front is not None:
            stops.append(_stop_grpc(front, server, drain_s))
        if http is not None:
            stops.append(self._stop_http(http, drain_s))
        await asyncio.gather(*stops)

    async def _stop_http(self, http: HttpServer, drain_s: float) -> None:
        http.stop_accepting()
        if self._intake is not None:
            await self._intake.drained(drain_s)
        await http.shutdown()

    async def _start_http(self, intake: Intake, wanted: Address) -> Address:
        receiver = HttpReceiver(intake, self._http_guard, read_timeout_s=self._read_timeout_s)
        # auto_decompress off: ours bounds the result.
        self._http = HttpServer(
            receiver.application(),
            *wanted,
            self.http_gate,
            tls=None if self._http_tls is None else self._http_tls.context(),
            logger=_LOG,
            auto_decompress=False,
            shutdown_timeout=_LAST_WORDS_S,
            lingering_time=_LAST_WORDS_S,
        )
        await self._http.start()
        return self._http.address

    async def _start_grpc(self, intake: Intake, wanted: Address) -> Address:
        bounds = self.grpc_gate.bounds
        server = grpc_aio.server(
            options=[
                ("grpc.max_receive_message_length", self._max_body_bytes),  # holds after decompression too (measured, 1.85)
                ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
                ("grpc.server_handshake_timeout_ms", int(1000 * (bounds.handshake_s + bounds.head_s))),  # up to HTTP/2's settings
                ("grpc.max_connection_idle_ms", int(1000 * bounds.idle_s)),
                ("grpc.max_allowed_incoming_connections", bounds.listener),  # of the path around the front
            ],
            interceptors=[] if self._grpc_guard.open else [grpc_receiver.AuthInterceptor(self._grpc_guard)],
        )
        server.add_generic_rpc_handlers(grpc_receiver.handlers(intake))
        self._front = front = GrpcFront(self.grpc_gate, tls=self._grpc_tls is not None)
        try:
            if self._grpc_tls is None:
                server.add_insecure_port(front.target)
            else:
                self._credentials = _credentials(self._grpc_tls)  # kept: gRPC calls into it at every handshake
                server.add_secure_port(front.target, self._credentials)
        except RuntimeError as error:
            raise OSError(f"OTLP/gRPC cannot listen for {wanted[0]}:{wanted[1]}: {error}") from None
        await server.start()
        self._grpc = server
        return front.acceptor.start(*wanted)


async def _stop_grpc(front: GrpcFront, server: grpc_aio.Server | None, drain_s: float) -> None:
    front.acceptor.close()
    if server is not None:
        await server.stop(drain_s)
    await front.settled()
    front.close()


def _credentials(tls: ServerTls) -> ServerCredentials:
    """Credentials that read the certificate from the files at each handshake."""
    given = tls.identity.value

    def newest() -> ServerCertificateConfiguration | None:  # in a thread of gRPC's
        nonlocal given
        identity = tls.identity.value
        if identity is given:
            return None
        given = identity
        return _configuration(identity)

    # The stubs do not allow None, which means no change.
    return dynamic_ssl_server_credentials(_configuration(given), newest, tls.wants_clients)  # type: ignore[arg-type]


def _configuration(identity: TlsMaterial) -> ServerCertificateConfiguration:
    assert identity.key is not None
    assert identity.cert is not None
    return ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.authorities)
