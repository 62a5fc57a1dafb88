"""A TCP relay in a thread: a network link that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from handrail_cli.subprocesses import HOST


class Relay:
    """Carries connections to ``target`` (host:port) until ``cut``.

    Then they end and no new one is accepted.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self.address = ""
        self._thread.start()
        self._ready.wait()

    def cut(self) -> None:
        """Cut the link; may be called again."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the connection ended meanwhile
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._carry, HOST, 0)
        self.address = f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        host, _, port = self._target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            try:
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
            finally:
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # one end is gone, or the link is cut; a waiter for this task gets no exception
        finally:
            writer.close()
            self._carrying.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
