"""What the plugins of a prefill/decode fleet would say, as datagrams, in real time: an engine that is emulated has no plugin.

Hand-offs of a known kind, one every so often a pair, of which some fail, are read too late, are never read, or never end. The
words are those of ``handrail.guest.events``, the shapes those of tests/data/recordings/plugin (real vLLM 0.32).
"""

from __future__ import annotations

import contextlib
import heapq
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from handrail.guest import events as words

SECOND: Final = 10**9
MS: Final = 10**6
_BLOCK_BYTES: Final = 2 << 20
_LEASE_NS: Final = 30 * SECOND
_TICK_S: Final = 0.02


@dataclass(slots=True)
class _Process:
    """One process of an engine: its boot, and how many datagrams it has sent."""

    socket: str
    boot: str
    pid: int
    kind: str
    sequence: int = 0
    lost: int = 0
    due: list[words.Event] = field(default_factory=list)


class Speech:
    """``sockets``: by host, where its sidecar hears a plugin; prefill hosts' names begin with p. ``stop`` ends the thread."""

    def __init__(self, sockets: Mapping[str, Path], seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._processes = {
            (host, kind): _Process(str(path), f"{self._random.getrandbits(48):012x}", 1000 + number, kind)
            for number, (host, path) in enumerate(sockets.items())
            for kind in (words.CORE, words.WORKER)
        }
        self._decodes = [host for host in sockets if host.startswith("d")]
        self._prefills = [host for host in sockets if host.startswith("p")]
        self._queue: list[tuple[int, int, Callable[[int], None]]] = []
        self._count = 0
        self._running = dict.fromkeys(sockets, 0)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plugins")

    def start(self) -> None:
        now = time.monotonic_ns()
        for host, kind in self._processes:
            facts = {
                "engine_id": f"engine-{host}",
                "connector": "NixlConnector",
                "lease_ns": _LEASE_NS,
                "block_bytes": _BLOCK_BYTES,
            }
            self._say(now, host, kind, words.FACTS, facts if kind == words.CORE else {"agents": [f"agent-{host}"]})
        self._at(now, self._alive)
        self._at(now, self._step)
        for number, decode in enumerate(self._decodes):
            self._at(now + number * 100 * MS, lambda at, decode=decode: self._arrive(at, decode))  # type: ignore[misc]
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._sender.close()

    # --- who says what, when ---------------------------------------------------------------------------------------------

    def _at(self, at_ns: int, what: Callable[[int], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_ns, self._count, what))

    def _say(self, at_ns: int, host: str, kind: str, name: str, *fields: Any) -> None:
        self._at(at_ns, lambda at: self._processes[host, kind].due.append((name, at, *fields)))

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S):
            now = time.monotonic_ns()
            while self._queue and self._queue[0][0] <= now:
                at_ns, _, what = heapq.heappop(self._queue)
                what(at_ns)
            for process in self._processes.values():
                self._send(process)

    def _send(self, process: _Process) -> None:
        if not process.due:
            return
        clock = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
        made, process.lost = words.datagrams(
            process.due,
            boot=process.boot,
            pid=process.pid,
            kind=process.kind,
            sequence=process.sequence + 1,
            lost=process.lost,
            **clock,
        )
        process.sequence += len(made)
        process.due.clear()
        with contextlib.suppress(OSError):  # the sidecar is away: a plugin would lose them too
            for datagram in made:
                self._sender.sendto(datagram, process.socket)

    # --- what engines do -------------------------------------------------------------------------------------------------

    def _alive(self, at: int) -> None:
        for host, kind in self._processes:
            self._say(
                at,
                host,
                kind,
                words.ALIVE,
                at if kind == words.CORE else None,
                self._running[host] if kind == words.CORE else None,
            )
        self._at(at + SECOND, self._alive)

    def _step(self, at: int) -> None:
        for host in self._decodes:
            running = self._running[host]
            self._say(at, host, words.CORE, words.STEP, at - 20 * MS, running, 0, 0, running, 0, running, 0, False, 0)
        self._at(at + 200 * MS, self._step)

    def _arrive(self, at: int, decode: str) -> None:
        """One hand-off begins, and the next is planned."""
        self._at(at + int(self._random.expovariate(3) * SECOND), lambda then: self._arrive(then, decode))
        prefill = self._random.choice(self._prefills)
        name = f"cmpl-speech-{self._count}-0"
        given, taken = f"{name}-{self._random.getrandbits(32):08x}", f"{name}-{self._random.getrandbits(32):08x}"
        blocks = self._random.randint(4, 120)
        published = at + 120 * MS
        self._publish(at, published, prefill, given, blocks)
        end = self._random.choices(("ok", "failed", "stale", "unread", "hung"), (90, 4, 1, 1, 0.5))[0]
        if end == "unread":
            self._say(published + 3 * SECOND, prefill, words.WORKER, words.KV_EXPIRED, given, 0)
            self._say(published + 3 * SECOND, prefill, words.CORE, words.KV_FREED, given)
        else:
            self._fetch(published + 10 * MS, decode, prefill, taken, given, blocks, end)

    def _publish(self, at: int, published: int, host: str, request: str, blocks: int) -> None:
        tokens, core = blocks * 16, words.CORE
        self._say(at, host, core, words.QUEUED, request, time.time_ns(), tokens, None)
        self._say(at + 20 * MS, host, core, words.SCHEDULED, request, 0, 0)
        self._say(published - MS, host, core, words.FIRST_TOKEN, request)
        self._say(published, host, core, words.FINISHED, request, "FINISHED_LENGTH_CAPPED", 1)
        kept = (tokens, blocks, blocks * _BLOCK_BYTES, _LEASE_NS, "p_to_d", "pull", None)
        self._say(published, host, core, words.KV_PUBLISHED, request, "NixlConnector", f"engine-{host}", *kept)

    def _fetch(self, at: int, host: str, peer: str, request: str, theirs: str, blocks: int, end: str) -> None:
        core, worker, size = words.CORE, words.WORKER, blocks * _BLOCK_BYTES
        self._at(at, lambda _: self._runs(host, 1))
        self._say(at, host, core, words.QUEUED, request, time.time_ns(), blocks * 16, None)
        known = (f"engine-{host}", f"engine-{peer}", theirs, f"10.0.0.{ord(peer[-1])}", 5600, "p_to_d", "pull", None)
        self._say(at + MS, host, core, words.KV_KNOWN, request, "NixlConnector", *known)
        self._say(
            at + 2 * MS,
            host,
            core,
            words.KV_WANTED,
            request,
            "NixlConnector",
            f"engine-{host}",
            blocks * 16,
            0,
            blocks,
            size,
            True,
        )
        posted = at + int(self._random.lognormvariate(1.5, 0.8) * MS) + 3 * MS
        self._say(posted - MS, host, worker, words.KV_LOAD, request, 0)
        self._say(posted, host, worker, words.KV_POSTED, request, 0, False)
        if end == "hung":
            return
        done = posted + int(size / 4e9 * SECOND) + int(self._random.lognormvariate(1, 0.5) * MS)
        failed = end == "failed"
        if failed:
            self._say(done, host, worker, words.KV_FAILURE, request, 0, "transfer_failed", "RuntimeError", f"engine-{peer}")
        else:
            self._say(done, host, worker, words.KV_DONE, request, 0, size, blocks * 2, MS, False)
        if end == "stale":
            self._say(done - 2 * MS, peer, worker, words.KV_EXPIRED, theirs, 0)
        self._say(done + MS, host, worker, words.KV_LOADED, request, 0, failed, MS)
        self._say(done + 2 * MS, peer, worker, words.KV_READ, theirs, 0, f"agent-{host}", end == "stale", MS)
        self._say(done + 3 * MS, peer, core, words.KV_FREED, theirs)
        self._say(done + 3 * MS, host, core, words.KV_NOTICED, request, failed)
        over = done + 40 * MS + (0 if failed else int(self._random.uniform(0.5, 3) * SECOND))
        if not failed:
            self._say(done + 5 * MS, host, core, words.SCHEDULED, request, 0, blocks * 16)
            self._say(done + 40 * MS, host, core, words.FIRST_TOKEN, request)
        self._say(
            over, host, core, words.FINISHED, request, "FINISHED_ERROR" if failed else "FINISHED_STOPPED", 0 if failed else 32
        )
        self._at(over, lambda _: self._runs(host, -1))

    def _runs(self, host: str, more: int) -> None:
        self._running[host] += more
