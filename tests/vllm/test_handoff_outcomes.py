"""Compare the reported outcomes of 200 hand-offs with what was done to them.

Good and bad requests are mixed, under both failure policies.
There are two pairs, one after the other, at the same addresses; sidecars, edge and collector keep running.
The truth comes from the proxy between the steps and from the engines' own log files. Each P is killed at the end of its
hundred, with requests between them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from handrail_collector.rows import RequestRow
from vllm.client import Request, Result, load, new_traceparent
from vllm.client import prompt as random_words
from vllm.faulty_proxy import HEADER, Fault
from vllm.figures import Figures
from vllm.handoffs import Bed, processes, running_bed, wait_for
from vllm.observed import post
from vllm.pair import MODEL_NAME, find_installation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

LEASE_S = 5
CONCURRENCY = 8
ROWS_S = 180.0
TITLE = "hand-offs on the real pair: what was done, and what is said"


class Done(str, Enum):
    """What the test does to a request."""

    GOOD = "good"
    AGAIN = "part of the prompt is here already"
    BAD_BLOCKS = "block ids out of range"
    DEAD_PORT = "side channel of nobody"
    NEVER = "never fetched, lease ended"
    LATE = "fetched after the lease ended"
    GONE = "client gone, peer does not answer"
    GONE_MIDWAY = "client gone, KV on its way"
    KILLED = "P killed between the steps"


COUNTS = {
    Done.GOOD: 60,
    Done.AGAIN: 8,
    Done.BAD_BLOCKS: 8,
    Done.DEAD_PORT: 3,
    Done.NEVER: 6,
    Done.LATE: 5,
    Done.GONE: 2,
    Done.GONE_MIDWAY: 3,
    Done.KILLED: 5,
}
FAULTS = {
    Done.BAD_BLOCKS: Fault.BAD_BLOCKS,
    Done.DEAD_PORT: Fault.DEAD_PORT,
    Done.NEVER: Fault.NEVER,
    Done.LATE: Fault.WAIT,
    Done.GONE: Fault.DEAD_PORT,
    Done.GONE_MIDWAY: Fault.WAIT,
    Done.KILLED: Fault.WAIT,
}
LEAVES_AFTER_S = {Done.GONE: 2.5, Done.GONE_MIDWAY: 3.0}
FAILURES = {"recompute": "recomputed", "fail": "failed"}


@dataclass(frozen=True, slots=True)
class Sent:
    """One request with what was done to it and what came back."""

    policy: str
    done: Done
    result: Result

    @property
    def request_id(self) -> str:
        return str(self.result.request.request_id)

    @property
    def expected(self) -> str:
        """Return the expected outcome of its hand-off."""
        others = {Done.GOOD: "ok", Done.AGAIN: "ok", Done.NEVER: "expired", Done.LATE: "stale_read"}
        if self.done in (Done.GONE, Done.GONE_MIDWAY):
            return "aborted"
        return others.get(self.done) or FAILURES[self.policy]


def requests(policy: str, wanted: Sequence[Done]) -> list[tuple[Done, Request]]:
    source = random.Random(f"{policy}:{len(wanted)}")
    shared = random_words(source, (90, 90))
    found = []
    for number, done in enumerate(wanted):
        again = f"{shared} {random_words(source, (8, 30))}" if done is Done.AGAIN else None
        request = Request(
            request_id=f"{policy}-{done.name.lower().replace('_', '')}-{number:03d}",
            traceparent=new_traceparent(source) if number % 3 else None,
            chat=number % 2 == 1,
            stream=number % 4 < 2,
            prompt=again or random_words(source),
            more_headers=((HEADER, FAULTS.get(done, Fault.NONE).value),),
            leaves_after_s=LEAVES_AFTER_S.get(done),
        )
        found.append((done, request))
    return found


def send(bed: Bed, policy: str, batch: Sequence[tuple[Done, Request]]) -> list[Sent]:
    results = load(bed.edge_url, [request for _, request in batch], CONCURRENCY)
    return [Sent(policy, done, result) for (done, _), result in zip(batch, results, strict=True)]


class Sending(threading.Thread):
    """Run ``send`` in a thread while the test does something else."""

    def __init__(self, bed: Bed, policy: str, batch: Sequence[tuple[Done, Request]]) -> None:
        super().__init__()
        self._of = (bed, policy, batch)
        self.sent: list[Sent] = []
        self.start()

    def run(self) -> None:
        self.sent = send(*self._of)

    def end(self) -> list[Sent]:
        self.join(180)
        assert not self.is_alive()
        return self.sent


def hundred(bed: Bed, policy: str) -> list[Sent]:
    """Do everything under one policy, to one pair; return 100 sent requests."""
    lease = {"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
    p = bed.start("prefill", connector=lease)
    bed.start("decode", connector={"kv_load_failure_policy": policy})
    bed.wait_healthy()
    wanted = [done for done, count in COUNTS.items() for _ in range(count)]
    apart = {Done.LATE, Done.GONE_MIDWAY, Done.KILLED}
    mixed = [done for done in wanted if done not in apart]
    random.Random(policy).shuffle(mixed)
    first = Done.GOOD  # D must know P before anything is done to it
    sent = send(bed, policy, requests(f"{policy}1", [first]))
    mixed.remove(first)

    late = requests(f"{policy}2", [Done.LATE] * COUNTS[Done.LATE])
    holding = Sending(bed, policy, late)
    sent += send(bed, policy, requests(policy, mixed))
    for _, request in late:
        wait_released(p.child.log, str(request.request_id))
        bed.let_go(str(request.request_id))
    sent += holding.end()
    for each in sent:
        if each.done is Done.NEVER:
            wait_released(p.child.log, each.request_id)

    gone = requests(f"{policy}3", [Done.GONE_MIDWAY] * COUNTS[Done.GONE_MIDWAY])
    sent += with_p_stopped(bed, policy, gone)

    killed = requests(f"{policy}4", [Done.KILLED] * COUNTS[Done.KILLED])
    between = Sending(bed, policy, killed)
    bed.wait_held(*(str(request.request_id) for _, request in killed))
    bed.kill("prefill")
    for _, request in killed:
        bed.let_go(str(request.request_id))
    return sent + between.end()


def with_p_stopped(bed: Bed, policy: str, batch: Sequence[tuple[Done, Request]]) -> list[Sent]:
    """Stop P's workers while D reads from them.

    They stay stopped until the clients have left and D has noticed.
    """
    going = Sending(bed, policy, batch)
    names = [str(request.request_id) for _, request in batch]
    bed.wait_held(*names)
    workers = processes(bed.engines["prefill"], "VLLM::Worker")
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        for name in names:
            bed.let_go(name)
        sent = going.end()
        for name in names:
            wait_for((bed.control / f"{name}.left").exists, f"{name} left", 120.0)
        body = {"model": MODEL_NAME, "prompt": "of its own", "max_tokens": 1}
        assert post(bed.engines["decode"].url, body, f"{policy}-after").status == 200
        return sent
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def wait_released(log: Path, name: str) -> None:
    """Wait until P's own log reports that it released the blocks."""

    def released() -> bool:
        text = log.read_text(errors="replace")
        return any("expired KV blocks" in line and f"-{name}-" in line for line in text.splitlines())

    wait_for(released, f"{name} released by P", LEASE_S + 180.0)


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """What was sent, and the rows that it became in the end."""

    sent: list[Sent]
    rows: dict[str, list[RequestRow]]
    bed: Bed

    def outcome(self, sent: Sent) -> str | None:
        found = self.rows.get(sent.request_id, [])
        return found[0].kv_outcome if len(found) == 1 else f"{len(found)} rows"


