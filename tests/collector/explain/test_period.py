"""The explanation of a period against its rows.

It is exact, also from rollups, with several versions, late rows and withdrawn rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import pytest

from builders.gaps import gaps_of
from builders.store_rows import START_UNIX_NS, Fleet, request_rows
from doubles.failing_disk import StoppedError, StoppingFiles
from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.explain.period.answer import answered
from handrail_collector.explain.period.question import DEFAULT_NS, Question
from handrail_collector.explain.period.report import NEEDED, PeriodAnswer, ScopeAnswer, TailVerdict, explain
from handrail_collector.rows import MERGED, PhaseRow, RequestRow
from handrail_collector.store.filters import PeriodQuery
from handrail_collector.store.layout import DAY_NS, HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.manifest import ManifestReader, StoreDamagedError, files_of
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries.period import load_period
from handrail_collector.store.read import StoreReader
from handrail_collector.store.rollups import BIN_ERROR, due
from handrail_collector.store.schema import Table

HOUR = START_UNIX_NS // HOUR_NS + 1
WHOLE = PeriodQuery(since_unix_ns=HOUR * HOUR_NS, until_unix_ns=(HOUR + 3) * HOUR_NS)
LATER = (HOUR + 100) * HOUR_NS
SETTINGS = UpkeepSettings(rollups=True, grace_ns=0)


def rows(count: int, seed: int = 5) -> list[RequestRow]:
    """Return requests over three hours; an instance's last number gives its host."""
    made = []
    for index, row in enumerate(request_rows(count, Fleet(prefill=2, decode=2), seed=seed)):
        hosts = {
            f"{role}_host": f"{role[0]}{getattr(row, f'{role}_instance').split('.')[-1][0]}" for role in ("prefill", "decode")
        }
        started = HOUR * HOUR_NS + index * 3 * HOUR_NS // count
        made.append(replace(row, started_unix_ns=started, version=1, first_offset=index, last_offset=index, **hosts))  # type: ignore[arg-type]
    return made


def waiting(row: RequestRow, phase: str, excess_ns: int) -> RequestRow:
    """Return the row with one phase longer."""
    phases = tuple(replace(p, duration_ns=p.duration_ns + excess_ns) if p.phase == phase else p for p in row.phases)
    return replace(row, phases=phases, ttft_token_ns=(row.ttft_token_ns or 0) + excess_ns)


@dataclass
class Store:
    """A store that is being written, and questions to it."""

    root: Path
    publisher: StorePublisher
    reader: StoreReader
    end: int = 0

    def publish(self, made: Sequence[RequestRow]) -> None:
        self.publisher.publish(self.end, self.end + len(made), self.end + len(made), [], made)
        self.end += len(made)

    def upkeep(self, settings: UpkeepSettings = SETTINGS, now_unix_ns: int = LATER) -> Upkeep:
        upkeep = Upkeep(self.publisher, settings, lambda: now_unix_ns)
        upkeep.run_pass()
        assert upkeep.stats.failures == 0
        return upkeep

    def answer(self, of: PeriodQuery = WHOLE, *, fast: bool = False) -> PeriodAnswer:
        return explain(load_period(self.reader, of, fast=fast))

    def edge(self, of: PeriodQuery = WHOLE, *, fast: bool = False) -> ScopeAnswer:
        (scope,) = self.answer(of, fast=fast).scopes
        return scope

    def paths(self, table: Table) -> set[str]:
        return {file.path for file in files_of(ManifestReader(self.root).publishes(), table)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    root = tmp_path / "store"
    publisher, reader = StorePublisher(root, now_unix_ns=lambda: LATER), StoreReader(root, threads=1)
    publisher.open()
    yield Store(root, publisher, reader)
    reader.close()
    publisher.close()


def rank(values: Sequence[int], q: float) -> int:
    return sorted(values)[max(1, ceil(q * len(values) - 1e-9)) - 1]


def summary(made: Sequence[RequestRow]) -> dict[str, object]:
    """Return the exact answer about these requests, counted one by one."""
    ttft = [row.ttft_token_ns for row in made if row.ttft_token_ns is not None]
    slow = [row for row in made if (row.ttft_token_ns or 0) >= rank(ttft, 0.99)]
    gaps = GapSketch()
    for row in made:
        gaps.merge(gaps_of(row))
    queue = [phase.duration_ns for row in slow for phase in row.phases if phase.phase == "prefill_queue"]
    return {
        "requests": len(made),
        "ttft": {name: rank(ttft, q) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999))},
        "failed": sum(row.outcome != "ok" for row in made),
        "slow": len(slow),
        "queue": round(sum(queue) / len(slow)),
        "gaps": (gaps.count, gaps.quantile(0.99)),
    }


