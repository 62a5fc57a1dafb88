"""Whether a TCP port answers, and whether an OTLP endpoint takes an empty export."""

from __future__ import annotations

import asyncio
import os
import socket

from handrail.doctor.facts import OtlpTarget, Reach
from handrail.values import Address


async def connect(host: str, port: int, timeout_s: float) -> tuple[Reach, str]:
    """Opens a connection and closes it again; (how it ended, the system's word). Says nothing to the peer."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
    except asyncio.TimeoutError:
        return Reach.SILENT, f"within {timeout_s:g} s"
    except ConnectionRefusedError:
        return Reach.REFUSED, "connection refused"
    except socket.gaierror as error:
        return Reach.UNRESOLVED, str(error.strerror)
    except (OSError, ValueError, OverflowError) as error:
        number = getattr(error, "errno", None)
        return Reach.ERROR, os.strerror(number) if number else str(error)
    writer.transport.abort()
    return Reach.OPEN, ""


async def export_nothing(name: str, endpoint: str, headers: dict[str, str]) -> OtlpTarget:
    """At most 5 s. Needs the sidecar extra; without it the target says so."""
    try:
        from handrail.otlp.client import OtlpClient
    except ModuleNotFoundError as error:
        return OtlpTarget(name=name, endpoint=endpoint, why_not=f"{error.name} is not installed: pip install 'handrail[sidecar]'")
    try:
        client = OtlpClient(endpoint, headers=headers)
    except (ValueError, OSError) as error:
        return OtlpTarget(name=name, endpoint=endpoint, problem=str(error))
    try:
        return OtlpTarget(name=name, endpoint=endpoint, problem=await client.check() or "")
    finally:
        await client.close()


def is_local(host: str) -> bool:
    """Whether the host is this one: one of its addresses can be bound here. A name that does not resolve is not."""
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
    """An address that means the host on which it is used."""
    return Address(host, 0).loopback