@pytest.fixture(scope="module")
def outcome_row(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OutcomeRow]:
    with running_bed(find_installation(), tmp_path_factory.mktemp("handoffs")) as bed:
        sent: list[Sent] = []
        for policy in FAILURES:
            sent += hundred(bed, policy)
            bed.stop("decode")

        def settled(rows: dict[str, list[RequestRow]]) -> bool:
            reported_outcome_row = OutcomeRow(sent, rows, bed)
            return all(reported_outcome_row.outcome(each) == each.expected for each in sent)

        yield OutcomeRow(sent, bed.wait_rows(settled, ROWS_S), bed)


def test_every_outcome_is_what_was_done(outcome_row: OutcomeRow, figures: Figures) -> None:
    table = Counter((each.policy, each.done, each.expected, outcome_row.outcome(each)) for each in outcome_row.sent)
    for (policy, done, expected, outcome), count in sorted(table.items(), key=str):
        mark = "" if expected == outcome else f"   ✗ expected {expected}"
        figures.add(TITLE, f"{policy:10} {done.value:36} {count:4} {outcome}{mark}")
    right = sum(count for (_, _, expected, outcome), count in table.items() if expected == outcome)
    figures.add(TITLE, f"right: {right} of {len(outcome_row.sent)}")
    assert len(outcome_row.sent) == 200
    wrong = [
        (each.request_id, each.expected, outcome_row.outcome(each))
        for each in outcome_row.sent
        if outcome_row.outcome(each) != each.expected
    ]
    for name, *_ in wrong[:8]:
        for row in outcome_row.rows.get(name, []):
            print(
                name, row.outcome, row.kv_outcome, row.kv_reason, row.kv_evidence, [j.evidence for j in row.joins], row.findings
            )
    assert not wrong, f"{len(wrong)}: {wrong[:8]}"


def test_what_the_client_got_is_another_matter(outcome_row: OutcomeRow) -> None:
    """The client's outcome differs from the outcome of the hand-off.

    An answer from blocks that were given up ends well for the client, but counts as good nowhere.
    A bad one under policy ``fail`` never ends well.
    A recomputed one is good.
    """
    for each in outcome_row.sent:
        (row,) = outcome_row.rows[each.request_id]
        if each.done is Done.LATE:
            assert (row.outcome, each.result.status) == ("tainted", 200), row
        elif each.expected == "failed":
            assert each.result.answer.error, each.request_id
            assert row.outcome not in ("ok", "tainted"), row
        elif each.expected in ("ok", "recomputed"):
            assert (row.outcome, each.result.answer.error) == ("ok", None), row


def test_every_verdict_names_its_source(outcome_row: OutcomeRow) -> None:
    bare = [(each.request_id, each.expected) for each in outcome_row.sent if not outcome_row.rows[each.request_id][0].kv_evidence]
    assert not bare, bare[:5]


def test_every_failure_that_the_engines_counted_is_explained(outcome_row: OutcomeRow, figures: Figures) -> None:
    """The engines' metrics pages count what the plugin reports for each request.

    Nothing is counted that no request explains.
    """
    found = [row.detail for row in outcome_row.bed.findings() if row.kind == "unexplained_failures"]
    figures.add(TITLE, f"failures that the engines counted and no request explains: {len(found)} {found}")
    assert not found


def test_both_engines_were_killed_and_came_back(outcome_row: OutcomeRow) -> None:
    kinds = Counter((event.role, event.kind) for event in outcome_row.bed.process_events())
    assert kinds["prefill", "dead"] >= 2, kinds
    assert kinds["prefill", "restarted"] + kinds["prefill", "started"] >= 2, kinds
