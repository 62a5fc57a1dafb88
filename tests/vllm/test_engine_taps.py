"""The log and metrics taps beside a real pair without the plugin.

The tests check what each fault shows in the log and on the page.
There is one pair: D fails what it cannot load, P keeps blocks for four seconds. The tests run in the order of the harm they do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from handrail.records import (
    EngineSample,
    LineClock,
    LogFact,
    LogKind,
    Process,
    ProcessEvent,
    ProcessEventKind,
    Role,
    SchemaReport,
)
from handrail_sidecar.engine_metrics.checks import Expected, page_notes
from handrail_sidecar.engine_metrics.liveness import ProgressSettings
from handrail_sidecar.sources.engine_log import LogSettings, LogSource
from handrail_sidecar.sources.engine_metrics import MetricsSettings, MetricsSource
from vllm.child import free_port
from vllm.pair import MODEL_NAME, Engine, EngineSettings, Pair, find_installation, running_pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

LEASE_S = 4
HUNG_S = 4.0
WAIT_S = 180.0


@dataclass
class Tapped:
    """One engine, and the data of its log and its page."""

    engine: Engine
    logs: LogSource
    metrics: MetricsSource
    facts: dict[str, LogFact] = field(default_factory=dict)
    counted_facts: list[LogFact] = field(default_factory=list)  # by the metrics page
    samples: list[EngineSample] = field(default_factory=list)
    reports: list[SchemaReport] = field(default_factory=list)
    events: list[ProcessEvent] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def take_facts(self, facts: Sequence[LogFact]) -> bool:
        self.facts |= {fact.fact_id: fact for fact in facts}
        self.came.set()
        return True

    async def take_sample(self, record: EngineSample | SchemaReport | LogFact) -> bool:
        if isinstance(record, SchemaReport):
            self.reports.append(record)
        elif isinstance(record, EngineSample):
            self.samples.append(record)
        else:
            self.counted_facts.append(record)
        self.came.set()
        return True

    def tell(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self.came.set()

    async def until(self, met: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not met():
                self.came.clear()
                await self.came.wait()

        await asyncio.wait_for(wait(), WAIT_S)

    def of(self, rid: str) -> dict[LogKind, LogFact]:
        """Return the newest facts of the request with the client's id ``rid``."""
        return {fact.kind: fact for fact in self.facts.values() if fact.request_id and f"-{rid}-" in fact.request_id}

    async def fact(self, rid: str, kind: LogKind) -> LogFact:
        await self.until(lambda: kind in self.of(rid))
        return self.of(rid)[kind]

    def value(self, name: str, label: str = "") -> float:
        return sum(each.value for each in self.samples[-1].values if each.name == name and each.label == label)

    async def counted(self, name: str, at_least: float, label: str = "") -> None:
        await self.until(lambda: bool(self.samples) and self.value(name, label) >= at_least)


@dataclass
class Bed:
    """The pair and both taps."""

    prefill: Tapped
    decode: Tapped

    async def p(self, rid: str) -> dict[str, Any]:
        """Run the first step; return the parameters for D."""
        query = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = await ask(self.prefill.engine, rid, {"max_tokens": 1, "kv_transfer_params": query})
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params

    async def d(self, rid: str, params: dict[str, Any]) -> dict[str, Any]:
        """Run the second step; return ``{"status": ...}`` when it failed."""
        return await ask(self.decode.engine, rid, {"max_tokens": 8, "kv_transfer_params": params})


