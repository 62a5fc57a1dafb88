"""Accept within a gate: connections over a bound are reset.

Without free descriptors no connection is lost.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from doubles.otlp import until
from handrail.runtime.accepting import Acceptor, listening, peer_of
from handrail.runtime.connections import Bounds, Gate, Refusal
from handrail.runtime.descriptors import DescriptorBudget
from harness.ports import held_port

A, B = "127.0.0.2", "127.0.0.3"


class Accepted:
    """A listener on the loopback and the connections that it accepted."""

    def __init__(self, bounds: Bounds) -> None:
        self.used = [0]
        self.gate = Gate("api", bounds, DescriptorBudget(1000, 100, count=lambda: self.used[0], recount_s=0.0))
        self.taken: list[tuple[socket.socket, str]] = []
        self.acceptor = Acceptor(self.gate, lambda connection, peer: self.taken.append((connection, peer)))
        self.address = self.acceptor.start("127.0.0.1", 0)

    def leave(self) -> None:
        connection, peer = self.taken.pop()
        connection.close()
        self.gate.leave(peer)


@asynccontextmanager
async def accepting(listener: int = 10, peer: int = 10) -> AsyncIterator[Accepted]:
    made = Accepted(Bounds(listener=listener, peer=peer))
    try:
        yield made
    finally:
        made.acceptor.close()
        while made.taken:
            made.leave()


async def connect(address: tuple[str, int], source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.wait_for(asyncio.open_connection(*address, local_addr=(source, 0)), 60)


async def connect_and_read(address: tuple[str, int], source: str) -> bytes:
    """Connect and read; a reset may arrive together with the connection."""
    reader, writer = await connect(address, source)
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.transport.abort()


async def test_who_is_over_the_bound_is_reset_and_others_are_taken() -> None:
    async with accepting(listener=4, peer=2) as served:
        kept = [await connect(served.address, A) for _ in range(2)]
        await until(lambda: len(served.taken) == 2)
        with pytest.raises(ConnectionResetError):
            await connect_and_read(served.address, A)
        kept.append(await connect(served.address, B))
        await until(lambda: len(served.taken) == 3)
        assert [peer for _, peer in served.taken] == [A, A, B]
        assert served.gate.refused[Refusal.PEER] == 1
        for _, each in kept:
            each.close()


async def test_accepting_pauses_without_descriptors_and_goes_on_with_them(caplog: pytest.LogCaptureFixture) -> None:
    async with accepting() as served:
        served.used[0] = 900
        _, first = await connect(served.address, A)  # the system puts it into its queue
        _, second = await connect(served.address, B)
        await until(lambda: served.gate.pauses >= 2)
        assert served.gate.paused
        assert served.taken == []
        assert [record.message for record in caplog.records] == [
            "api pauses accepting: 900 of 1000 descriptors are in use and 100 are reserved for files; new connections wait"
        ]
        served.used[0] = 100
        await until(lambda: len(served.taken) == 2)
        assert not served.gate.paused
        assert sum(served.gate.refused.values()) == 0
        first.close()
        second.close()


def test_accept_that_finds_no_descriptor_tries_again() -> None:
    """Accept tries again after it finds no descriptor.

    It runs in its own process, which has none left although the budget shows some: no error, no busy loop, and then the
    connection is accepted.
    """
    code = """
import asyncio, os, resource, socket
from handrail.runtime.accepting import Acceptor
from handrail.runtime.connections import Bounds, Gate
from handrail.runtime.descriptors import DescriptorBudget

async def main():
    taken = []
    gate = Gate("api", Bounds(), DescriptorBudget(1000, 100, count=lambda: 0))
    acceptor = Acceptor(gate, lambda connection, peer: taken.append(connection))
    address = acceptor.start("127.0.0.1", 0)
    client = socket.create_connection(address)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    while gate.pauses < 3:
        await asyncio.sleep(0.01)
    assert gate.paused and not taken
    os.close(held.pop())
    while not taken:
        await asyncio.sleep(0.01)
    acceptor.close()
    print(gate.pauses < 1000)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "True\n", done.stderr
    assert done.stderr.count("pauses accepting") == 1


async def test_close_works_twice_and_while_paused() -> None:
    async with accepting() as served:
        served.used[0] = 900
        _, writer = await connect(served.address, A)
        await until(lambda: served.gate.paused)
        served.acceptor.close()
        served.acceptor.close()
        assert not served.gate.paused
        with pytest.raises(ConnectionRefusedError):
            await connect(served.address, A)
        writer.close()


def test_taken_port_is_an_os_error_that_names_it() -> None:
    with held_port() as port:
        (first,) = listening("127.0.0.1", port)
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: "):
            listening("127.0.0.1", port)
        first.close()


def test_every_address_of_a_name_has_the_same_port() -> None:
    sockets = listening("localhost", 0)
    assert len({each.getsockname()[1] for each in sockets}) == 1
    for each in sockets:
        each.close()


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (("10.0.0.7", 4711), "10.0.0.7"),
        (("::ffff:10.0.0.7", 4711, 0, 0), "10.0.0.7"),
        (("2001:db8::7", 4711, 0, 0), "2001:db8::7"),
        (("::ffff:1:2", 4711, 0, 0), "::ffff:1:2"),
    ],
)
def test_peer_of(address: tuple[str, int] | tuple[str, int, int, int], peer: str) -> None:
    assert peer_of(address) == peer
