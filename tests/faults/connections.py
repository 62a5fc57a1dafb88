"""Open thousands of silent connections to a collector.

Good senders export to the same collector meanwhile (``silence.py`` has them and the collector).
As a program this is the flood alone: ``python tests/faults/connections.py JSON`` with the arguments of ``silent_flood``. It
ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from handrail.runtime.descriptors import raise_limit

SILENT: Final = "127.0.0.66"
"""Default source address of the flood; good senders use another one."""

AGAIN_S: Final = 5.0
CONNECT_S: Final = 60.0
DAY_S: Final = 86400.0
STEPS_BACK: Final = 10
"""Niceness of the flood's process above the collector.

A real sender of floods has its own processor.
"""


@dataclass(slots=True)
class Flood:
    """The counts of silent connections.

    ``held``: connected now.
    ``refused``: reset before the handshake, or at once.
    ``faults``: connections that gave up, which is a bug here.
    """

    wanted: int
    held: int = 0
    held_most: int = 0
    opened: int = 0
    handshakes: int = 0
    refused: int = 0
    ended: int = 0
    faults: int = 0
    over: bool = False
    seconds: float = 0.0


async def silent_flood(
    listeners: Sequence[tuple[str, int]],
    count: int,
    tls_share: float,
    seconds: float,
    *,
    source: str = SILENT,
    again_s: float = AGAIN_S,
    stop: asyncio.Event | None = None,
) -> dict[str, Any]:
    """Keep ``count`` silent connections from ``source`` open for the given time.

    Returns the counts as ``Flood``'s fields.
    The connections are spread over ``listeners``. A share ``tls_share`` (0 to 1) finishes a TLS handshake and then is silent;
    the others do not even do that.
    A refused or cut connection is tried again ``again_s`` later. ``stop`` ends the flood early.
    Needs ``count`` descriptors in this process; prefer an own process: ``flooding``.
    """
    flood = Flood(wanted=count)
    began_s, context = time.monotonic(), _trusting()
    tasks = [
        asyncio.create_task(_keep_silent(flood, listeners[number % len(listeners)], source, again_s, tls))
        for number in range(count)
        for tls in (context if int((number + 1) * tls_share) > int(number * tls_share) else None,)
    ]
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for((stop or asyncio.Event()).wait(), seconds)
    finally:
        flood.over = True
        pending = set(tasks)
        while pending:  # a cancellation may be lost in a handshake that fails at the same moment
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=1.0)
    flood.faults = sum(not task.cancelled() and task.exception() is not None for task in tasks)
    flood.seconds = time.monotonic() - began_s
    return asdict(flood)


class _Silent(asyncio.Protocol):
    """A silent connection; ``lost`` is done when the other side closes it."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


async def _keep_silent(
    flood: Flood, listener: tuple[str, int], source: str, again_s: float, context: ssl.SSLContext | None
) -> None:
    loop = asyncio.get_running_loop()
    while not flood.over:
        transport = None
        began_s = loop.time()
        try:
            transport, silent = await asyncio.wait_for(
                loop.create_connection(_Silent, *listener, ssl=context, local_addr=(source, 0)), CONNECT_S
            )
            flood.opened += 1
            flood.handshakes += context is not None
            flood.held += 1
            flood.held_most = max(flood.held_most, flood.held)
            try:
                await silent.lost
            finally:
                flood.held -= 1
            # A reset right after the connection is a refusal: TCP connects before a server can refuse.
            if loop.time() - began_s < 1.0:
                flood.refused += 1
            else:
                flood.ended += 1
        except (OSError, asyncio.TimeoutError):
            flood.refused += 1
        finally:
            if transport is not None:
                transport.abort()
        await asyncio.sleep(again_s)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextlib.asynccontextmanager
async def flooding(
    listeners: Sequence[tuple[str, int]], count: int, tls_share: float, *, source: str = SILENT, again_s: float = AGAIN_S
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ``silent_flood`` in a process of its own while the context is entered.

    ``result_of`` ends it and returns its counts.
    """
    arguments = {"listeners": list(listeners), "count": count, "tls_share": tls_share, "source": source, "again_s": again_s}
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, __file__, json.dumps(arguments), stdin=pipe, stdout=pipe)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def result_of(child: asyncio.subprocess.Process) -> dict[str, Any]:
    """End a flood and return its counts."""
    assert child.stdin is not None
    child.stdin.close()  # closing its input ends it
    out, _ = await child.communicate()
    found: dict[str, Any] = json.loads(out)
    return found


async def _main(arguments: dict[str, Any]) -> None:
    raise_limit()
    os.nice(STEPS_BACK)
    stop = asyncio.Event()
    listeners = [(str(host), int(port)) for host, port in arguments.pop("listeners")]
    flood = asyncio.create_task(silent_flood(listeners, seconds=DAY_S, stop=stop, **arguments))
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    print(json.dumps(await flood), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main(json.loads(sys.argv[1])))
