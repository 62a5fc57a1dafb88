"""``handrail requests`` and ``handrail trace`` on a real store.

Both run by its API and off-line.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from builders.request_rows import MS, ROWS, SPANS, STARTED, TRACE
from handrail_cli.main import main
from handrail_collector.api.schema import fetch_from_json, row_from_json
from handrail_collector.api.server import ApiServer
from handrail_collector.rows import FetchRow, RequestRow
from handrail_collector.store.manifest import MANIFEST
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_collector.store.tables.spans import SpanRow

S = 1000 * MS
SLOW = replace(ROWS["slow_prefill_queue"], request_id="a" * 16, client_request_id="user-42-8", started_unix_ns=STARTED + S)
FAILED = replace(
    ROWS["stream_error"],
    request_id="b" * 16,
    trace_id="b" * 32,
    client_request_id="user-43-1",
    request_key="user-43-1",
    response_id="chatcmpl-user-43-1",
    started_unix_ns=STARTED + 2 * S,
)
LIVE = replace(
    ROWS["edgeless"],
    request_id="c" * 16,
    trace_id="c" * 32,
    response_id="cmpl-live-1",
    request_key=None,
    started_unix_ns=STARTED + 3 * S,
    version=0,
)
STORED = [
    ROWS["ordinary"],
    replace(SLOW, response_id="chatcmpl-user-42-8", request_key="user-42-8"),
    FAILED,
]


FETCH = FetchRow(
    started_unix_ns=STARTED + 100 * MS,
    trace_id=ROWS["ordinary"].trace_id,
    request_id=ROWS["ordinary"].request_id,
    version=ROWS["ordinary"].version,
    number=0,
    span_id="f" * 16,
    client_request_id="user-42-7",
    direction="p_to_d",
    mode="pull",
    connector="NixlConnector",
    consumer_instance="10.0.0.2:8200",
    producer_instance="10.0.0.1:8100",
    outcome="ok",
    evidence=("decode:plugin loaded and seen by the scheduler",),
    duration_ns=75 * MS,
    wait_ns=MS,
    handshake_ns=0,
    transfer_ns=66 * MS,
    transfer_bound_ns=MS,
    notice_ns=8 * MS,
    blocks=512,
    tokens=8192,
    bytes_expected=3 << 30,
    bytes_moved=3 << 30,
)
STALE = replace(
    FETCH,
    request_id="b" * 16,
    trace_id="b" * 32,
    client_request_id="user-43-1",
    started_unix_ns=STARTED + 2 * S,
    outcome="stale_read",
    reason="read_after_expiry",
    tainted=True,
    late_ns=21 * S,
    bytes_moved=None,
    transfer_ns=None,
    evidence=("prefill:plugin read after the end of the lease",),
)
OPEN_FETCH = replace(
    FETCH,
    request_id="c" * 16,
    trace_id="c" * 32,
    version=0,
    client_request_id="live",
    started_unix_ns=STARTED + 3 * S,
    outcome="hung",
    open=True,
    duration_ns=85 * S,
)


def span_row(made: object) -> SpanRow:
    shown = {name: getattr(made, name) for name in ("name", "role", "instance", "start_unix_ns", "end_unix_ns", "status")}
    ids = {name: getattr(made, name) for name in ("span_id", "parent_span_id")}
    rest = {"status_message": "", "flags": 1, "trace_state": "", "service": "s", "scope": "handrail.proxy"}
    none = {"resource": {}, "attributes": {"tokens": 7}, "events": (), "links": (), "raw_bytes": 99}
    return SpanRow(offset=0, trace_id=TRACE, kind=2, **shown, **ids, **rest, **none)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nobody_sets_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "HANDRAIL_API", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a collector's data folder with a published store."""
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    flat = {Table.KV_FETCHES: [FETCH, STALE]}
    publisher.publish(0, 5000, 5000, [span_row(made) for made in SPANS], STORED, flat=flat)
    publisher.close()
    return tmp_path


