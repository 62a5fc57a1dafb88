"""The contract of a store (``store.contract``).

A backend is one line in ``STORES``; it may opt out of a test by name, with a reason.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from builders.dataclass_rows import flat_row
from builders.device_samples import S, busy_host, counter, flattened, gauge, port, process, sample
from builders.engine_samples import engine_sample
from builders.store_rows import START_UNIX_NS, request_rows, spans_of_requests
from doubles.memory_store import Kept as MemoryKept
from doubles.memory_store import MemoryReader, MemoryWriter
from doubles.store_filters import matches, order, sample_matches
from handrail.records.devices import DeviceSample, runs
from handrail_collector.rows import MERGED, NO_STALLS, WITHDRAWN_FETCHES, JoinRow, RequestRow, StallRow
from handrail_collector.store.contract import StoreQueries, StoreWriter
from handrail_collector.store.filters import SORTS, FetchFilter, RequestFilter, SampleFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.recovery import PublishedRow, Recovered
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.append_only import FlatRows
from handrail_collector.store.tables.samples import SAMPLED
from handrail_collector.store.tables.spans import SpanRow


@dataclass(slots=True)
class Store:
    """One store under test, in the words of ``store.contract``.

    The other fields are what a test needs beside that contract.
    """

    writer: StoreWriter
    reader: StoreQueries
    copied: Callable[[], StoreQueries]
    """Returns a reader of a copy of the store, as if moved to another machine."""
    reopened: Callable[[], Recovered]
    """Ends the writer's process and begins another one."""
    after_publish: Callable[[], None] = lambda: None
    spoil_before: Callable[[int], None] | None = None
    """Makes rows that started before a time unreadable.

    It spoils only what holds no later row, where the store keeps these apart.
    """
    ends: int = 0

    def publish(self, spans: Sequence[SpanRow], rows: Sequence[RequestRow], flat: FlatRows | None = None) -> None:
        """Publish under the next hundred offsets of the journal."""
        self.writer.publish(self.ends, self.ends + 100, 0, spans, rows, flat=flat)
        self.ends += 100
        self.after_publish()


def parquet(folder: Path, folded: bool = False) -> Iterator[Store]:
    """Yield a Parquet store.

    ``folded``: compacted after every publish, as if each were the last of its hour.
    """
    root = folder / "store"
    publisher = StorePublisher(root)
    upkeep = Upkeep(publisher, UpkeepSettings(grace_ns=0), lambda: START_UNIX_NS + 1000 * HOUR_NS)
    publisher.open()
    readers = [StoreReader(root)]

    def fold() -> None:
        upkeep.run_pass()
        assert not upkeep.stats.failures

    def copied() -> StoreQueries:
        shutil.copytree(root, folder / "copy", ignore=shutil.ignore_patterns("*.tmp"))
        readers.append(StoreReader(folder / "copy"))
        return readers[-1]

    def reopened() -> Recovered:
        publisher.close()
        return publisher.open()

    def spoil_before(unix_ns: int) -> None:
        spoilt = [file for publish in publisher.publishes() for file in publish.files if file.max_unix_ns < unix_ns]
        assert spoilt
        for file in spoilt:
            publisher.path(file).write_bytes(b"no more")

    yield Store(publisher, readers[0], copied, reopened, fold if folded else lambda: None, spoil_before)
    for reader in readers:
        reader.close()
    publisher.close()


def memory(folder: Path) -> Iterator[Store]:
    """Yield a store in memory.

    It shows that the battery needs nothing that only files and SQL have.
    """
    kept = MemoryKept()
    writer = MemoryWriter(kept)
    yield Store(writer, MemoryReader(kept), lambda: MemoryReader(deepcopy(kept)), lambda: MemoryWriter(kept).open())


STORES: dict[str, Callable[[Path], Iterator[Store]]] = {
    "parquet": parquet,
    "parquet_folded": partial(parquet, folded=True),
    "memory": memory,
}
OPT_OUTS: dict[tuple[str, str], str] = {
    ("memory", "test_a_question_about_a_time_reads_nothing_of_others"): "it keeps no times apart",
}
"""The reason for each opt-out, by (store, test name)."""


