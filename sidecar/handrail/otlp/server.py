"""The OTLP receiver: gRPC and HTTP, three signals, one consumer. Used by the sidecar's tap and by the collector."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc.aio as grpc_aio
from aiohttp import web
from grpc import (
    ServerCertificateConfiguration,
    ServerCredentials,
    dynamic_ssl_server_credentials,
    ssl_server_certificate_configuration,
)

from handrail.auth import Guard
from handrail.otlp import grpc_receiver
from handrail.otlp.contract import Consumer
from handrail.otlp.decode import MAX_BODY_BYTES
from handrail.otlp.http_receiver import HttpReceiver
from handrail.otlp.intake import Intake, IntakeStats
from handrail.tls import Identity, ServerTls
from handrail.values import Address as Place

Address = tuple[str, int]
DEFAULT_IN_FLIGHT_BYTES: Final = 256 << 20
DEFAULT_RETRY_DELAY_S: Final = 1.0
_LAST_WORDS_S: Final = 1.0  # for answers still being written, and for the rest of a body that was refused
_STREAMS_PER_CONNECTION: Final = 64  # further calls wait at the sender: HTTP/2 flow control, not an error


class OtlpServer:
    """Receives OTLP and acknowledges a request after ``consumer.consume`` returned.

    ``grpc``, ``http``: (host, port) to bind, port 0 for a free one, None for off. ``max_body_bytes`` bounds one request, before
    and after decompression; ``max_in_flight_bytes`` all requests at once: what is over is refused for now, with a delay.
    ``loopback_only`` refuses any other address with ``ValueError``. ``grpc_tls``, ``http_tls``: None for plaintext; their files
    may change while it runs. ``grpc_guard``, ``http_guard``: who may export. ``start`` raises ``OSError`` when an address cannot
    be bound.
    ``shutdown`` refuses new requests, gives running ones ``drain_s``; it works without ``start`` and twice.
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
        grpc_guard: Guard | None = None,
        http_guard: Guard | None = None,
    ) -> None:
        if grpc is None and http is None:
            raise ValueError("an OTLP receiver needs at least one of grpc and http, e.g. grpc=('127.0.0.1', 4317)")
        if loopback_only:
            for name, address in (("grpc", grpc), ("http", http)):
                if address is not None and not Place(*address).loopback:
                    raise ValueError(
                        f"{name} address {address[0]!r}: only loopback is taken here, since anyone who reaches this port can add "
                        "evidence; valid: 127.0.0.1, ::1, localhost"
                    )
        self._wanted_grpc, self._wanted_http = grpc, http
        self._grpc_tls, self._http_tls = grpc_tls, http_tls
        self._grpc_guard, self._http_guard = grpc_guard or Guard("otlp_grpc"), http_guard or Guard("otlp_http")
        self._credentials: ServerCredentials | None = None
        self._max_body_bytes = max_body_bytes
        self._consumer = consumer
        self._limits = {"max_body_bytes": max_body_bytes, "max_in_flight_bytes": max_in_flight_bytes}
        self._retry_delay_s = retry_delay_s
        self._read_timeout_s = read_timeout_s
        self._intake: Intake | None = None
        self._grpc: grpc_aio.Server | None = None
        self._runner: web.AppRunner | None = None
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
        runner, self._runner = self._runner, None
        stops = []
        if server is not None:
            stops.append(server.stop(drain_s))
        if runner is not None:
            stops.append(self._stop_http(runner, drain_s))
        await asyncio.gather(*stops)

    async def _stop_http(self, runner: web.AppRunner, drain_s: float) -> None:
        for site in list(runner.sites):
            await site.stop()
        if self._intake is not None:
            await self._intake.drained(drain_s)
        await runner.cleanup()

    async def _start_http(self, intake: Intake, wanted: Address) -> Address:
        receiver = HttpReceiver(intake, self._http_guard, read_timeout_s=self._read_timeout_s)
        # auto_decompress off: ours bounds the result.
        runner = web.AppRunner(
            receiver.application(),
            access_log=None,
            logger=receiver.logger(),
            auto_decompress=False,
            shutdown_timeout=_LAST_WORDS_S,
            lingering_time=_LAST_WORDS_S,
        )
        self._runner = runner
        await runner.setup()
        context = None if self._http_tls is None else self._http_tls.context()
        await web.TCPSite(runner, wanted[0], wanted[1], ssl_context=context).start()
        host, port = runner.addresses[0][:2]
        return str(host), int(port)

    async def _start_grpc(self, intake: Intake, wanted: Address) -> Address:
        server = grpc_aio.server(
            options=[
                ("grpc.max_receive_message_length", self._max_body_bytes),  # holds after decompression too (measured, 1.85)
                ("grpc.so_reuseport", 0),  # on by default: a second receiver would silently share the port
                ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
            ],
            interceptors=[] if self._grpc_guard.open else [grpc_receiver.Doorkeeper(self._grpc_guard)],
        )
        server.add_generic_rpc_handlers(grpc_receiver.handlers(intake))
        host = f"[{wanted[0]}]" if ":" in wanted[0] else wanted[0]
        try:
            if self._grpc_tls is None:
                port = server.add_insecure_port(f"{host}:{wanted[1]}")
            else:
                self._credentials = _credentials(self._grpc_tls)  # kept: gRPC calls into it at every handshake
                port = server.add_secure_port(f"{host}:{wanted[1]}", self._credentials)
        except RuntimeError as error:
            raise OSError(f"OTLP/gRPC cannot bind {host}:{wanted[1]}: {error}") from None
        await server.start()
        self._grpc = server
        return wanted[0], port


def _credentials(tls: ServerTls) -> ServerCredentials:
    """The certificate that the files hold at each handshake."""
    given = tls.identity.value

    def newest() -> ServerCertificateConfiguration | None:  # in a thread of gRPC's
        nonlocal given
        identity = tls.identity.value
        if identity is given:
            return None
        given = identity
        return _configuration(identity)

    # The stubs know nothing of None, which stands for no change.
    return dynamic_ssl_server_credentials(_configuration(given), newest, tls.wants_clients)  # type: ignore[arg-type]


def _configuration(identity: Identity) -> ServerCertificateConfiguration:
    assert identity.key is not None
    assert identity.cert is not None
    return ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.authorities)
