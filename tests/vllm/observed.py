"""A real pair with the plugin in both engines, and their recorded plugin data.

Plugin sources in this process keep every record.
The package reaches the engine's environment by PYTHONPATH: a folder has a link to the package and the metadata with the entry
point of ``pyproject.toml``, like an installed wheel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from handrail.records import KvFetch, KvPublish, Observation, Process, ProcessEvent, ProcessEventKind, Role
from handrail_sidecar.sources.plugin_socket import PluginSource
from vllm.pair import ENGINE_ENV, MODEL_NAME, EngineSettings, Installation, Pair, running_pair

_ROOT = Path(__file__).parents[2]
_ASK_P = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
RECORDS_S = 120.0

R = TypeVar("R")


def make_plugin_site(folder: Path) -> Path:
    """Make a PYTHONPATH folder that holds the package as if it were installed."""
    folder.mkdir(parents=True)
    (folder / "handrail").symlink_to(_ROOT / "sidecar/handrail")
    info = folder / "handrail-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: handrail\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(_entry_points((_ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    return folder


def _entry_points(pyproject: str) -> str:
    """Return the plugin's section of pyproject.toml in the form of entry_points.txt.

    ``tomllib`` is not in Python 3.10.
    """
    section = pyproject.split('[project.entry-points."vllm.general_plugins"]\n', 1)[1].split("\n\n", 1)[0]
    return "[vllm.general_plugins]\n" + section.replace('"', "") + "\n"


@dataclass(slots=True)
class ReceivedRecords:
    """What one source received; the loop's thread writes, the test's reads."""

    source: PluginSource
    records: list[Observation] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in tuple(self.records) if isinstance(record, kind)]

    def final(self, kind: type[R]) -> list[R]:
        """Return the last final record of each span."""
        found: dict[str, R] = {}
        for record in self.of(kind):
            if not getattr(record, "provisional", False):
                found[record.ids.span_id] = record  # type: ignore[attr-defined]
        return list(found.values())

    def fetch_of(self, request_id: str, timeout_s: float = RECORDS_S) -> KvFetch:
        """Return the final fetch of the request with the client's id ``request_id``.

        There is exactly one.
        """
        mine = self.wait(KvFetch, lambda found: any(f"-{request_id}-" in f.request_id for f in found), timeout_s)
        (fetch,) = [f for f in mine if f"-{request_id}-" in f.request_id]
        return fetch

    def publish_of(self, request_id: str, enough: Callable[[KvPublish], bool], timeout_s: float = RECORDS_S) -> KvPublish:
        """Return the newest publish record of ``request_id`` once ``enough`` accepts it."""
        mine = self.wait(KvPublish, lambda found: any(f"-{request_id}-" in p.request_id and enough(p) for p in found), timeout_s)
        (publish,) = [p for p in mine if f"-{request_id}-" in p.request_id]
        return publish

    def wait_published(self, request_id: str, timeout_s: float = RECORDS_S) -> None:
        """Return once the publish of the request has arrived.

        A killed process loses its last 0.1 s.
        """
        deadline_s = time.monotonic() + timeout_s
        while not any(f"-{request_id}-" in each for each in tuple(self.source.merge.publishes.open)):
            assert time.monotonic() < deadline_s, f"{request_id} was not published"
            time.sleep(0.02)

    def wait_records(self, kind: type[R], count: int, timeout_s: float = RECORDS_S) -> list[R]:
        """Return all records of ``kind`` once there are ``count``, else at the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while len(found := self.of(kind)) < count and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found

    def wait_event(self, kind: ProcessEventKind, pid: int, timeout_s: float = RECORDS_S) -> list[ProcessEvent]:
        """Return events of ``kind`` of the process ``pid``, as soon as there is one."""
        deadline_s = time.monotonic() + timeout_s
        while (
            not (found := [e for e in self.of(ProcessEvent) if e.kind is kind and e.pid == pid]) and time.monotonic() < deadline_s
        ):
            time.sleep(0.05)
        return found

    def wait(self, kind: type[R], enough: Callable[[list[R]], bool], timeout_s: float = RECORDS_S) -> list[R]:
        """Return the final records of ``kind`` as soon as ``enough`` accepts them.

        At the timeout it returns those that exist (an assertion shows more).
        """
        deadline_s = time.monotonic() + timeout_s
        while not enough(found := self.final(kind)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found


@dataclass(frozen=True, slots=True)
class ObservedPair:
    """A pair that answers, and the records of its plugins."""

    pair: Pair
    prefill: ReceivedRecords
    decode: ReceivedRecords
    listeners: Listeners

    def prefill_step(self, prompt: str, request_id: str) -> dict[str, Any]:
        """Run the first step alone; return the connector's parameters for D."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": dict(_ASK_P)}
        params: dict[str, Any] = post(self.pair.prefill.url, body, request_id).body["kv_transfer_params"]
        return params

    def decode_step(self, prompt: str, request_id: str, params: dict[str, Any], timeout_s: float = 300.0) -> Answer:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "kv_transfer_params": params}
        answer = post(self.pair.decode.url, body, request_id, timeout_s)
        return Answer(answer.status, answer.body, params)

    def two_step(self, prompt: str, request_id: str, *, change: Callable[[dict[str, Any]], None] | None = None) -> Answer:
        """Run one request by both steps, greedy.

        ``change`` may spoil the parameters on their way to D.
        """
        params = self.prefill_step(prompt, request_id)
        if change is not None:
            change(params)
        return self.decode_step(prompt, request_id, params)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a completion."""

    status: int
    body: dict[str, Any]
    params: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        found: str = self.body["choices"][0]["text"]
        return found


def post(url: str, body: Mapping[str, Any], request_id: str, timeout_s: float = 300.0) -> Answer:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, json.load(response))
    except urllib.error.HTTPError as error:
        return Answer(error.code, json.loads(error.read() or b"{}"))