def test_every_opt_out_is_of_a_store_and_a_test_that_exist() -> None:
    for (store, test), reason in OPT_OUTS.items():
        assert store in STORES
        assert test in globals()
        assert reason


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        name = metafunc.function.__name__
        metafunc.parametrize("store", [store for store in STORES if (store, name) not in OPT_OUTS], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    yield from STORES[request.param](tmp_path)


def varied(count: int) -> list[RequestRow]:
    """Return rows that differ in every filtered column, with gaps."""
    rng = random.Random(7)
    return [
        replace(
            row,
            scope=rng.choice(("edge", "decode", "engine")),
            outcome=rng.choice(("ok", "http_error")),
            model=rng.choice(("tiny", "Large-ÉTÉ", None)),
            started_unix_ns=START_UNIX_NS + rng.randrange(3 * HOUR_NS),
            ttft_token_ns=rng.choice((None, rng.randrange(10**9), 500_000_000)),
            ttft_text_ns=rng.choice((None, row.ttft_text_ns)),
            gap_p99_ns=rng.choice((None, row.gap_p99_ns)),
            edge_instance=rng.choice(("10.0.0.1:8080", None)),
            findings=rng.choice(((), ("wrong_request:abc", "clock"), ("clock:host-7",))),
            phases=row.phases[: rng.randrange(10)],
            request_key=rng.choice((row.request_key, None, "k=1", "other")),
            response_id=rng.choice((row.response_id, None, "chatcmpl-Z")),
        )
        for row in request_rows(count)
    ]


FILTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "since": {"since_unix_ns": START_UNIX_NS + HOUR_NS},
    "until": {"until_unix_ns": START_UNIX_NS + HOUR_NS},
    "between": {"since_unix_ns": START_UNIX_NS + HOUR_NS, "until_unix_ns": START_UNIX_NS + 2 * HOUR_NS},
    "before_everything": {"until_unix_ns": 1},
    "scope": {"scope": "decode"},
    "outcome": {"outcome": "http_error"},
    "model": {"model": "Large-ÉTÉ"},
    "instance_decode": {"instance": "10.0.6.1:8100"},
    "instance_edge": {"instance": "10.0.0.1:8080"},
    "min_ttft": {"min_ttft_ns": 500_000_000},
    "finding": {"finding": "clock:host-7"},
    "finding_kind": {"finding": "clock"},
    "text_model": {"text": "LARGE"},
    "text_id": {"text": "cmpl-z"},
    "text_hex": {"text": "ab"},
    "text_key": {"text": "K=1"},
    "text_finding": {"text": "host-7"},
    "text_nowhere": {"text": "%"},
    "several": {"scope": "edge", "outcome": "ok", "instance": "10.0.7.2:8100"},
    "few": {"limit": 3},
}


def test_every_filter_means_the_same_in_the_store_as_in_python(store: Store) -> None:
    rows = varied(150)
    for start in range(0, len(rows), 50):
        store.publish([], rows[start : start + 50])
    differ = []
    for name, fields in FILTERS.items():
        wanted = RequestFilter(**({"limit": 1000} | fields))
        fitting = sorted((row for row in rows if matches(wanted, row)), key=lambda row: order(wanted, row))
        if store.reader.requests(wanted) != fitting[: wanted.limit] or store.reader.count(wanted) != len(fitting):
            differ.append(name)
    assert differ == []


def test_rows_are_sorted_by_any_figure_either_way(store: Store) -> None:
    rows = varied(60)
    store.publish([], rows)
    for sort in SORTS:
        for descending in (True, False):
            wanted = RequestFilter(sort=sort, descending=descending, limit=25)
            assert store.reader.requests(wanted) == sorted(rows, key=lambda row: order(wanted, row))[:25], sort


@pytest.mark.parametrize(
    "wanted",
    [RequestFilter(sort="started_unix_ns; --"), RequestFilter(limit=0), RequestFilter(scope="all"), RequestFilter(text="a\n")],
    ids=["sort", "limit", "scope", "text"],
)
def test_a_filter_that_makes_no_sense_is_refused(store: Store, wanted: RequestFilter) -> None:
    for ask in (store.reader.requests, store.reader.count):
        with pytest.raises(ValueError, match=":"):
            ask(wanted)


def test_an_empty_store_has_no_rows(store: Store) -> None:
    row = request_rows(1)[0]
    assert store.reader.requests(RequestFilter()) == []
    assert store.reader.count(RequestFilter()) == 0
    assert store.reader.find(row.trace_id) == []
    assert store.reader.near(row.trace_id) == []
    assert store.reader.spans(row) == []