async def ask(engine: Engine, rid: str, more: dict[str, Any]) -> dict[str, Any]:
    def post() -> dict[str, Any]:
        body = {
            "model": MODEL_NAME,
            "prompt": f"{rid}: a question of its own. " * 16,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        request = urllib.request.Request(
            f"{engine.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Request-Id": rid},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            return {"status": error.code}
        return found

    return await asyncio.to_thread(post)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Path]]:
    logs = tmp_path_factory.mktemp("taps")
    lease = EngineSettings(connector={"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}})
    with running_pair(find_installation(), logs=logs, prefill=lease) as made:
        yield made, logs


def tapped(engine: Engine, role: Role, logs: Path) -> Tapped:
    process = Process(role=role, instance=engine.instance, host="h1")
    made: Tapped

    async def take_facts(facts: Sequence[LogFact]) -> bool:
        return await made.take_facts(facts)

    async def take_sample(record: EngineSample | SchemaReport | LogFact) -> bool:
        return await made.take_sample(record)

    made = Tapped(
        engine,
        LogSource(LogSettings(paths=(str(logs / f"{engine.role}-{engine.port}.log"),), interval_s=0.05), process, take_facts),
        MetricsSource(
            MetricsSettings(
                url=f"{engine.url}/metrics", interval_s=0.5, progress=ProgressSettings(hung_after_ns=int(HUNG_S * 1e9))
            ),
            process,
            take_sample,
            lambda event: made.tell(event),
        ),
    )
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed(pair: tuple[Pair, Path]) -> AsyncIterator[Bed]:
    engines, logs = pair
    made = Bed(tapped(engines.prefill, Role.PREFILL, logs), tapped(engines.decode, Role.DECODE, logs))
    sources = [source for each in (made.prefill, made.decode) for source in (each.logs, each.metrics)]
    for source in sources:
        await source.start()
    yield made
    for source in sources:
        await source.shutdown(1)


async def test_a_good_hand_off_is_counted_and_no_line_says_otherwise(bed: Bed) -> None:
    answer = await bed.d("fine", await bed.p("fine"))
    assert answer["usage"]["completion_tokens"] == 8
    await bed.decode.counted("requests_finished", 1, "length")
    last = bed.decode.samples[-1]
    (moved,) = [each for each in last.histograms if each.name == "kv_transfer_bytes"]
    assert (moved.label, moved.count) == ("nixl", 1)
    assert last.model == MODEL_NAME
    assert not bed.decode.of("fine")
    assert [report.emitters for report in bed.decode.reports] == [("vllm", "vllm-nixl")]
    assert not [note for report in (*bed.decode.reports, *bed.prefill.reports) for note in report.notes]


async def test_block_ids_out_of_range_are_one_failed_fetch(bed: Bed) -> None:
    params = await bed.p("blocks")
    params["remote_block_ids"] = [[900_001 + place for place, _ in enumerate(group)] for group in params["remote_block_ids"]]
    assert await bed.d("blocks", params) == {"status": 500}
    fact = await bed.decode.fact("blocks", LogKind.FETCH_FAILED)
    failed = await bed.decode.fact("blocks", LogKind.REQUEST_FAILED_BY_KV)
    await bed.decode.until(lambda: bed.decode.facts[fact.fact_id].reason is not None)
    fact = bed.decode.facts[fact.fact_id]
    assert (fact.failure, fact.reason, fact.clock) == ("transfer_setup_failed", "NIXL_ERR_INVALID_PARAM", LineClock.LINE)
    assert fact.peer_engine_id == params["remote_engine_id"]
    assert fact.peer_request_id == params["remote_request_id"]
    assert fact.peer == f"{params['remote_host']}:{params['remote_port']}"
    assert failed.request_id == fact.request_id
    assert bed.decode.logs.folder.stats.fetches_failed == 1
    await bed.decode.counted("kv_transfer_failures", 1, "nixl")
    await bed.decode.counted("requests_finished", 1, "error")
    await bed.decode.until(lambda: bool(bed.decode.counted_facts))
    (log_fact,) = bed.decode.counted_facts
    assert (log_fact.kind, log_fact.recogniser, log_fact.lines, log_fact.request_id) == (
        LogKind.FETCH_FAILED,
        "metrics.kv_transfer_failures",
        1,
        None,
    )
    assert log_fact.last_unix_ns - log_fact.at_unix_ns < 10 * 10**9
    assert dict(log_fact.numbers)["computed_tokens"] < 32  # policy "fail": the prompt was not computed
    reading = bed.decode.metrics.reading
    assert reading is not None
    assert "poisoned_sum" in {note.kind for note in page_notes(bed.decode.samples[-1], reading, Expected(role=Role.DECODE))}


async def test_a_peer_that_is_not_there_is_a_failed_handshake(bed: Bed) -> None:
    params = await bed.p("nobody")
    params |= {"remote_port": free_port(), "remote_engine_id": "11111111-2222-3333-4444-555555555555"}
    assert await bed.d("nobody", params) == {"status": 500}
    fact = await bed.decode.fact("nobody", LogKind.HANDSHAKE_FAILED)
    assert (fact.failure, fact.peer_engine_id) == ("handshake_failed", "11111111-2222-3333-4444-555555555555")
    # vLLM's own clean-up request meets the missing peer too: reported, and no third failed fetch
    await bed.decode.until(lambda: LogKind.NOTIFICATION_FAILED in {each.kind for each in bed.decode.facts.values()})
    assert bed.decode.logs.folder.stats.fetches_failed == 2


async def test_blocks_that_are_read_after_their_lease_are_one_stale_read(bed: Bed) -> None:
    params = await bed.p("late")
    expired = await bed.prefill.fact("late", LogKind.EXPIRED)
    assert expired.request_id == params["remote_request_id"]
    assert dict(expired.numbers) == {"readers": 0.0}
    await bed.prefill.counted("kv_expired_requests", 1, "nixl")
    answer = await bed.d("late", params)
    assert answer.get("status", 200) == 200, "the client sees nothing of it"
    await bed.p("next")  # an idle P looks for notifications at its next step only
    stale = await bed.prefill.fact("late", LogKind.STALE_READ)
    assert stale.request_id == expired.request_id
    assert dict(stale.numbers)["since_expiry_s"] >= 0


async def test_a_stopped_core_is_a_hang_while_its_page_answers(bed: Bed) -> None:
    engine = bed.decode.engine
    params = await bed.p("hang")
    (core,) = [pid for pid in children(engine.child.pid) if b"EngineCore" in command(pid)]
    task = asyncio.create_task(ask(engine, "hang", {"max_tokens": 1500, "kv_transfer_params": params}))
    await bed.decode.counted("requests_running", 1)
    os.kill(core, signal.SIGSTOP)
    try:
        await bed.decode.until(lambda: ProcessEventKind.HUNG in {event.kind for event in bed.decode.events})
    finally:
        os.kill(core, signal.SIGCONT)
    await bed.decode.until(lambda: bed.decode.events[-1].kind is ProcessEventKind.RECOVERED)
    assert bed.decode.metrics.stats.up
    await task


async def test_a_killed_core_is_a_dead_engine(bed: Bed) -> None:
    (core,) = [pid for pid in children(bed.decode.engine.child.pid) if b"EngineCore" in command(pid)]
    os.kill(core, signal.SIGKILL)
    await bed.decode.until(lambda: LogKind.ENGINE_DEAD in {fact.kind for fact in bed.decode.facts.values()})
    await bed.decode.until(lambda: bed.decode.events[-1].kind is ProcessEventKind.UNREACHABLE)


def children(pid: int) -> list[int]:
    """Return all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
