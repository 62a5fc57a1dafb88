"""Let peers vanish silently and a network lose packets.

There are two hosts in network namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

from faults.evidence import loaded
from faults.namespace import THERE, TwoHosts
from faults.processes import collector, get, metrics, pause, sidecar, url
from faults.traffic import Traffic, completions, flowing, missing
from faults.trial import Context, Got, Trial
from harness.acknowledged import until, until_stored

_OPEN = ("--plaintext", "otlp_http", "--plaintext", "api")
_SILENT = 200
_FREED_S = 90.0


@contextlib.contextmanager
def _two_hosts() -> Iterator[TwoHosts]:
    hosts = TwoHosts()
    try:
        yield hosts
    finally:
        hosts.close()


async def _senders_cut(context: Context) -> Got:
    """Take the link down for a while under load, again and again."""
    rounds, seconds = int(context.scale(2, 8)), context.scale(6.0, 40.0)
    with _two_hosts() as hosts, collector(context.folder, *_OPEN, host=THERE, before=hosts.there) as running:
        async with loaded(running, context) as going:
            again: list[float] = []
            for _ in range(rounds):
                hosts.cut()
                await pause(seconds)
                hosts.join()
                again.append(await going.goes_on())
                await going.goes_on(80 * 6)
            kept = await going.settle(context.folder / "data")
    got = f"{rounds} cuts of {seconds:.0f} s, acknowledged again {max(again):.1f} s after at the latest; {kept.text()}"
    return got, kept.whole


async def _loss(context: Context) -> Got:
    """Take the link down for a fifth of the time, 100 ms each.

    This needs no kernel module.
    """
    seconds = context.scale(10.0, 120.0)
    with _two_hosts() as hosts, collector(context.folder, *_OPEN, host=THERE, before=hosts.there) as running:
        async with loaded(running, context) as going:
            before, cuts = len(going.load.acknowledged), int(seconds / 0.5)
            for _ in range(cuts):
                hosts.cut()
                await asyncio.sleep(0.1)
                hosts.join()
                await asyncio.sleep(0.4)
            during = len(going.load.acknowledged) - before
            kept = await going.settle(context.folder / "data")
    return f"{during} spans acknowledged in {cuts} cuts; {kept.text()}", kept.whole and during > 0


async def _half_open(context: Context) -> Got:
    """Let the other end of silent connections vanish.

    The process must get its descriptors back.
    """
    with _two_hosts() as hosts, collector(context.folder, *_OPEN, host=THERE, before=hosts.there) as running:
        await running.start()
        pid = running.pid
        before = running.descriptors()
        address = (THERE, int(running.addresses["otlp_http"].rpartition(":")[2]))
        held = [socket.create_connection(address, timeout=10.0) for _ in range(_SILENT)]
        for number, each in enumerate(held):
            if number % 2:
                each.sendall(b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Le")
        await until(lambda: running.descriptors() >= before + _SILENT // 4, lambda: "no connection is there", 20.0)
        most = running.descriptors()
        hosts.cut()
        for each in held:
            each.close()
        began = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            await until(lambda: running.descriptors() <= before + 5, lambda: "", min(_FREED_S, context.left_s() - 10), 0.5)
        took, left = asyncio.get_running_loop().time() - began, running.descriptors() - before
        hosts.join()
        ready, _ = await get(running.addresses["api"], "/readyz")
        alive = running.pid == pid and running.alive
        status = await running.finish()
    got = f"{most - before} held; {max(0, left)} still held {took:.0f} s after their peer vanished; "
    got += f"/readyz {ready}, status {status}"
    return got, alive and left <= 5 and ready == 200 and status == 0


async def _collector_cut(context: Context) -> Got:
    """Cut the collector off without a notice, while streams go on."""
    seconds, data = context.scale(15.0, 300.0), context.folder / "data"
    with _two_hosts() as hosts, collector(context.folder, *_OPEN, host=THERE, before=hosts.there) as store:
        await store.start()
        async with completions() as upstream:
            with sidecar(context.folder, "edge", upstream, url(store)) as running:
                await running.start()
                traffic = Traffic(f"http://{running.addresses['proxy']}", rate=10)
                async with flowing(traffic) as task:
                    await until(lambda: len(traffic.answers) > 10, lambda: "no stream ends", 60.0)
                    hosts.cut()
                    await pause(seconds)
                    page = await metrics(running.addresses["admin"])
                    hosts.join()
                    await pause(1.0)
                    traffic.stopping = True
                    await task
                with contextlib.suppress(TimeoutError):
                    await until_stored(data / "store", len(traffic.answers), min(90.0, context.left_s() - 10))
                await running.finish()
        await store.finish()
    lost, twice = await asyncio.to_thread(missing, data / "store", traffic.answers)
    whole, slowest = sum(a.whole for a in traffic.answers), max(a.seconds for a in traffic.answers)
    up = page.get("handrail_sidecar_export_up", -1.0)
    got = f"cut {seconds:.0f} s, export_up {up:.0f}; {whole} of {len(traffic.answers)} streams whole, slowest {slowest:.2f} s; "
    return f"{got}{len(lost)} without a row, {twice} twice", whole == len(traffic.answers) and not lost and not twice


TRIALS: tuple[Trial, ...] = (
    Trial(
        name="network.senders_cut",
        group="network",
        expected="packets vanish under load: goes on when they come again, 0 acknowledged spans lost, 0 doubled",
        seconds=36,
        long_seconds=400,
        beside=True,
        run=_senders_cut,
    ),
    Trial(
        name="network.loss",
        group="network",
        expected="packets lost a fifth of the time, 100 ms each: acknowledges on, 0 acknowledged spans lost, 0 doubled",
        seconds=22,
        long_seconds=180,
        beside=True,
        run=_loss,
    ),
    Trial(
        name="network.half_open",
        group="network",
        expected=f"{_SILENT} silent connections whose peer vanishes: their descriptors free within {_FREED_S:.0f} s, /readyz 200",
        seconds=25,
        long_seconds=60,
        beside=True,
        run=_half_open,
    ),
    Trial(
        name="network.collector_cut",
        group="network",
        expected="the collector vanishes from a sidecar: every stream whole and not slowed, every request a row when it is back",
        seconds=36,
        long_seconds=400,
        beside=True,
        run=_collector_cut,
    ),
)