def test_what_is_published_is_seen_at_once_and_in_a_copy(store: Store) -> None:
    rows = request_rows(6)
    for index in range(0, 6, 2):
        store.publish([], rows[index : index + 2])
        assert store.reader.count(RequestFilter()) == index + 2
    assert store.copied().requests(RequestFilter()) == store.reader.requests(RequestFilter())


def test_the_highest_version_of_a_row_counts_wherever_it_is(store: Store) -> None:
    rows = [replace(row, version=1, outcome="ok") for row in request_rows(8)]
    second = replace(rows[2], version=2, outcome="http_error", started_unix_ns=rows[2].started_unix_ns + 2 * HOUR_NS)
    third = replace(rows[3], version=3, ttft_token_ns=1)
    store.publish([], rows)
    store.publish([], [second])
    store.publish([], [replace(third, version=2), third])
    newest = [*rows[:2], second, third, *rows[4:]]
    for fields in ({}, {"outcome": "ok"}, {"until_unix_ns": START_UNIX_NS + HOUR_NS}, {"limit": 3}, {"sort": "ttft"}):
        wanted = RequestFilter(**fields)
        fitting = sorted((row for row in newest if matches(wanted, row)), key=lambda row: order(wanted, row))
        assert store.reader.requests(wanted) == fitting[: wanted.limit], fields
        assert store.reader.count(wanted) == len(fitting), fields
    assert store.reader.find(rows[2].trace_id) == [second]


KEY = "lab-0001"
ROUTER_ID = "___prefill_addr_10.0.0.7:8100___decode_addr_10.0.0.8:8200_" + "0c" * 16
FORMS: dict[str, tuple[str, str]] = {
    "client_id": (KEY, "one"),
    "response_id": (f"cmpl-{KEY}", "one"),
    "span_attribute": (f"cmpl-{KEY}-0", "one"),
    "engine_id": (f"cmpl-{KEY}-0-9c60a41c", "one"),
    "client_id_that_looks_like_a_child": ("user-42-7", "child"),
    "router_response_id": (f"cmpl-{ROUTER_ID}", "routed"),
    "router_worker_id": (ROUTER_ID, "routed"),
    "router_engine_id": (f"cmpl-{ROUTER_ID}-0-0123abcd", "routed"),
    "chat_id_behind_the_router": (f"chatcmpl-{ROUTER_ID}-0123abcd", "routed"),
    "trace_id": ("1" * 32, "one"),
    "trace_id_in_capitals": ("AB" * 16, "child"),
    "other_trace_id": ("3" * 32, "routed"),
    "span_id": ("4" * 16, "one"),
    "prefix_of_a_client_id": ("user-42", "child"),
    "prefix_of_a_trace_id": ("111111", "one"),
    "prefix_of_an_odd_length": ("4444444", "one"),
    "prefix_of_a_response_id": ("cmpl-lab-00", "one"),
}


def named_rows() -> dict[str, RequestRow]:
    one, child, routed = request_rows(3)
    one = replace(one, client_request_id=KEY, request_key=KEY, response_id=f"cmpl-{KEY}")
    child = replace(child, client_request_id="user-42-7", request_key="user-42-7", response_id="chatcmpl-user-42-7")
    routed = replace(routed, client_request_id="shop/7", request_key="0c" * 16, response_id=f"cmpl-{ROUTER_ID}")
    return {
        "one": replace(one, trace_id="1" * 32, request_id="4" * 16),
        "child": replace(child, trace_id="ab" * 16),
        "routed": replace(routed, other_trace_ids=("3" * 32,)),
    }


def test_a_request_is_found_by_an_id_in_any_form(store: Store) -> None:
    rows = named_rows()
    store.publish([], [*rows.values(), *(replace(row, response_id=None) for row in request_rows(5, seed=9))])
    found = {name: store.reader.find(any_id) for name, (any_id, _) in FORMS.items()}
    assert found == {name: [rows[expected]] for name, (_, expected) in FORMS.items()}


def test_an_id_that_nobody_has_finds_nothing(store: Store) -> None:
    store.publish([], list(named_rows().values()))
    nobodys = ("user", "user-43", "lab-1", "", "'; DROP", "zz" * 16, "é" * 8, "%%%%%%")
    assert {any_id: store.reader.find(any_id) for any_id in nobodys} == {key: [] for key in nobodys}


