"""Kills and stops of the decode engine, with the plugin and without it.

The tests check the outcomes of the request and its neighbours, and the process event.
There is one prefill engine. D starts again, at the same address, when the test before ended it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from handrail_collector.rows import FetchRow, RequestRow
from vllm.client import Request, Result, load, new_traceparent
from vllm.client import prompt as random_words
from vllm.faulty_proxy import HEADER, Fault
from vllm.figures import Figures
from vllm.handoffs import Bed, processes, running_bed, wait_for
from vllm.pair import find_installation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

CORE = "VLLM::EngineCore"
TITLE = "engines that end or stand still"
LONG = 1200  # tokens: a neighbour is still answered when the engine ends
ROWS_S = 180.0


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with running_bed(find_installation(), tmp_path_factory.mktemp("deaths")) as found:
        found.start("prefill")
        yield found


@pytest.fixture
def decode(bed: Bed) -> Iterator[Bed]:
    """Return a bed whose D is unharmed: a new one when the test before ended it."""
    if "decode" not in bed.engines:
        bed.start("decode")
        bed.wait_healthy()
    yield bed
    if "decode" in bed.engines and not processes(bed.engines["decode"], CORE):
        bed.stop("decode")


def request(
    name: str, fault: Fault = Fault.NONE, *, stream: bool = True, tokens: int = 12, leaves_after_s: float = 60.0
) -> Request:
    source = random.Random(name)
    return Request(
        request_id=name,
        traceparent=new_traceparent(source),
        chat=False,
        stream=stream,
        prompt=random_words(source, (60, 100)),
        max_tokens=tokens,
        more_headers=((HEADER, fault.value),),
        leaves_after_s=leaves_after_s,
    )


class Asking(threading.Thread):
    """Requests that run beside the test."""

    def __init__(self, bed: Bed, *requests: Request) -> None:
        super().__init__()
        self._bed, self._requests = bed, requests
        self.results: list[Result] = []
        self.start()

    def run(self) -> None:
        self.results = load(self._bed.edge_url, self._requests, len(self._requests))

    def end(self) -> list[Result]:
        self.join(90)
        assert not self.is_alive()
        return self.results


def streaming(bed: Bed, name: str) -> Asking:
    """Start a neighbour request that D is answering."""
    neighbour = Asking(bed, request(name, tokens=LONG))
    wait_for(lambda: answers(bed), f"{name} is answered", 180)
    return neighbour


def answers(bed: Bed) -> bool:
    """Tell whether D runs a request, the only one that exists."""
    with urllib.request.urlopen(f"{bed.engines['decode'].url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return any(line.startswith("vllm:num_requests_running{") and not line.endswith(" 0.0") for line in lines)


def edge_rows(row: RequestRow) -> bool:
    """Tell whether a row is decided and has what the client saw."""
    return row.version > 0 and row.scope == "edge"


def fetch_of(bed: Bed, name: str) -> FetchRow:
    """Return the one hand-off of the request."""
    (found,) = [fetch for fetch in bed.fetches() if fetch.client_request_id == name]
    return found


def decided(bed: Bed, wanted: dict[str, tuple[str, ...]], figures: Figures, what: str) -> dict[str, RequestRow]:
    """Return the rows of these requests once their hand-offs have one of the outcomes.

    It asserts that they have one.
    """

    def settled(rows: dict[str, list[RequestRow]]) -> bool:
        return all(len(rows.get(n, ())) == 1 and edge_rows(rows[n][0]) and rows[n][0].kv_outcome in k for n, k in wanted.items())

    rows = bed.wait_rows(settled, ROWS_S)
    for name, known in wanted.items():
        assert len(rows.get(name, ())) == 1, (name, len(rows.get(name, ())))
        row = rows[name][0]
        figures.add(TITLE, f"{what:34} {name:18} {row.outcome:18} KV {row.kv_outcome} {row.kv_reason or ''}")
        assert row.kv_outcome in known, (name, row.kv_outcome, row.kv_reason, row.kv_evidence, row.outcome)
        assert row.version > 0
    return {name: rows[name][0] for name in wanted}


def test_a_stopped_core_is_hung_behind_a_200_and_its_requests_resume(decode: Bed, figures: Figures) -> None:
    (core,) = processes(decode.engines["decode"], CORE)
    neighbour = streaming(decode, "stop-neighbour")
    os.kill(core, signal.SIGSTOP)
    try:
        loading = Asking(decode, request("stop-load"))
        assert decode.wait_event("hung", core).role == "decode"
        with urllib.request.urlopen(f"{decode.engines['decode'].url}/health", timeout=60) as response:
            assert response.status == 200
    finally:
        os.kill(core, signal.SIGCONT)
    for result in (*neighbour.end(), *loading.end()):
        assert result.answer.error is None
    rows = decided(decode, {"stop-load": ("ok",), "stop-neighbour": ("ok",)}, figures, "EngineCore stopped")
    assert {row.outcome for row in rows.values()} == {"ok"}
    assert decode.wait_event("recovered", core).role == "decode"


def test_too_few_blocks_end_d_and_its_neighbours(decode: Bed, figures: Figures) -> None:
    neighbour = streaming(decode, "few-neighbour")
    (core,) = processes(decode.engines["decode"], CORE)
    Asking(decode, request("few", Fault.FEW_BLOCKS)).end()
    (result,) = neighbour.end()
    assert result.answer.usage is None, "the neighbour was to be cut"
    rows = decided(decode, {"few": ("failed",), "few-neighbour": ("ok",)}, figures, "too few blocks")
    assert rows["few"].kv_reason == "engine_lost"
    few = fetch_of(decode, "few")
    assert few.wait_ns is not None, "its load had begun"
    assert (few.transfer_ns, few.notice_ns) == (None, None)
    assert all(row.outcome not in ("ok", "tainted") for row in rows.values())
    assert decode.wait_event("dead", core).role == "decode"


def test_a_missing_engine_id_ends_d_when_the_client_gives_up(decode: Bed, figures: Figures) -> None:
    """The API server's clean-up request has the same parameters and ends the core.

    vLLM 0.32 makes none for a stream.
    """
    neighbour = streaming(decode, "none-neighbour")
    (core,) = processes(decode.engines["decode"], CORE)
    Asking(decode, request("none", Fault.NO_ENGINE, stream=False, leaves_after_s=2.0)).end()
    neighbour.end()
    rows = decided(decode, {"none": ("aborted", "failed"), "none-neighbour": ("ok",)}, figures, "no engine id")
    assert rows["none"].outcome not in ("ok", "tainted")
    assert decode.wait_event("dead", core).role == "decode"


def test_an_engine_on_sigterm_is_stopped_and_its_requests_are_given_up(decode: Bed, figures: Figures) -> None:
    (core,) = processes(decode.engines["decode"], CORE)
    neighbour = streaming(decode, "term-neighbour")
    decode.stop("decode")
    neighbour.end()
    assert decode.wait_event("stopped", core).role == "decode"
    assert not [e for e in decode.process_events() if e.pid == core and e.kind == "dead"]
    rows = decided(decode, {"term-neighbour": ("ok",)}, figures, "SIGTERM to D")
    assert rows["term-neighbour"].outcome not in ("ok", "tainted")


def test_a_killed_core_is_a_dead_engine_and_its_requests_are_lost(decode: Bed, figures: Figures) -> None:
    (core,) = processes(decode.engines["decode"], CORE)
    neighbour = streaming(decode, "kill-neighbour")
    loading = Asking(decode, request("kill-load", Fault.NO_ENGINE))  # a load that never begins
    wait_for(lambda: any(f.open and f.client_request_id == "kill-load" for f in decode.fetches()), "its load is open", 180)
    opened = fetch_of(decode, "kill-load")
    assert (opened.wait_ns, opened.transfer_ns) == (None, None)
    assert (opened.duration_ns or 0) >= 10**9
    os.kill(core, signal.SIGKILL)
    assert decode.wait_event("dead", core).role == "decode"
    results = [*loading.end(), *neighbour.end()]
    assert all(result.answer.usage is None for result in results)
    rows = decided(decode, {"kill-load": ("failed",), "kill-neighbour": ("ok",)}, figures, "EngineCore killed")
    assert rows["kill-load"].kv_reason == "engine_lost"
    assert all(row.outcome not in ("ok", "tainted") for row in rows.values())