def found(scope: ScopeAnswer) -> dict[str, object]:
    assert scope.ttft is not None
    return {
        "requests": scope.requests,
        "ttft": dict(scope.ttft_ns),
        "failed": scope.failures.requests,
        "slow": scope.ttft.requests,
        "queue": next(phase.slow_ns for phase in scope.ttft.phases if phase.phase == "prefill_queue"),
        "gaps": (scope.gaps, scope.gap_ns["p99"]),
    }


@pytest.mark.parametrize("seed", range(3))
def test_the_exact_answer_is_that_of_the_newest_rows_before_and_after_folding(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    made = rows(400, seed)
    later = {
        row.request_id: replace(
            waiting(row, "first_step", 10**8), version=2, outcome="http_error", started_unix_ns=row.started_unix_ns + by
        )
        for row in rng.sample(made, 30)
        if (by := rng.choice((0, 0, HOUR_NS))) or True
    }
    gone = {row.request_id: replace(row, version=2, scope=MERGED) for row in rng.sample(made, 10) if row.request_id not in later}
    for at in range(0, 400, 100):
        store.publish(made[at : at + 100])
    store.publish([*later.values(), *gone.values()])
    expected = [later.get(row.request_id, row) for row in made if row.request_id not in gone]
    expected = [row for row in expected if row.started_unix_ns < (WHOLE.until_unix_ns or 0)]
    assert found(store.edge()) == summary(expected)
    store.upkeep()
    assert found(store.edge()) == summary(expected)
    assert found(store.edge(fast=True)) | {"ttft": 0, "slow": 0, "queue": 0} == summary(expected) | {
        "ttft": 0,
        "slow": 0,
        "queue": 0,
    }


def test_the_first_answer_is_within_its_bound_of_the_exact_one(store: Store) -> None:
    store.publish(rows(600))
    store.upkeep()
    first, exact = store.answer(fast=True), store.answer()
    assert (first.exact, exact.exact, first.rolled_hours) == (False, True, 3)
    quick, sure = first.scopes[0], exact.scopes[0]
    for name, value in sure.ttft_ns.items():
        assert quick.ttft_ns[name] == pytest.approx(value, rel=BIN_ERROR)
    assert quick.gap_ns == sure.gap_ns
    assert (quick.requests, quick.complete, quick.timed, quick.failures.by_outcome) == (
        sure.requests,
        sure.complete,
        sure.timed,
        sure.failures.by_outcome,
    )


def test_hours_cut_by_the_period_and_hours_with_late_rows_are_read_from_rows(store: Store) -> None:
    made = rows(300)
    store.publish(made)
    store.upkeep()
    cut = PeriodQuery(since_unix_ns=HOUR * HOUR_NS + 10**9, until_unix_ns=WHOLE.until_unix_ns)
    assert store.answer(cut, fast=True).rolled_hours == 2
    assert store.edge(cut, fast=True).requests == sum(row.started_unix_ns >= HOUR * HOUR_NS + 10**9 for row in made)
    before = store.paths(Table.ROLLUPS)
    store.publish([replace(made[0], version=2, outcome="http_error")])
    assert store.answer(fast=True).rolled_hours == 2
    assert store.edge(fast=True).requests == 300
    store.upkeep()
    assert store.answer(fast=True).rolled_hours == 3
    assert store.edge(fast=True).failures.by_outcome["http_error"] == 1
    assert len(store.paths(Table.ROLLUPS)) == 3
    assert len(store.paths(Table.ROLLUPS) & before) == 2


def test_rollups_leave_with_their_day_and_are_not_made_twice(store: Store) -> None:
    store.publish(rows(30))
    assert store.upkeep().stats.rollups.made == 3
    assert store.upkeep().stats.rollups.made == 0
    store.upkeep(replace(SETTINGS, retention_ns=DAY_NS), LATER + 9 * DAY_NS)
    assert store.paths(Table.ROLLUPS) == store.paths(Table.REQUESTS) == set()
    assert store.answer().scopes == ()


def test_a_file_of_withdrawn_rows_alone_is_covered_too(store: Store) -> None:
    made = rows(3)
    store.publish(made)
    store.publish([replace(row, version=2, scope=MERGED) for row in made[:1]])
    store.publish([replace(made[0], version=3, scope=MERGED, started_unix_ns=made[2].started_unix_ns)])
    store.upkeep()
    assert store.edge(fast=True).requests == 2
    assert due(store.publisher.publishes(), 0, LATER, 0).missing == ()


def scenario(root: Path, files: StoppingFiles, made: Sequence[RequestRow]) -> None:
    publisher = StorePublisher(root, files=files, now_unix_ns=lambda: LATER)
    try:
        end = publisher.open().end_offset
        if end < 2:
            publisher.publish(0, 2, 2, [], made)
        Upkeep(publisher, SETTINGS, lambda: LATER).run_pass()
        if end < 3:
            publisher.publish(2, 3, 3, [], [replace(made[0], version=2)])
        Upkeep(publisher, SETTINGS, lambda: LATER).run_pass()
    finally:
        publisher.close()


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.eval)], ids=["some", "all"])
@pytest.mark.parametrize("names", [True, False])
def test_a_stop_at_any_operation_of_a_rollup_counts_nothing_twice(tmp_path: Path, names: bool, every: int) -> None:
    made = [replace(row, started_unix_ns=HOUR * HOUR_NS + index) for index, row in enumerate(rows(2))]
    counted = StoppingFiles()
    scenario(tmp_path / "counted", counted, made)
    assert counted.operations > 20
    for stop_at in range(1, counted.operations, every):
        root = tmp_path / str(stop_at)
        files = StoppingFiles(stop_at)
        with pytest.raises(StoppedError):
            scenario(root, files, made)
        files.lose_power(names)
        scenario(root, StoppingFiles(), made)
        reader = StoreReader(root, threads=1)
        answer = explain(load_period(reader, WHOLE, fast=True))
        reader.close()
        assert (answer.scopes[0].requests, answer.rolled_hours) == (2, 1), stop_at