def test_a_row_that_became_part_of_another_is_not_there_however_late_it_was_withdrawn(store: Store) -> None:
    rows = [replace(row, version=1) for row in request_rows(4)]
    gone = replace(rows[1], version=2, scope=MERGED, phases=(), joins=(), span_ids=())
    elsewhere = replace(rows[2], version=2, scope=MERGED, span_ids=(), started_unix_ns=rows[2].started_unix_ns + 3 * HOUR_NS)
    store.publish([], rows)
    store.publish([], [gone])
    store.publish([], [elsewhere])
    store.publish([], [replace(rows[3], version=2)])
    kept = [rows[0], replace(rows[3], version=2)]
    wanted = RequestFilter(descending=False)
    assert store.reader.requests(wanted) == kept
    assert store.reader.count(wanted) == 2
    assert store.reader.find(rows[1].trace_id) == store.reader.find(rows[2].trace_id) == []


def test_an_equal_id_wins_over_longer_ones(store: Store) -> None:
    short, long = request_rows(2)
    short, long = replace(short, client_request_id="job-17"), replace(long, client_request_id="job-170")
    store.publish([], [short, long])
    assert store.reader.find("job-17") == [short]
    assert store.reader.find("job-170") == [long]


def test_one_client_id_used_twice_finds_both(store: Store) -> None:
    rows = [replace(row, client_request_id="again-1", request_key="again-1") for row in request_rows(2)]
    store.publish([], rows)
    assert store.reader.find("again-1") == rows[::-1]


def test_an_id_that_is_one_request_s_own_and_part_of_another_finds_both(store: Store) -> None:
    own, other, answered = request_rows(3)
    own = replace(own, client_request_id=f"cmpl-{KEY}", trace_id="1" * 32)
    other = replace(other, other_trace_ids=("2" * 32, "1" * 32))
    answered = replace(answered, client_request_id=KEY, request_key=KEY, response_id=f"cmpl-{KEY}")
    store.publish([], [own, other, answered])
    assert store.reader.find("1" * 32) == [other, own]
    assert store.reader.find(f"cmpl-{KEY}") == [answered, own]


def test_suggestions_are_the_likest_ids(store: Store) -> None:
    store.publish([], [*named_rows().values(), *request_rows(50, seed=3)])
    assert store.reader.near("lab-0002")[0] == "lab-0001"
    assert len(store.reader.near("cmpl-lab-0001")) <= 5


def test_spans_of_a_request_are_its_evidence_and_what_hangs_below(store: Store) -> None:
    spans = spans_of_requests(2, proxies=True)
    one, two = spans[:3], [replace(span, trace_id=spans[0].trace_id) for span in spans[3:]]
    below = replace(one[0], span_id="5" * 16, parent_span_id=one[1].span_id, name="kv.transfer")
    row = replace(request_rows(1)[0], trace_id=one[0].trace_id, span_ids=(one[2].span_id,), first_offset=0, last_offset=3)
    store.publish([*one, *two], [row])
    store.publish([replace(below, offset=100)], [])
    assert {span.span_id for span in store.reader.spans(row)} == {*(span.span_id for span in one), "5" * 16}
    starts = [span.start_unix_ns for span in store.reader.spans(row)]
    assert starts == sorted(starts)


def test_a_span_sent_again_with_other_content_counts_once_the_later(store: Store) -> None:
    span = replace(spans_of_requests(1)[0], attributes={"a": 1}, offset=0)
    later = replace(span, attributes={"a": 2.5, "b": ("x", {"c": b"\x00"})}, offset=150)
    row = replace(request_rows(1)[0], trace_id=span.trace_id, span_ids=(span.span_id,), joins=())
    store.publish([span], [row])
    store.publish([later], [])
    assert store.reader.spans(row) == [later]


def test_spans_are_found_by_offset_where_clocks_are_hours_apart(store: Store) -> None:
    span = replace(spans_of_requests(1)[0], start_unix_ns=1, end_unix_ns=2, offset=50)
    row = replace(
        request_rows(1)[0],
        trace_id="2" * 32,
        other_trace_ids=(span.trace_id,),
        span_ids=(span.span_id,),
        joins=(JoinRow(evidence="decode:otlp", how="request_key", span_id=span.span_id),),
        first_offset=50,
        last_offset=50,
    )
    store.publish([span], [row])
    assert store.reader.spans(row) == [span]


