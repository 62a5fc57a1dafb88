"""Find out why an OTLP endpoint refuses our payload, and name the mistake.

The result is one line. It looks at the service that really answers on the port. Case G10: TLS to a plaintext port, plaintext to
a TLS port, gRPC to an HTTP port and the reverse, a missing path, a missing token.
HTTP/2's first frame from a server is SETTINGS (RFC 9113 section 3.4), so its type byte tells gRPC from HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from enum import Enum
from typing import Final

from handrail.otlp.endpoint import GRPC_PORT, Endpoint, WireProtocol
from handrail.otlp.settings import Names
from handrail.otlp.signals import Signal

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # with an empty SETTINGS frame
_SETTINGS_FRAME: Final = 4
_OBJECTION_S: Final = 0.5
_ANSWERS: Final = (
    "HTTP ",
    "gRPC UNAUTHENTICATED",
    "gRPC PERMISSION_DENIED",
    "gRPC UNIMPLEMENTED",
    "gRPC INVALID_ARGUMENT",
    "gRPC RESOURCE_EXHAUSTED",
)


class PeerProtocol(str, Enum):
    """Protocol found on the port."""

    UNRESOLVED = "unresolved"  # the name has no address
    REFUSED = "refused"  # nothing listens
    SILENT = "silent"  # no connection, or no answer, in time
    UNTRUSTED = "untrusted"  # TLS, but its certificate does not pass
    CHOOSY = "choosy"  # TLS, but it does not accept our certificate, or that we show none
    TLS = "tls"  # TLS where plaintext was spoken
    PLAINTEXT = "plaintext"  # no TLS where TLS was spoken
    HTTP1 = "http1"
    HTTP2 = "http2"  # the transport of gRPC
    OTHER = "other"


async def diagnose(
    endpoint: Endpoint, signal: Signal, reason: str, context: ssl.SSLContext | None, names: Names, *, timeout_s: float
) -> str:
    """One line for a send that failed with ``reason``.

    ``context``: of TLS endpoints. Takes at most ``timeout_s``.
    """
    if _answered(reason):
        return named_by_answer(endpoint, signal, reason, names)
    try:
        peer, detail = await asyncio.wait_for(_look(endpoint, context), timeout_s)
    except asyncio.TimeoutError:
        peer, detail = PeerProtocol.SILENT, ""
    return named_by_peer(endpoint, peer, detail, reason, names)


def _answered(reason: str) -> bool:
    """Whether the peer spoke our protocol and refused.

    gRPC uses UNAVAILABLE and the like also where there is no peer.
    """
    return reason.startswith(_ANSWERS)


def named_by_answer(endpoint: Endpoint, signal: Signal, reason: str, names: Names) -> str:
    """Line for a peer that speaks our protocol and refused with ``reason``."""
    where = endpoint.url(signal) if endpoint.protocol is WireProtocol.HTTP else str(endpoint)
    word = reason.partition(":")[0]
    if word in ("HTTP 401", "HTTP 403", "gRPC UNAUTHENTICATED", "gRPC PERMISSION_DENIED"):
        token, headers = names.of("token_file"), names.of("headers")
        ways = [*([token] if token else []), *([f"a header authorization=Bearer TOKEN in {headers}"] if headers else [])]
        what = f": give a token: {', or '.join(ways)}" if ways else ", and Handrail sends no token"
        return f"{where} requires authentication ({reason}){what}"
    if word == "HTTP 404":
        return (
            f"{where} does not exist (HTTP 404): the endpoint's path is wrong or missing; give the part before /v1/{signal.value}"
        )
    if word == "HTTP 405":
        return f"{where} does not accept POST (HTTP 405): this is not an OTLP/HTTP receiver, or its path is wrong"
    if word == "gRPC UNIMPLEMENTED":
        kind = signal.value.removesuffix("s")
        return f"{where} speaks gRPC but has no OTLP {kind} service ({reason}): is this another service's port?"
    if word in ("HTTP 429", "HTTP 502", "HTTP 503", "HTTP 504", "gRPC RESOURCE_EXHAUSTED"):
        return f"{where} answers but accepts nothing for now ({reason})"
    return f"{where} refuses an empty export ({reason})"


def named_by_peer(endpoint: Endpoint, peer: PeerProtocol, detail: str, reason: str, names: Names) -> str:
    """Line for the protocol found on the port; ``reason`` where that explains nothing."""
    where, host = str(endpoint), endpoint.authority
    grpc_wanted = endpoint.protocol is WireProtocol.GRPC
    plain, secure = ("grpc", "grpcs") if grpc_wanted else ("http", "https")
    grpc, http = ("grpcs", "https") if endpoint.secure else ("grpc", "http")
    if peer is PeerProtocol.UNRESOLVED:
        return f"{where}: the name {endpoint.host!r} does not resolve ({detail})"
    if peer is PeerProtocol.REFUSED:
        return f"{where}: nothing listens there ({detail})"
    if peer is PeerProtocol.SILENT:
        return f"{where}: no answer in time (a firewall, or the wrong host?)"
    if peer is PeerProtocol.UNTRUSTED:
        ca = names.of("ca_file")
        authority = f"set {ca} to the CA that signed it" if ca else "only the system's authorities count (or SSL_CERT_FILE's)"
        return f"{where}: its TLS certificate is not accepted ({detail}): {authority}"
    if peer is PeerProtocol.CHOOSY:
        cert, key = names.of("cert_file"), names.of("key_file")
        mine = f": set {cert} and {key}" if cert else ", and none is set"
        return f"{where}: it seems to require a client certificate, or a different one ({detail}){mine}"
    if peer is PeerProtocol.TLS:
        return f"{where}: plaintext was sent to a TLS port: write {secure}://{host}"
    if peer is PeerProtocol.PLAINTEXT:
        return f"{where}: TLS was sent to a plaintext port: write {plain}://{host}"
    if peer is PeerProtocol.HTTP1 and grpc_wanted:
        other = (
            "is it another service's?" if endpoint.port == GRPC_PORT else f"write {http}://{host}, or use the gRPC port (4317)"
        )
        return f"{where}: gRPC was sent to an HTTP port: {other}"
    if peer is PeerProtocol.HTTP2 and not grpc_wanted:
        return f"{where}: HTTP was sent to a gRPC port: write {grpc}://{host}, or use the HTTP port (4318)"
    return f"{where}: {reason}"


async def objection(endpoint: Endpoint, context: ssl.SSLContext) -> str:
    """Sign that the peer does not accept our certificate, or that we have none.

    Returns '' where there is no sign. Takes at most a second. A client of TLS 1.3 has finished its handshake before the peer
    looks at its certificate. Some peers then send the reason in an alert, which is lost where the client was writing; others,
    asyncio's and gRPC's servers among them, just hang up. So this check writes nothing: a peer without an objection waits for
    data, or sends some.
    """
    try:
        reader, writer = await asyncio.wait_for(_open(endpoint, context), _OBJECTION_S)
        try:
            data = await asyncio.wait_for(reader.read(1), _OBJECTION_S)
        except ConnectionResetError:
            data = b""
        finally:
            writer.transport.abort()
    except ssl.SSLError as error:
        return str(error.reason) if "ALERT" in str(error.reason) else ""
    except (OSError, asyncio.TimeoutError):
        return ""
    return "" if data else "it closes the connection right after the handshake"


async def _open(endpoint: Endpoint, context: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if context is not None and endpoint.protocol is WireProtocol.GRPC:
        context.set_alpn_protocols(["h2"])
    return await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)


async def _look(endpoint: Endpoint, context: ssl.SSLContext | None) -> tuple[PeerProtocol, str]:
    try:
        data = await _finding(endpoint, _PREFACE, context)
        if not data:
            # HTTP/1 servers may close on the preface without an answer.
            data = await _finding(endpoint, f"GET / HTTP/1.1\r\nHost: {endpoint.authority}\r\n\r\n".encode(), context)
        if not data and context is not None and (alert := await objection(endpoint, context)):
            return PeerProtocol.CHOOSY, alert
    except socket.gaierror as error:
        return PeerProtocol.UNRESOLVED, str(error.strerror)
    except ssl.SSLCertVerificationError as error:
        return PeerProtocol.UNTRUSTED, error.verify_message
    except ssl.SSLError as error:
        return (PeerProtocol.CHOOSY if "ALERT" in str(error.reason) else PeerProtocol.PLAINTEXT), str(error.reason)
    except ConnectionRefusedError:
        return PeerProtocol.REFUSED, "connection refused"
    except OSError as error:
        if endpoint.secure:  # some servers hang up on a TLS greeting instead of answering it
            return await _look_plain(endpoint, str(error))
        return PeerProtocol.OTHER, str(error)
    kind = _kind(data)
    if kind is PeerProtocol.OTHER and context is None and await _speaks_tls(endpoint):
        return PeerProtocol.TLS, ""
    return kind, ""


async def _look_plain(endpoint: Endpoint, detail: str) -> tuple[PeerProtocol, str]:
    data = b""
    with suppress(OSError):
        data = await _finding(endpoint, _PREFACE, None)
    return (
        (PeerProtocol.PLAINTEXT, detail)
        if _kind(data) in (PeerProtocol.HTTP1, PeerProtocol.HTTP2)
        else (PeerProtocol.OTHER, detail)
    )


async def _speaks_tls(endpoint: Endpoint) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False  # only asks whether TLS is spoken; nothing is sent
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    except ssl.SSLError as error:
        # An alert is TLS too: a server that wants a client certificate, or another version.
        return "ALERT" in str(error.reason)
    except OSError:
        return False
    writer.transport.abort()
    return True


async def _finding(endpoint: Endpoint, greeting: bytes, context: ssl.SSLContext | None) -> bytes:
    """Peer's first bytes after ``greeting``; empty when it hung up."""
    reader, writer = await _open(endpoint, context)
    try:
        writer.write(greeting)
        await writer.drain()
        return await reader.read(64)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def _kind(data: bytes) -> PeerProtocol:
    if data.startswith(b"HTTP/1."):
        return PeerProtocol.HTTP1
    if len(data) > 3 and data[3] == _SETTINGS_FRAME and data[0] == 0:
        return PeerProtocol.HTTP2
    return PeerProtocol.OTHER