def test_scopes_and_models_never_mix(store: Store) -> None:
    made = rows(40)
    store.publish([replace(row, scope="decode", model="other") if index % 4 == 0 else row for index, row in enumerate(made)])
    answer = store.answer()
    assert [(scope.scope, scope.requests) for scope in answer.scopes] == [("edge", 30), ("decode", 10)]
    assert [s.requests for s in store.answer(replace(WHOLE, model="other")).scopes] == [10]
    store.upkeep()
    assert [s.requests for s in store.answer(replace(WHOLE, scope="decode"), fast=True).scopes] == [10]
    assert store.answer(replace(WHOLE, model="none"), fast=True).scopes == ()


def test_too_few_requests_are_no_ground_for_a_cause(store: Store) -> None:
    store.publish(rows(NEEDED - 1))
    tail = store.edge().ttft
    assert tail is not None
    assert (tail.verdict, tail.concentrations, tail.causes) == (TailVerdict.CANNOT_TELL, (), None)


def test_a_host_where_one_phase_waits_is_named_with_it(store: Store) -> None:
    made = [
        waiting(row, "prefill_queue", 2 * 10**9) if row.prefill_host == "p1" and i % 25 == 0 else row
        for i, row in enumerate(rows(2000))
    ]
    store.publish(made)
    store.upkeep()
    tail = store.edge().ttft
    assert tail is not None
    assert tail.causes is not None
    assert tail.verdict is TailVerdict.STANDS_OUT
    assert [(named.phase, named.place) for named in tail.causes.named] == [("prefill_queue", "p1")]
    assert tail.causes.named[0].excess_ns == pytest.approx(2 * 10**9, rel=0.02)
    assert tail.phases[0].phase == "prefill_queue"
    assert sum(phase.share for phase in tail.phases) == pytest.approx(1)
    assert [(c.dimension, c.value) for c in tail.concentrations if c.stands_out] == [("prefill_host", "p1")]
    first = store.edge(fast=True).ttft
    assert first is not None
    assert [(c.dimension, c.value) for c in first.concentrations if c.stands_out] == [("prefill_host", "p1")]