@dataclass
class Live:
    held: Sequence[RequestRow]

    def rows(self) -> Sequence[RequestRow]:
        return self.held

    def stalls(self) -> tuple[()]:
        return ()

    def fetches(self) -> Sequence[FetchRow]:
        return [OPEN_FETCH]


Ask = Callable[..., Awaitable[int]]


@pytest.fixture
async def api(data: Path) -> AsyncIterator[str]:
    server = ApiServer(StoreReader(data / "store"), Live([LIVE]), dict, "127.0.0.1", 0)
    await server.start()
    yield f"http://{server.address[0]}:{server.address[1]}"
    await server.shutdown()


@pytest.fixture(params=["api", "data"])
def ask(request: pytest.FixtureRequest, data: Path, api: str) -> Ask:
    """Run one command against the store in one of the two ways."""
    where = ["--api", api] if request.param == "api" else ["--data", str(data)]

    async def run(*argv: str) -> int:
        return await asyncio.to_thread(main, [*argv, *where])

    return run


async def test_requests_are_listed_in_the_requested_order(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("requests", "--sort", "prefill_queue", "--since", "2026-11-01", "--scope", "edge") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "prefill_queue" in lines[0]
    assert "user-42-8" in lines[1]
    assert "812 ms" in lines[1]
    assert len(lines) == 4


async def test_rows_come_as_json_lines_with_every_field(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("requests", "--outcome", "stream_error", "--json", "--min-ttft", "1s") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert row_from_json(json.loads(line)) == FAILED


@pytest.mark.parametrize(
    "any_id", ["user-42-8", "chatcmpl-user-42-8", "a" * 16, "a" * 8, "cmpl-user-42-8-0-9c60a41c", "aaaaaaa…"]
)
async def test_a_request_is_found_by_any_of_its_ids(ask: Ask, any_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("trace", any_id) == 0
    text = capsys.readouterr().out
    assert text.startswith("user-42-8")
    assert "prefill_queue at P 10.0.0.1:8100: 812 ms of the 918 ms" in text


async def test_the_spans_are_shown(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("trace", "user-42-7") == 0
    text = capsys.readouterr().out
    assert "handrail.request" in text
    assert text.count("llm_request") == 2


async def test_the_whole_answer_comes_as_json(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("trace", "user-42-7", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert row_from_json(answer["request"]) == ROWS["ordinary"]
    assert {span["span_id"] for span in answer["spans"]} == {span.span_id for span in SPANS}


async def test_an_id_of_several_requests_lists_them(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("trace", TRACE) == 1
    text = capsys.readouterr().out
    assert "2 requests have the id" in text
    assert {line.split()[0] for line in text.splitlines()[3:]} == {"00f067aa0ba902b7", "a" * 16}
    assert await ask("trace", TRACE, "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["candidates"]) == 2


async def test_an_unknown_id_names_similar_ones(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("trace", "user-43-9") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no request has the id 'user-43-9'" in captured.err
    assert "user-43-1" in captured.err
    assert await ask("trace", "user-43-9", "--json") == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert "user-43-1" in error["nearest"]
    assert error["valid"]


async def test_no_fitting_request_says_what_was_searched(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("requests", "--model", "none-such", "--since", "2026-11-01", "--until", "2026-11-02") == 0
    text = capsys.readouterr().out
    assert "No request matches: since 2026-11-01 00:00:00.000, until 2026-11-02 00:00:00.000, model none-such" in text
    assert "The latest request there started at" in text
    assert await ask("requests", "--model", "none-such", "--json") == 0
    assert capsys.readouterr().out == ""


async def test_what_is_still_open_is_shown_as_provisional(api: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["trace", "cmpl-live-1", "--api", api]) == 0
    assert "provisional: the request is still open" in capsys.readouterr().out


def test_an_empty_store_asks_whether_sidecars_send(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    publisher.publish(0, 10, 10, [], [])
    publisher.close()
    assert main(["requests", "--data", str(tmp_path)]) == 0
    assert "check that there is traffic, and that the sidecars send there" in capsys.readouterr().out


def test_a_folder_without_a_store_and_a_damaged_one_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requests", "--data", str(tmp_path)]) == 1
    assert "this folder holds no store" in capsys.readouterr().err
    (tmp_path / "manifest.jsonl").write_bytes(b"00000000 {}\n00000000 {}\n")
    assert main(["requests", "--data", str(tmp_path)]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_an_empty_id_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", " "]) == 2
    assert "the ID is empty" in capsys.readouterr().err


async def test_a_trace_shows_its_hand_off_with_the_source_of_each_figure(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("trace", "user-42-7") == 0
    text = capsys.readouterr().out
    assert "KV fetches\nP 10.0.0.1:8100 → D 10.0.0.2:8200   ok" in text
    assert "3.22 GB moved, 512 blocks, 8192 tokens, 48.81 GB/s, pull, NixlConnector" in text
    assert "peer known, no handshake" in text
    assert "evidence: decode:plugin loaded and seen by the scheduler" in text
    assert await ask("trace", "user-42-7", "--json") == 0
    (fetch,) = json.loads(capsys.readouterr().out)["fetches"]
    assert fetch_from_json(fetch) == FETCH


async def test_an_answer_from_expired_blocks_is_called_what_it_is(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("trace", "user-43-1") == 0
    text = capsys.readouterr().out
    assert "stale_read  read_after_expiry" in text
    assert "the answer cannot be trusted" in text
    assert "read 21.0 s after its lease ended" in text


async def test_hand_offs_are_listed_filtered_and_sorted(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("fetches", "--failed", "--outcome", "stale_read") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "user-43-1" in lines[1]
    assert await ask("fetches", "--sort", "bytes", "--json", "--peer", "10.0.0.1:8100") == 0
    rows = [fetch_from_json(json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert rows[0].bytes_moved == 3 << 30
    assert STALE in rows


async def test_an_open_hand_off_is_listed_by_its_age_while_it_hangs(api: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["fetches", "--open", "--sort", "duration", "--api", api]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hung (open)" in lines[1]
    assert "85.0 s" in lines[1]


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        (("--failed",), "None of 3 KV fetches failed. Searched "),
        (
            ("--failed", "--since", "2026-11-02", "--peer", "10.0.0.1:8100"),
            "None of 2 KV fetches (since 2026-11-02 00:00:00.000, peer",
        ),
        (
            ("--failed", "--direction", "d_to_p", "--since", "2026-11-01"),
            "No KV fetch matches: since 2026-11-01 00:00:00.000, ",
        ),
        (("--outcome", "stale_read"), "None of 3 KV fetches has the outcome stale_read. "),
        (("--failed", "--open"), "None of 3 KV fetches failed and is open. "),
        (("--peer", "nobody"), "No KV fetch matches: peer nobody. Searched "),
    ],
    ids=["failed", "of a period", "none of the others fits", "outcome", "both", "only others"],
)
async def test_where_none_failed_it_says_of_how_many(
    flags: tuple[str, ...], output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    day = 86400 * 10**9
    at = [int(datetime(2026, 11, 1, 12, tzinfo=timezone.utc).timestamp()) * 10**9 + number * day for number in range(3)]
    rows = [replace(FETCH, request_id=f"{number:016x}", started_unix_ns=began) for number, began in enumerate(at)]
    rows[2] = replace(rows[2], outcome="unknown", reason=None)
    publisher.publish(0, 1, 1, [], STORED, flat={Table.KV_FETCHES: rows})
    publisher.close()
    assert await asyncio.to_thread(main, ["fetches", "--data", str(tmp_path), *flags]) == 0
    reported_output = capsys.readouterr().out
    assert reported_output.startswith(output)
    assert ("But the end of 1 is unknown." in reported_output) is reported_output.startswith("None")
    assert await asyncio.to_thread(main, ["fetches", "--data", str(tmp_path), "--json", *flags]) == 0
    assert capsys.readouterr().out == ""


async def test_a_wrong_outcome_is_refused_with_the_nearest(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ask("fetches", "--outcome", "stale_reed") == 2
    assert "did you mean stale_read?" in capsys.readouterr().err


async def test_no_hand_off_says_what_would_tell_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    publisher.publish(0, 1, 1, [], STORED)
    publisher.close()
    assert await asyncio.to_thread(main, ["fetches", "--data", str(tmp_path)]) == 0
    assert "the plugin in the engines reports KV fetches" in capsys.readouterr().out


PAINTS = "i\x1b[41mY\x9b2J\n:1"
SHOWN = r"i\x1b[41mY\x9b2J\n:1"


@pytest.fixture
def painted(tmp_path: Path) -> Path:
    """Return a store whose names hold escape codes.

    The codes paint, erase and break a terminal's screen.
    """
    names = {"prefill_instance": PAINTS, "decode_instance": PAINTS, "model": PAINTS, "error_type": PAINTS}
    rows = [replace(row, **names) for row in (*STORED, *painted_rows())]  # type: ignore[arg-type]
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    spans = [replace(span_row(made), instance=PAINTS, name=PAINTS) for made in SPANS]
    fetch = replace(FETCH, consumer_instance=PAINTS, producer_instance=PAINTS, connector=PAINTS, client_request_id=PAINTS)
    publisher.publish(0, 5000, 5000, spans, rows, flat={Table.KV_FETCHES: [fetch]})
    publisher.close()
    return tmp_path


def painted_rows() -> list[RequestRow]:
    return [
        replace(
            SLOW, request_id=f"{n:016x}", trace_id=f"{n:032x}", client_request_id=f"id\x1b[5m{n % 2}", decode_host=f"\x1b]0;{n}\a"
        )
        for n in range(1, 200)
    ]


@pytest.mark.parametrize(
    "command",
    [
        ["requests"],
        ["requests", "--model", "\x1b[31mno"],
        ["trace", "user-42-7"],
        ["trace", "a" * 16],
        ["fetches"],
        ["trace", "id\x1b[5m0"],
        ["trace", "id\x1b[5m7"],
        ["explain", "--since", "2026-11-01"],
        ["explain", "--since", "2026-11-01", "--model", "\x1b[31mno"],
    ],
    ids=" ".join,
)
def test_names_cannot_drive_the_terminal(painted: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*command, "--data", str(painted)])
    captured = capsys.readouterr()
    odd = {char for char in captured.out + captured.err if not char.isprintable()} - {"\n"}
    assert odd == set()
    assert captured.out + captured.err


def test_control_characters_are_shown_and_json_keeps_them(painted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "a" * 16, "--data", str(painted)]) == 0
    output = capsys.readouterr().out
    assert f"P {SHOWN}" in output
    assert f"D {SHOWN}" in output
    assert main(["trace", "a" * 16, "--data", str(painted), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["prefill_instance"] == PAINTS


def test_arms_of_such_names_are_compared_in_peace(painted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"a\x1b[1m={painted}", f"b={painted}"]) in (0, 2)
    captured = capsys.readouterr()
    assert {char for char in captured.out + captured.err if not char.isprintable()} <= {"\n"}


@pytest.mark.parametrize("left", [None, b"", b"garbage\n", b"garbage"], ids=["missing", "empty", "line", "torn"])
@pytest.mark.parametrize("command", [["requests"], ["explain"], ["trace", "user-42-7"]], ids=lambda each: each[0])
@pytest.mark.parametrize("inside", [False, True], ids=["data", "store"])
def test_a_store_without_its_manifest_is_not_called_empty(
    data: Path, left: bytes | None, command: list[str], inside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "store" / MANIFEST).unlink()
    if left is not None:
        (data / "store" / MANIFEST).write_bytes(left)
    assert main([*command, "--data", str(data / "store" if inside else data)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert MANIFEST in captured.err
    assert "from a copy" in captured.err
    assert ("data files" in captured.err) == (left != b"garbage\n")
    assert len(captured.err.splitlines()) <= 4