def test_the_stalls_of_a_request_are_those_of_its_highest_version_in_order(store: Store) -> None:
    row = replace(request_rows(1)[0], started_unix_ns=START_UNIX_NS)
    own: dict[str, Any] = {"trace_id": row.trace_id, "request_id": row.request_id}
    at = START_UNIX_NS

    def stall(number: int, version: int, **more: Any) -> StallRow:
        made: StallRow = flat_row(Table.STALLS, 5, at + number, number=number, version=version, **{**own, **more})
        return made

    first = [stall(1, 1), stall(0, 1), flat_row(Table.STALLS, 7, at)]
    store.writer.publish(0, 10, 0, [], [row], flat={Table.STALLS: first})
    store.after_publish()
    assert store.reader.stalls_of(row) == [first[1], first[0]]
    second = [stall(0, 2, cause="preemption", lift=None, doubt=None, evidence=())]
    store.writer.publish(10, 20, 0, [], [], flat={Table.STALLS: second})
    store.after_publish()
    assert store.reader.stalls_of(row) == second
    store.writer.publish(20, 30, 0, [], [], flat={Table.STALLS: [stall(NO_STALLS, 3)]})
    store.after_publish()
    assert store.reader.stalls_of(row) == []


@pytest.mark.parametrize("fields", FILTERS.values(), ids=FILTERS)
def test_rows_that_are_not_stored_yet_count_as_if_they_were(store: Store, fields: dict[str, Any]) -> None:
    rows = [replace(row, version=1) for row in varied(90)]
    live = [
        *(replace(row, version=2, outcome="http_error", findings=("late",)) for row in rows[:4]),
        replace(rows[4], version=2, scope=MERGED, phases=(), joins=(), span_ids=()),
        *(replace(row, version=0) for row in rows[5:8]),  # open once more, in a replay: what is stored counts
        rows[8],  # stored while the question was asked
        *(replace(row, version=0) for row in rows[60:]),
    ]
    store.publish([], rows[:30])
    store.publish([], rows[30:60])
    wanted = RequestFilter(**({"limit": 1000} | fields))
    known = [*live[:4], *rows[5:60], *live[9:]]
    fitting = sorted((row for row in known if matches(wanted, row)), key=lambda row: order(wanted, row))
    assert store.reader.requests(wanted, live) == fitting[: wanted.limit]


def test_a_request_is_found_before_it_is_stored(store: Store) -> None:
    first, second, third = (replace(row, version=1) for row in request_rows(3))
    store.publish([], [first])
    live = [replace(first, version=2, client_request_id="changed"), replace(second, version=0), third]
    assert store.reader.find(first.trace_id, live) == [live[0]]
    assert store.reader.find(str(first.client_request_id), live) == [live[0]]  # by its key
    assert store.reader.find(str(second.client_request_id), live) == [live[1]]
    assert store.reader.find(third.trace_id, [replace(third, version=2, scope=MERGED)]) == []


def test_fetches_and_stalls_that_are_not_stored_yet_replace_earlier_ones(store: Store) -> None:
    row = replace(request_rows(1)[0], started_unix_ns=START_UNIX_NS)
    own = {"trace_id": row.trace_id, "request_id": row.request_id}

    def rows(table: Table, version: int, numbers: Sequence[int], **more: Any) -> list[Any]:
        return [flat_row(table, 5, START_UNIX_NS + n, **{**own, "number": n, "version": version, **more}) for n in numbers]

    fetches, stalls = rows(Table.KV_FETCHES, 1, (0, 1)), rows(Table.STALLS, 1, (0, 1))
    store.publish([], [row], {Table.KV_FETCHES: fetches, Table.STALLS: stalls})
    again = rows(Table.KV_FETCHES, 1, (1,), outcome="expired")
    later = rows(Table.KV_FETCHES, 2, (0,), outcome="ok")
    assert store.reader.fetches_of(row, again) == [fetches[0], *again]
    assert store.reader.fetches_of(row, later) == later
    assert store.reader.fetches(FetchFilter(outcome="ok"), later) == later
    assert store.reader.fetches(FetchFilter(), rows(Table.KV_FETCHES, 2, (WITHDRAWN_FETCHES,))) == []
    assert store.reader.stalls_of(row, rows(Table.STALLS, 2, (0,), cause="preemption"))[0].cause == "preemption"
    assert store.reader.stalls_of(row, [flat_row(Table.STALLS, 7, START_UNIX_NS)]) == stalls


