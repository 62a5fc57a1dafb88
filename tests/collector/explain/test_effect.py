"""The effect size and the number of requests that a finding needs.

The sentence says what the table shows.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.truth.judge import found_in
from builders.gaps import gap_fields
from builders.period import usual
from builders.request_rows import MS, STARTED
from builders.scope import explained_period, scope_of, store_of
from handrail.metrics.exponential_histogram import GapSketch
from handrail_collector.explain.period.answer import answered
from handrail_collector.explain.period.question import Question
from handrail_collector.explain.period.report import TailVerdict
from handrail_collector.explain.period.summary import summary
from handrail_collector.rows import RequestRow
from handrail_collector.store.manifest import StoreDamagedError
from handrail_collector.store.schema import Table


def rows(count: int = 1500) -> list[RequestRow]:
    """Return healthy requests of hosts p0 p1, d0 d1, each with gaps of about 10 ms."""
    dice = random.Random(4)
    return [with_gap(usual(number, dice), 10 * MS + dice.randrange(MS)) for number in range(count)]


def with_gap(row: RequestRow, gap_ns: int) -> RequestRow:
    sketch = GapSketch()
    sketch.add(gap_ns)
    return replace(row, gap_max_ns=gap_ns, **gap_fields(sketch))


def waiting(row: RequestRow, phase: str, excess_ns: int) -> RequestRow:
    phases = tuple(replace(p, duration_ns=p.duration_ns + excess_ns) if p.phase == phase else p for p in row.phases)
    return replace(row, phases=phases, ttft_token_ns=(row.ttft_token_ns or 0) + excess_ns)


@pytest.mark.parametrize(
    ("excess_ns", "verdict"),
    [
        pytest.param(MS, TailVerdict.NOTHING, id="a tenth longer"),
        pytest.param(60 * MS, TailVerdict.STANDS_OUT, id="seven times as long"),
    ],
)
def test_gaps_that_are_hardly_longer_are_nobodys_fault(tmp_path: Path, excess_ns: int, verdict: TailVerdict) -> None:
    made = [
        with_gap(row, (row.gap_max_ns or 0) + excess_ns) if row.decode_host == "d1" and index % 40 == 3 else row
        for index, row in enumerate(rows())
    ]
    scope = scope_of(tmp_path, made)
    assert explained_period(scope.gap).verdict is verdict
    assert any("longest stream gaps" in sentence for sentence in summary(scope)) == (verdict is TailVerdict.STANDS_OUT)
    assert (found_in(made) > 0) == (verdict is TailVerdict.STANDS_OUT), "the referee counts what a contrast covers"


@pytest.mark.parametrize(("requests", "named"), [(4, []), (14, [("unattributed", "p1>d1")])])
def test_a_cause_of_a_few_requests_is_chance(tmp_path: Path, requests: int, named: list[tuple[str, str]]) -> None:
    chosen = [i for i, row in enumerate(rows()) if (row.prefill_host, row.decode_host) == ("p1", "d1")][100 : 100 + requests]
    made = [waiting(row, "unattributed", 900 * MS) if i in chosen else row for i, row in enumerate(rows())]
    causes = explained_period(scope_of(tmp_path, made).ttft).causes
    assert causes is not None
    assert [(each.phase, each.place) for each in causes.named] == named
    assert causes.at_base_rate == causes.slow - sum(each.requests for each in causes.named) - causes.ambiguous


def test_the_sentence_says_what_the_table_shows(tmp_path: Path) -> None:
    """A link has more of the slow requests, but not enough to be named."""
    on_link = [i for i, row in enumerate(rows()) if (row.prefill_host, row.decode_host) == ("p1", "d1")][::40][:8]
    elsewhere = [i for i, row in enumerate(rows()) if (row.prefill_host, row.decode_host) != ("p1", "d1")][::220][:5]
    made = [waiting(row, "router_and_hops", 900 * MS) if i in [*on_link, *elsewhere] else row for i, row in enumerate(rows())]
    scope = scope_of(tmp_path, made)
    assert explained_period(scope.ttft).verdict is TailVerdict.NOTHING
    perhaps = [each for each in explained_period(scope.ttft).concentrations if each.above_chance]
    first = summary(scope)[0]
    assert perhaps
    assert f"{perhaps[0].value} has more of them" in first
    assert "on the same hosts" not in first


def test_rows_without_a_host_do_not_share_one(tmp_path: Path) -> None:
    nowhere = {"prefill_host": None, "decode_host": None, "prefill_instance": None, "decode_instance": None}
    scope = scope_of(tmp_path, [replace(row, **nowhere) for row in rows()])  # type: ignore[arg-type]
    assert explained_period(scope.ttft).verdict is TailVerdict.NOTHING
    assert "Nothing stands out" in summary(scope)[0]
    assert "their hosts are unknown" in summary(scope)[0]


def test_where_all_failed_that_comes_first(tmp_path: Path) -> None:
    failed = [replace(row, outcome="http_error", ttft_token_ns=None, phases=(), phase_of="") for row in rows(300)]
    assert summary(scope_of(tmp_path, failed))[0].startswith("300 requests failed (100 %): 300 http_error.")


def test_damage_is_reported_without_the_query_and_with_the_remedy(tmp_path: Path) -> None:
    reader = store_of(tmp_path, rows(20))
    path = next(file.path for each in reader.snapshot().publishes for file in each.files if file.table is Table.REQUESTS)
    file = tmp_path / path
    file.write_bytes(file.read_bytes()[:-40] + b"x" * 40)
    with pytest.raises(StoreDamagedError, match=Path(path).name) as raised:
        answered(reader, Question(), STARTED + 3_600_000 * MS)
    reader.close()
    assert "\n" not in str(raised.value)
    assert "SELECT" not in str(raised.value)
    assert "restore it from a copy" in str(raised.value)


def test_an_unknown_model_is_answered_with_the_nearest(tmp_path: Path) -> None:
    reader = store_of(tmp_path, [replace(row, model=name) for row, name in zip(rows(40), ["llama-8b", "qwen"] * 20, strict=True)])
    plain = answered(reader, Question(model="lama-8b"), STARTED + 3_600_000 * MS)
    reader.close()
    assert plain["scopes"] == ()
    assert plain["models"] == ["llama-8b"]
