"""Test whether a TCP port answers, and whether an OTLP endpoint accepts an export."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

from handrail.config.types import Address
from handrail.otlp.settings import NAMELESS, ClientSettings
from handrail_doctor.facts import OtlpTarget, Reach

_GREETING: Final = 10
_GREETS_WITHIN_S: Final = 2.0


async def connect(host: str, port: int, timeout_s: float) -> tuple[Reach, str]:
    """Connect, wait for ZeroMQ's greeting, and close the connection again.

    Returns (how it ended, the system's error text). Sends nothing.
    Peers of ZMTP greet at once, without a request: 0xff, eight bytes, 0x7f (rfc.zeromq.org/spec/23). A connection alone proves
    little: the proxy of a service mesh accepts every one.
    """
    writer = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
        data = await asyncio.wait_for(reader.readexactly(_GREETING), min(timeout_s, _GREETS_WITHIN_S))
        return (Reach.OPEN, "") if data[0] == 0xFF and data[-1] == 0x7F else (Reach.MUTE, "it answers something else")
    except asyncio.TimeoutError:
        return (Reach.SILENT, f"within {timeout_s:g} s") if writer is None else (Reach.MUTE, "it sends nothing")
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return Reach.MUTE, "it closes the connection"
    except ConnectionRefusedError:
        return Reach.REFUSED, "connection refused"
    except socket.gaierror as error:
        return Reach.UNRESOLVED, str(error.strerror)
    except (OSError, ValueError, OverflowError) as error:
        number = getattr(error, "errno", None)
        return Reach.ERROR, os.strerror(number) if number else str(error)
    finally:
        if writer is not None:
            writer.transport.abort()


async def export_nothing(name: str, endpoint: str, headers: dict[str, str], settings: ClientSettings | None = None) -> OtlpTarget:
    """Send an empty OTLP export; takes at most 5 s.

    Needs the sidecar extra; without it the target has a problem that says so. ``settings``: the credentials, as far as they are
    known.
    """
    try:
        from handrail.otlp.client import OtlpClient
    except ModuleNotFoundError as error:
        return OtlpTarget(name=name, endpoint=endpoint, why_not=f"{error.name} is not installed: pip install 'handrail[sidecar]'")
    try:
        client = OtlpClient(settings or ClientSettings(endpoint=endpoint, headers=headers, names=NAMELESS))
    except (ValueError, OSError) as error:
        return OtlpTarget(name=name, endpoint=endpoint, problem=str(error))
    try:
        return OtlpTarget(name=name, endpoint=endpoint, problem=await client.check() or "")
    finally:
        await client.close()


def is_local(host: str) -> bool:
    """Test whether the host is this one: one of its addresses can be bound here.

    A name that does not resolve is not this host.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def is_loopback(host: str) -> bool:
    """Test whether an address means the host on which it is used."""
    return Address(host, 0).loopback
