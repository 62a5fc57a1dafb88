"""``handrail events`` against a real store, by its API and off-line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timezone
from pathlib import Path

import pytest
from rich.console import Console

from builders.records import process
from handrail.records import ProcessEvent, ProcessEventKind, Role, Source
from handrail_cli.commands.events import render_events
from handrail_cli.main import main
from handrail_cli.sanitize import cleaned
from handrail_collector.api.events import HappenedFilter, happened_from_json, happened_to_json
from handrail_collector.api.server import ApiServer
from handrail_collector.event_rows import finding_row, process_event_row
from handrail_collector.rows import FetchRow, RequestRow
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries.events import happened
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table

S = 10**9
NOW = 1_700_000_000 * S


def event(kind: ProcessEventKind, ago_s: int, role: Role = Role.DECODE, **more: object) -> ProcessEvent:
    base = ProcessEvent(
        process=process(role),
        source=Source.PLUGIN,
        at_unix_ns=NOW - ago_s * S,
        kind=kind,
        pid=4711,
        process_kind="core",
    )
    return replace(base, **more)  # type: ignore[arg-type]


EVENTS = [
    event(ProcessEventKind.STARTED, 7200),
    event(ProcessEventKind.HUNG, 600, detail="sends nothing, and its process may still run"),
    event(ProcessEventKind.STOPPED, 60, detail="it ended on request", at_bound_ns=2 * S),
    event(ProcessEventKind.DEAD, 30, Role.PREFILL, detail="the process is gone"),
    event(ProcessEventKind.STARTED, 100 * 3600),
]
FINDINGS = [
    finding_row("unexplained_failures", "decode counted 3 kv_transfer_failures within 5 s", "decode:8000", "", NOW - 300 * S, 5),
    finding_row("kv_mismatch", "dtype is float16 at P and bfloat16 at D", "prefill:8000", "decode:8000", NOW - 400 * S, 6),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    rows = [process_event_row(each, at) for at, each in enumerate(EVENTS)]
    publisher.publish(0, 100, 0, [], [], {}, {Table.PROCESS_EVENTS: rows, Table.FINDINGS: FINDINGS})
    publisher.close()
    return tmp_path


def kinds(root: Path, **wanted: object) -> list[str]:
    reader = StoreReader(root / "store", threads=1)
    try:
        return [one.kind for one in happened(reader, HappenedFilter(**wanted), NOW)]  # type: ignore[arg-type]
    finally:
        reader.close()


def test_events_and_findings_are_one_list_latest_first_and_by_default_the_last_days(root: Path) -> None:
    assert kinds(root) == ["dead", "stopped", "unexplained_failures", "kv_mismatch", "hung", "started"]
    assert kinds(root, limit=2) == ["dead", "stopped"]
    assert kinds(root, since_unix_ns=NOW - 500 * S, until_unix_ns=NOW - 50 * S) == [
        "stopped",
        "unexplained_failures",
        "kv_mismatch",
    ]
    assert kinds(root, since_unix_ns=0)[-1] == "started"
    assert len(kinds(root, since_unix_ns=0)) == 7


def test_of_one_engine_also_what_is_between_it_and_a_peer(root: Path) -> None:
    assert kinds(root, instance="prefill:8000") == ["dead", "kv_mismatch"]
    assert "kv_mismatch" in kinds(root, instance="decode:8000")
    assert kinds(root, instance="nobody:1") == []


def test_what_travels_is_what_was_there(root: Path) -> None:
    reader = StoreReader(root / "store", threads=1)
    for one in happened(reader, HappenedFilter(), NOW):
        assert happened_from_json(json.loads(json.dumps(happened_to_json(one)))) == one
    reader.close()
    with pytest.raises(ValueError, match="no event"):
        happened_from_json({"kind": "dead"})


@contextmanager
def collector(root: Path) -> Iterator[Callable[..., int]]:
    """Yield a function that runs the command against a collector's API over the store."""
    server = ApiServer(StoreReader(root / "store"), NoLive(), dict, "127.0.0.1", 0, now_unix_ns=lambda: NOW)

    def query(*arguments: str) -> int:
        async def go() -> int:
            await server.start()
            try:
                return await asyncio.to_thread(main, ["events", "--api", f"127.0.0.1:{server.address[1]}", *arguments])
            finally:
                await server.shutdown()

        return asyncio.run(go())

    yield query


class NoLive:
    def rows(self) -> list[RequestRow]:
        return []

    def stalls(self) -> tuple[()]:
        return ()

    def fetches(self) -> list[FetchRow]:
        return []


def test_the_api_and_the_folder_answer_alike(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    since = ("--since", str(NOW // S - 8000), "--until", str(NOW // S + 10), "--json")
    assert main(["events", "--data", str(root), *since]) == 0
    off_line = capsys.readouterr().out
    with collector(root) as query:
        assert query(*since) == 0
    assert capsys.readouterr().out == off_line
    assert len(off_line.splitlines()) == 6
    assert json.loads(off_line.splitlines()[0])["kind"] == "dead"


def test_nothing_known_is_an_answer_and_says_where_it_looked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--data", str(root), "--since", "-1s"]) == 0
    output = capsys.readouterr().out
    assert "No event of an engine in this period" in output
    assert str(root) in output


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--since", "soon"], "soon"),
        (["--limit", "0"], "--limit 0"),
        (["--since", "-1h", "--until", "-2h"], "since must be before"),
    ],
)
def test_an_impossible_query_is_refused(root: Path, flags: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--data", str(root), *flags]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 140])
def test_it_is_a_page_that_fits(root: Path, width: int, golden: Callable[[str, str], None]) -> None:
    reader = StoreReader(root / "store", threads=1)
    found = happened(reader, HappenedFilter(), NOW)
    reader.close()
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as page:
        console.print(render_events(cleaned(found), width, now_unix_ns=NOW, zone=timezone.utc))
    text = "\n".join(line.rstrip() for line in page.get().splitlines()) + "\n"
    assert all(len(line) <= width for line in text.splitlines())
    golden(f"cli/events_{width}.txt", text)
