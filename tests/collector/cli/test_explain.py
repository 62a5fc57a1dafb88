"""``handrail explain`` over stores of the virtual fleet, by its API and off-line.

The tests check the phase, host and link that it names, and how the answer looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail_cli.main import main
from handrail_cli.render import period
from handrail_collector.api.server import ApiServer
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader

START = "2026-11-29T14:00:00Z"
PERIOD = ("--since", "2026-11-29T14:00:00Z", "--until", "2026-11-29T15:00:00Z")
NOW = 1_795_964_400_000_000_000  # 15:00 of that day
FAULTS = {
    "healthy": (),
    "slow_link": ("--fault", "slow_link:p0>d1:20"),
    "prefill_queue": ("--fault", "prefill_queue:p1:0.8@60-150"),
    "fetch_failed": ("--fault", "fetch_failed:p0>d0:0.3"),
}


class NoLive:
    """A collector that holds nothing open."""

    def rows(self) -> tuple[()]:
        return ()

    def stalls(self) -> tuple[()]:
        return ()

    def fetches(self) -> tuple[()]:
        return ()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a data folder of 2,500 requests for each fault."""
    root = tmp_path_factory.mktemp("fleets")
    for name, flags in FAULTS.items():
        with contextlib.redirect_stdout(io.StringIO()):
            assert (
                main(["demo", "--scenario", "split", "--requests", "2500", "--start", START, "--data", str(root / name), *flags])
                == 0
            )
    return {name: root / name for name in FAULTS}


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in ("COLUMNS", "HANDRAIL_API", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


Capture = pytest.CaptureFixture[str]


def explained_json(folder: Path, capsys: Capture, *flags: str) -> dict[str, Any]:
    assert main(["explain", "--data", str(folder), *PERIOD, "--json", *flags]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("name", sorted(FAULTS))
@pytest.mark.parametrize("width", [80, 120])
def test_it_looks_as_before(
    folders: dict[str, Path],
    name: str,
    width: int,
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("handrail_cli.commands.explain.time.time_ns", lambda: NOW)
    monkeypatch.chdir(folders[name].parent)
    assert main(["explain", "--data", name, *PERIOD]) == 0
    golden(f"cli/explain_{name}_{width}.txt", "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n")


def test_a_healthy_period_has_no_culprit(folders: dict[str, Path], capsys: Capture) -> None:
    (scope,) = explained_json(folders["healthy"], capsys)["scopes"]
    assert (scope["ttft"]["verdict"], scope["gap"]["verdict"]) == ("nothing_stands_out", "nothing_stands_out")
    assert scope["ttft"]["causes"]["named"] == []
    assert scope["summary"][0].startswith("Nothing stands out: the slowest 1 % (")


def test_a_slow_link_is_named_and_its_hosts_are_not_accused(folders: dict[str, Path], capsys: Capture) -> None:
    (scope,) = explained_json(folders["slow_link"], capsys)["scopes"]
    named = scope["ttft"]["causes"]["named"]
    assert [(each["phase"], each["place"]) for each in named] == [("unattributed", "p0>d1")]
    assert "kv_transfer" in named[0]["may_be"]
    assert [(c["dimension"], c["value"]) for c in scope["ttft"]["concentrations"] if c["stands_out"]] == [("link", "p0>d1")]
    assert scope["ttft"]["unattributed_share"] > 0.9


def test_a_queue_on_one_host_is_named_with_the_time_it_held(folders: dict[str, Path], capsys: Capture) -> None:
    (scope,) = explained_json(folders["prefill_queue"], capsys)["scopes"]
    named = scope["ttft"]["causes"]["named"][0]
    assert (named["phase"], named["place"]) == ("prefill_queue", "p1")
    assert named["requests"] > scope["ttft"]["requests"] / 2
    began = int(explained_json(folders["prefill_queue"], capsys)["since_unix_ns"])
    assert 30 * 10**9 < named["first_unix_ns"] - began < named["last_unix_ns"] - began < 200 * 10**9
    assert named["examples"]


def test_failures_are_listed_by_outcome_and_place(folders: dict[str, Path], capsys: Capture) -> None:
    (scope,) = explained_json(folders["fetch_failed"], capsys)["scopes"]
    failures = scope["failures"]
    assert failures["requests"] == sum(failures["by_outcome"].values()) > 50
    assert ("link", "p0>d0") in [(c["dimension"], c["value"]) for c in failures["concentrations"] if c["stands_out"]]
    assert any(sentence.startswith(f"{failures['requests']:,} requests failed") for sentence in scope["summary"])


def test_the_next_commands_work_as_they_are_printed(
    folders: dict[str, Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders["slow_link"].parent)
    assert main(["explain", "--data", "slow_link", *PERIOD]) == 0
    commands = [
        line.partition("#")[0].split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  handrail ")
    ]
    assert [command[0] for command in commands] == ["trace", "requests"]
    for command in commands:
        assert main(command) == 0
        assert "p0" in capsys.readouterr().out or command[0] == "trace"


async def test_the_api_gives_the_same_answer(folders: dict[str, Path], capsys: Capture) -> None:
    reader = StoreReader(folders["slow_link"] / "store", threads=1)
    server = ApiServer(reader, NoLive(), dict, "127.0.0.1", 0)
    await server.start()
    try:
        url = f"http://{server.address[0]}:{server.address[1]}"
        assert await asyncio.to_thread(main, ["explain", "--api", url, *PERIOD, "--json"]) == 0
        by_api = json.loads(capsys.readouterr().out)
        assert by_api.pop("pending") == {"open": 0, "not_stored_yet": 0}
        assert by_api == explained_json(folders["slow_link"], capsys)
        assert await asyncio.to_thread(main, ["explain", "--api", url, "--until", "2026-11-29T13:00:00Z"]) == 0
        assert "nothing to explain" in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["explain", "--api", url, "--since", "14:00", "--until", "14:00"]) == 2
    finally:
        await server.shutdown()


def test_on_a_terminal_the_first_answer_shows_until_the_exact_one_is_there(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shutil.copytree(folders["slow_link"], tmp_path / "data")
    publisher = StorePublisher(tmp_path / "data" / "store")
    publisher.open()
    Upkeep(publisher, UpkeepSettings(rollups=True), lambda: NOW + 10**13).run_pass()
    publisher.close()
    assert explained_json(tmp_path / "data", capsys, "--fast")["exact"] is False
    assert explained_json(tmp_path / "data", capsys)["exact"] is True
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["explain", "--data", str(tmp_path / "data"), *PERIOD]) == 0
    shown = capsys.readouterr().out
    assert shown.index("first answer, times within 1 %") < shown.index("· exact")
    assert main(["explain", "--data", str(tmp_path / "data"), *PERIOD, "--exact"]) == 0
    assert "first answer" not in capsys.readouterr().out


def test_an_empty_period_says_when_the_latest_request_was(folders: dict[str, Path], capsys: Capture) -> None:
    assert main(["explain", "--data", str(folders["healthy"]), "--until", "2026-11-29T13:00:00Z"]) == 0
    assert "The latest request began at " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        pytest.param(("--since", "soon"), "'soon' is not a time", id="no time"),
        pytest.param(("--since", "-1h", "--until", "-2h"), "since: must be before until", id="backwards"),
        pytest.param(("--fast", "--exact"), "not allowed with argument", id="both"),
    ],
)
def test_a_wrong_command_line_is_reported(folders: dict[str, Path], flags: tuple[str, ...], output: str, capsys: Capture) -> None:
    assert main(["explain", "--data", str(folders["healthy"]), *flags]) == 2
    assert output in capsys.readouterr().err


def test_a_percentile_with_few_beyond_is_marked() -> None:
    assert period._quantile(10**9, 10_000, 0.999).plain == "1.00 s"
    assert period._quantile(10**9, 9_990, 0.999).plain == "1.00 s?"
    assert period._quantile(None, 0, 0.5).plain == "–"