def test_a_question_about_a_time_reads_nothing_of_others(store: Store) -> None:
    days = [
        [replace(r, started_unix_ns=START_UNIX_NS + day * 48 * HOUR_NS + i) for i, r in enumerate(request_rows(3, seed=day))]
        for day in range(3)
    ]
    for rows in days:
        store.publish([], rows)
    assert store.spoil_before is not None
    store.spoil_before(days[2][0].started_unix_ns)
    since = RequestFilter(since_unix_ns=days[2][0].started_unix_ns, descending=False)
    assert store.reader.requests(since) == days[2]
    assert store.reader.count(since) == 3


def several_hosts() -> list[DeviceSample]:
    """Return a second and a half of samples from three hosts with two GPUs each.

    One host reset its counters.
    """
    samples = [one for host in ("p0", "d0", "d1") for one in flattened(list(busy_host(1.5, gpus=2, host=host)))]
    reset = [
        replace(one, values=tuple(v._replace(start_unix_ns=v.start_unix_ns and START_UNIX_NS) for v in one.values))
        if one.process.host_name == "d1" and one.at_unix_ns >= START_UNIX_NS + S
        else one
        for one in samples
    ]
    return sorted(reset, key=lambda one: (one.at_unix_ns, one.process.host, one.device.key))


SAMPLE_FILTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "since": {"since_unix_ns": START_UNIX_NS + S // 2},
    "until": {"until_unix_ns": START_UNIX_NS + S // 2},
    "host_by_id": {"hosts": frozenset({"id-of-p0"})},
    "hosts_by_name": {"hosts": frozenset({"d0", "d1", "nobody"})},
    "nobody": {"hosts": frozenset({"x"})},
    "names": {"names": frozenset({"utilization_ratio", "nvlink_bytes", "nothing"})},
}


def test_samples_of_every_filter_come_back_unchanged(store: Store) -> None:
    samples = several_hosts()
    for start in range(0, len(samples), 40):
        store.publish([], [], {Table.GPU_SAMPLES: runs(samples[start : start + 40])})
    store.publish([], [], {Table.GPU_SAMPLES: runs(samples[:10])})  # reported twice
    differ = []
    for name, fields in SAMPLE_FILTERS.items():
        wanted = SampleFilter(**({"since_unix_ns": 0, "until_unix_ns": 1 << 62} | fields))
        found = store.reader.samples(Table.GPU_SAMPLES, wanted)
        times = [one.at_unix_ns for one in found]
        fitting = [wanted.reduced(one) for one in samples if sample_matches(wanted, one)]
        if by_device(found) != by_device(fitting) or times != sorted(times):
            differ.append(name)
    assert differ == []


def by_device(samples: Iterable[DeviceSample]) -> list[DeviceSample]:
    return sorted(samples, key=lambda one: (one.process.host, one.device.key, one.at_unix_ns))


def test_of_a_long_time_there_is_one_sample_for_each_part_the_mean_of_gauges_and_the_last_of_counters(store: Store) -> None:
    port_samples = [
        sample(port(n), START_UNIX_NS + at * S // 10, gauge("load", at % 10 + n), counter("bytes", 1000 * at, "receive"))
        for at in range(20)
        for n in range(2)
    ]
    store.publish([], [], {Table.LINK_SAMPLES: runs(port_samples[:17])})
    store.publish([], [], {Table.LINK_SAMPLES: runs(port_samples[17:])})
    wanted = SampleFilter(since_unix_ns=START_UNIX_NS, until_unix_ns=START_UNIX_NS + 2 * S, every_ns=S)
    found = store.reader.samples(Table.LINK_SAMPLES, wanted)
    assert [(one.device.key, one.at_unix_ns - START_UNIX_NS, [v.value for v in one.values]) for one in by_device(found)] == [
        ("mlx5_0/1", 9 * S // 10, [9000, 4.5]),
        ("mlx5_0/1", 19 * S // 10, [19000, 4.5]),
        ("mlx5_1/1", 9 * S // 10, [9000, 5.5]),
        ("mlx5_1/1", 19 * S // 10, [19000, 5.5]),
    ]


def test_a_counter_that_began_anew_is_not_mixed_with_what_it_was(store: Store) -> None:
    device_samples = [
        sample(port(), START_UNIX_NS + at, counter("bytes", 900 if at < 2 else at, since=7 if at < 2 else START_UNIX_NS))
        for at in range(4)
    ]
    store.publish([], [], {Table.LINK_SAMPLES: runs(device_samples)})
    wanted = SampleFilter(since_unix_ns=START_UNIX_NS, until_unix_ns=START_UNIX_NS + S, every_ns=S)
    found = store.reader.samples(Table.LINK_SAMPLES, wanted)
    assert [(v.value, v.start_unix_ns) for one in found for v in one.values] == [(900, 7), (3, START_UNIX_NS)]


def test_samples_of_engines_come_back_with_their_histograms(store: Store) -> None:
    engine_samples = [engine_sample(at) for at in range(4)]
    store.publish([], [], {Table.ENGINE_SAMPLES: engine_samples[:3]})
    store.publish([], [], {Table.ENGINE_SAMPLES: engine_samples[2:]})
    everything = SampleFilter(since_unix_ns=0, until_unix_ns=1 << 62)
    assert store.reader.samples(Table.ENGINE_SAMPLES, everything) == engine_samples
    some = replace(everything, names=frozenset({"requests_running", "ttft_seconds"}))
    found = store.reader.samples(Table.ENGINE_SAMPLES, some)
    assert found == list(map(some.reduced, engine_samples))
    assert {each.name for one in found for each in (*one.values, *one.histograms)} == {"requests_running", "ttft_seconds"}


@pytest.mark.parametrize("table", SAMPLED)
def test_an_empty_store_has_no_samples(store: Store, table: Table) -> None:
    assert store.reader.samples(table, SampleFilter(since_unix_ns=0, until_unix_ns=1 << 62)) == []


def test_samples_whose_hosts_clock_ran_wild_are_found_at_their_own_time(store: Store) -> None:
    wild = [sample(port(), 1000 + at, counter("bytes", at), of=process("d9")) for at in range(2)]
    store.publish([], [], {Table.LINK_SAMPLES: runs([*wild, sample(port(), START_UNIX_NS)])})
    assert store.reader.samples(Table.LINK_SAMPLES, SampleFilter(since_unix_ns=0, until_unix_ns=2000)) == wild


def test_a_restart_gets_back_what_was_published_and_no_more(store: Store) -> None:
    rows = [
        replace(row, version=1, scope="edge", first_offset=50, last_offset=50, complete=i > 0)
        for i, row in enumerate(request_rows(3))
    ]
    assert store.reopened() == Recovered(end_offset=0, low_water_offset=0, evidence={})
    store.writer.publish(0, 100, 0, [], rows[:2], {"rows": 2}, added={"taken": (0, 5, 3, 1)})
    again = [replace(rows[0], version=2, complete=True)]
    store.writer.publish(100, 130, 40, [], again, {"rows": 3}, added={"taken": (3, 1, 0, 7), "held": (1, 4)})
    store.after_publish()
    reported_request_rows = [*again, rows[1]]
    assert store.reopened() == Recovered(
        end_offset=130,
        low_water_offset=40,
        evidence={
            span_id: (row.trace_id, row.request_id, row.version) for row in reported_request_rows for span_id in row.span_ids
        },
        rows={(row.trace_id, row.request_id): PublishedRow.of(row) for row in reported_request_rows},
        observed={"rows": 3},
        added={"taken": (0, 12, 3, 2), "held": (1, 4)},
    )
    assert store.reader.count(RequestFilter()) == 2


def test_ranges_out_of_order_are_refused_and_change_nothing(store: Store) -> None:
    store.writer.publish(0, 100, 50, [], request_rows(1))
    for first, end, low in ((50, 200, 50), (100, 90, 50), (100, 200, 201), (100, 200, 40)):
        with pytest.raises(ValueError, match="out of order"):
            store.writer.publish(first, end, low, [], request_rows(2, seed=4))
    store.writer.publish(100, 100, 50, [], request_rows(1, seed=5))
    assert store.reader.count(RequestFilter()) == 2


def test_rows_of_one_empty_range_are_all_kept(store: Store) -> None:
    for seed in range(3):
        store.writer.publish(0, 0, 0, [], request_rows(2, seed=seed))
    assert store.reader.count(RequestFilter()) == 6


def test_a_reader_can_be_closed_twice_and_a_writer_too(store: Store) -> None:
    store.publish([], request_rows(1))
    reader = store.copied()
    assert reader.count(RequestFilter()) == 1
    for closed in (reader, store.writer):
        closed.close()
        closed.close()