def metric(url: str, name: str) -> float:
    """Return the sum over label sets of one sample of ``url``'s /metrics; 0 if absent."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


class Listeners:
    """Plugin sources on a loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._all: list[ReceivedRecords] = []

    def listen(self, role: str, path: Path) -> ReceivedRecords:
        records: list[Observation] = []
        lines: list[tuple[str, str]] = []

        def line(_: int, level: str, text: str) -> None:
            lines.append((level, text))

        source = PluginSource(path, Process(role=Role(role), instance=f"{role}:1", host="h"), records.append, line=line)
        received_records = ReceivedRecords(source, records, lines)
        self._run(source.start())
        self._all.append(received_records)
        return received_records

    def stop(self, received_records: ReceivedRecords) -> None:
        self._run(received_records.source.shutdown(1.0))

    def close(self) -> None:
        for received_records in self._all:
            self.stop(received_records)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


@contextlib.contextmanager
def observed_pair(
    installation: Installation,
    folder: Path,
    *,
    prefill_connector: Mapping[str, object] | None = None,
    decode_connector: Mapping[str, object] | None = None,
    flags: tuple[str, ...] = (),
) -> Iterator[ObservedPair]:
    """Run a pair with the plugin in each of its processes."""
    site = make_plugin_site(folder / "site")
    sockets = {role: folder / f"{role}.sock" for role in ("prefill", "decode")}

    def settings(role: str, connector: Mapping[str, object] | None) -> EngineSettings:
        env = {"PYTHONPATH": f"{ENGINE_ENV['PYTHONPATH']}:{site}", "HANDRAIL_SOCKET": str(sockets[role])}
        return EngineSettings(env=env, connector=connector or {}, flags=flags)

    with contextlib.ExitStack() as stack:
        listeners = Listeners()
        stack.callback(listeners.close)
        received_records = {role: listeners.listen(role, path) for role, path in sockets.items()}
        prefill, decode = settings("prefill", prefill_connector), settings("decode", decode_connector)
        pair = stack.enter_context(running_pair(installation, logs=folder, prefill=prefill, decode=decode))
        yield ObservedPair(pair, received_records["prefill"], received_records["decode"], listeners)