def test_in_a_healthy_period_nothing_stands_out(store: Store) -> None:
    store.publish(rows(1500))
    scope = store.edge()
    assert scope.ttft is not None
    assert scope.gap is not None
    assert (scope.ttft.verdict, scope.gap.verdict) == (TailVerdict.NOTHING, TailVerdict.NOTHING)
    assert scope.ttft.causes is not None
    assert scope.ttft.causes.named == ()


def test_time_without_evidence_is_shown_by_its_process(store: Store) -> None:
    lost = PhaseRow(phase="unattributed", duration_ns=7 * 10**6, process="prefill", source="proxy", bound_ns=0)
    store.publish(
        [replace(row, phases=(*row.phases, lost), ttft_token_ns=(row.ttft_token_ns or 0) + 9 * 10**6) for row in rows(60)]
    )
    tail = store.edge().ttft
    assert tail is not None
    by_place = {phase.place: phase.baseline_ns for phase in tail.phases if phase.phase == "unattributed"}
    assert by_place["prefill"] == 7 * 10**6
    assert by_place["path"] == 2 * 10**6, "what the phases leave of the time is not told by anyone"


def test_a_damaged_file_is_reported_with_its_name(store: Store) -> None:
    store.publish(rows(20))
    path = next(iter(sorted(store.paths(Table.REQUESTS))))
    file = store.root / path
    file.write_bytes(file.read_bytes()[:-40] + b"x" * 40)
    with pytest.raises(StoreDamagedError, match=Path(path).name):
        store.answer()


@pytest.mark.parametrize(
    ("now", "since", "until"),
    [
        pytest.param(WHOLE.until_unix_ns, None, WHOLE.until_unix_ns, id="the last hour"),
        pytest.param(LATER, None, None, id="long idle: the hour before the latest"),
        pytest.param(LATER, HOUR * HOUR_NS, LATER, id="as asked"),
    ],
)
def test_without_times_the_last_hour_that_has_requests_is_explained(
    store: Store, now: int, since: int | None, until: int | None
) -> None:
    made = rows(30)
    store.publish(made)
    plain = answered(store.reader, Question(since_unix_ns=since), now)
    latest = made[-1].started_unix_ns
    assert plain["until_unix_ns"] == (latest + 1 if until is None else until)
    assert plain["since_unix_ns"] == (since if since is not None else plain["until_unix_ns"] - DEFAULT_NS)
    assert plain["latest_unix_ns"] == latest
    assert plain["scopes"][0]["summary"][0].startswith("Cannot tell why the slowest are slow: ")


def test_a_store_without_requests_has_nothing_to_explain(store: Store) -> None:
    plain = answered(store.reader, Question(), LATER)
    assert (list(plain["scopes"]), plain["latest_unix_ns"]) == ([], None)
