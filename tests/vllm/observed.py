"""A real pair with the plugin in both engines, and plugin sources in this process that keep every record.

The package reaches the engine's environment by PYTHONPATH: a folder with a link to the package and the metadata that names the entry
point of ``pyproject.toml``, as an installed wheel would have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from handrail.records import Observation, Process, Role
from handrail.sources.plugin import PluginSource
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
RECORDS_S = 20.0

R = TypeVar("R")


def make_plugin_site(folder: Path) -> Path:
    """A folder for PYTHONPATH that holds the package as if it were installed."""
    folder.mkdir(parents=True)
    (folder / "handrail").symlink_to(_ROOT / "sidecar/handrail")
    info = folder / "handrail-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: handrail\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(_entry_points((_ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    return folder


def _entry_points(pyproject: str) -> str:
    """The plugin's section of pyproject.toml in the form of entry_points.txt; ``tomllib`` is not in Python 3.10."""
    section = pyproject.split('[project.entry-points."vllm.general_plugins"]\n', 1)[1].split("\n\n", 1)[0]
    return "[vllm.general_plugins]\n" + section.replace('"', "") + "\n"


@dataclass(slots=True)
class Heard:
    """What one source said. Written by the loop's thread, read by the test's."""

    source: PluginSource
    records: list[Observation] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in tuple(self.records) if isinstance(record, kind)]

    def final(self, kind: type[R]) -> list[R]:
        """The last final record of each span."""
        found: dict[str, R] = {}
        for record in self.of(kind):
            if not getattr(record, "provisional", False):
                found[record.ids.span_id] = record  # type: ignore[attr-defined]
        return list(found.values())

    def wait(self, kind: type[R], enough: Callable[[list[R]], bool], timeout_s: float = RECORDS_S) -> list[R]:
        """The final records of ``kind`` as soon as ``enough`` likes them, else those at the end (an assertion says more)."""
        deadline_s = time.monotonic() + timeout_s
        while not enough(found := self.final(kind)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found


@dataclass(frozen=True, slots=True)
class ObservedPair:
    """A pair that answers, and what its plugins said."""

    pair: Pair
    prefill: Heard
    decode: Heard

    def two_step(self, prompt: str, request_id: str, *, change: Callable[[dict[str, Any]], None] | None = None) -> Answer:
        """One request by both steps, greedy; ``change`` may spoil the parameters on their way to D."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        first = post(self.pair.prefill.url, {**body, "max_tokens": 1, "kv_transfer_params": dict(_ASK_P)}, request_id)
        params = first.body.get("kv_transfer_params")
        if params and change is not None:
            change(params)
        second = post(self.pair.decode.url, {**body, "kv_transfer_params": params} if params else body, request_id)
        return Answer(second.status, second.body, params)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back of a completion."""

    status: int
    body: dict[str, Any]
    params: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        found: str = self.body["choices"][0]["text"]
        return found


def post(url: str, body: Mapping[str, Any], request_id: str, timeout_s: float = 90.0) -> Answer:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, json.load(response))
    except urllib.error.HTTPError as error:
        return Answer(error.code, json.loads(error.read() or b"{}"))


def metric(url: str, name: str) -> float:
    """The sum over label sets of one sample of ``url``'s /metrics; 0 where it is absent."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextlib.contextmanager
def listening(sockets: Mapping[str, Path]) -> Iterator[dict[str, Heard]]:
    """Plugin sources for the roles of ``sockets``, on a loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    heard: dict[str, Heard] = {}

    def run(work: Any) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, loop)
        future.result(10)

    try:
        for role, path in sockets.items():
            process = Process(role=Role(role), instance=f"{role}:1", host="h")
            records: list[Observation] = []
            lines: list[tuple[str, str]] = []
            source = PluginSource(path, process, records.append, line=lambda _, level, line, to=lines: to.append((level, line)))  # type: ignore[misc]
            heard[role] = Heard(source, records, lines)
            run(source.start())
        yield heard
    finally:
        for each in heard.values():
            run(each.source.shutdown(1.0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextlib.contextmanager
def observed_pair(
    installation: Installation,
    folder: Path,
    *,
    prefill_connector: Mapping[str, object] | None = None,
    decode_connector: Mapping[str, object] | None = None,
    flags: tuple[str, ...] = (),
) -> Iterator[ObservedPair]:
    """A pair with the plugin in each of its processes."""
    site = make_plugin_site(folder / "site")
    sockets = {role: folder / f"{role}.sock" for role in ("prefill", "decode")}

    def settings(role: str, connector: Mapping[str, object] | None) -> EngineSettings:
        env = {"PYTHONPATH": f"{ENGINE_ENV['PYTHONPATH']}:{site}", "HANDRAIL_SOCKET": str(sockets[role])}
        return EngineSettings(env=env, connector=connector or {}, flags=flags)

    with listening(sockets) as heard:
        prefill, decode = settings("prefill", prefill_connector), settings("decode", decode_connector)
        with running_pair(installation, logs=folder, prefill=prefill, decode=decode) as pair:
            yield ObservedPair(pair, heard["prefill"], heard["decode"])
