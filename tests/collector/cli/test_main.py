"""The command line's entry point: its imports, exit codes and messages."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from handrail_cli.commands.config import configuration_page
from handrail_cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]
GOOD = "role: edge\nlisten: 127.0.0.1:8000\nupstream: http://127.0.0.1:8100\ncollector: {headers: {authorization: sesame}}\n"

LOADED = """
import sys
before = set(sys.modules)
{code}
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(",".join(sorted(roots - set(sys.stdlib_module_names) - {{"handrail", "handrail_cli", "handrail_sidecar"}})))
"""


def python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import handrail", id="the-package"),
        pytest.param("import handrail_cli.main", id="the-entry-point"),
        pytest.param("import handrail_cli.main as m; assert m.main(['--version']) == 0", id="version"),
        pytest.param("import handrail_cli.main as m; assert m.main(['--help']) == 0", id="help"),
        pytest.param("import handrail_cli.main as m; assert m.main(['requsts']) == 2", id="typo"),
        pytest.param("import handrail.config.schema, handrail_sidecar.settings, handrail.durations", id="configuration"),
    ],
)
def test_only_the_standard_library_is_loaded(code: str) -> None:
    done = python(LOADED.format(code=code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


def without(module: str) -> str:
    """Return the exit code of a process in which a module is not installed."""
    return f"import sys; sys.modules[{module!r}] = None; from handrail_cli.main import main"


@pytest.mark.parametrize(
    ("command", "blocked", "output"),
    [
        (["requests"], "rich", "pip install 'handrail[sidecar]'"),
        (["trace", "x"], "rich", "pip install 'handrail[sidecar]'"),
        (["requests", "--data", "."], "duckdb", "pip install 'handrail[collector]'"),
        (["config", "check", "{file}"], "yaml", "pip install 'handrail[sidecar]'"),
        (["collector", "--config", "{file}"], "yaml", "pip install 'handrail[collector]'"),
    ],
)
def test_a_missing_extra_is_named(command: list[str], blocked: str, output: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(GOOD)
    arguments = [each.format(file=file) for each in command]
    done = python(
        f"import sys; sys.modules[{blocked!r}] = None; from handrail_cli.main import main; sys.exit(main({arguments!r}))"
    )
    assert done.returncode == 1
    assert output in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_of_ours_that_is_missing_is_a_bug_not_an_extra() -> None:
    done = python(
        "import sys; sys.modules['handrail_sidecar.settings'] = None; "
        "from handrail_cli.main import main; main(['config', 'check', 'x'])"
    )
    assert "Traceback" in done.stderr


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        pytest.param(["requsts"], "did you mean requests?", id="command"),
        pytest.param(["zzz"], "unknown command 'zzz'\n", id="nothing-near"),
        pytest.param(["requests", "--instence", "x"], "did you mean --instance?", id="flag"),
        pytest.param(["requests", "--sin", "-15m"], "did you mean --since?", id="no-abbreviations"),
        pytest.param(["requests", "--sort", "kv_transfr"], "did you mean kv_transfer?", id="choice"),
        pytest.param(["config", "chek", "x"], "did you mean check?", id="sub-command"),
        pytest.param(["trace"], "required: ID", id="missing"),
        pytest.param(["requests", "--since", "soon"], "'soon' is not a time; valid: -15m", id="time"),
        pytest.param(["requests", "--min-ttft", "5"], "'5' is not a duration", id="duration"),
        pytest.param(["requests", "--limit", "0"], "limit: 0 is not between 1 and 10000", id="limit"),
        pytest.param(["requests", "--since", "now", "--until", "-15m"], "since: must be before until", id="times"),
        pytest.param(["sidecar", "--role", "edge", "--listen", "8000"], "did you mean 127.0.0.1:8000?", id="configuration"),
    ],
)
def test_a_usage_error_says_what_is_valid_and_is_2(argv: list[str], output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert output in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "demo"])
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"handrail {name}" in capsys.readouterr().out


def test_every_help_page_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pages = [[], *([name] for name in COMMANDS), *(["alerts", name] for name in ("render", "check", "slo", "alertmanager"))]
    wide = []
    for page in [*pages, ["dashboards", "export"], ["config", "check"]]:
        assert main([*page, "--help"]) == 0
        wide += [f"{page}: {line}" for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert wide == []


def test_a_reader_that_closes_its_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [sys.executable, "-m", "handrail_cli.main", "--help"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    _, output = process.communicate(timeout=300)
    assert (process.returncode, output) == (141, "")


def test_ctrl_c_ends_quietly_with_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        api = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "handrail_cli.main", "requests", "--api", api]
        heeding = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a test run in the background ignores SIGINT, and so do its children
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        finally:
            signal.signal(signal.SIGINT, heeding)
        try:
            connection, _ = server.accept()  # it waits for an answer now
            with connection:
                process.send_signal(signal.SIGINT)
                out, output = process.communicate(timeout=300)
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, out, output) == (130, "", "")


# --- config check ---------------------------------------------------------------------------------------------------------


def test_config_check_shows_what_takes_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text(GOOD)
    assert main(["config", "check", str(file)]) == 0
    text = capsys.readouterr().out
    assert "a valid sidecar configuration" in text
    assert "instance: 127.0.0.1:8100" in text
    assert "request_id: add" in text
    assert "sesame" not in text
    assert main(["config", "check", str(file), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is True
    assert answer["effective"]["collector"]["headers"] == {"authorization": "****"}


def test_config_check_shows_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "collector.yaml"
    file.write_text("decision: {setle: 2s}\njournal_max_bytes: 1\n")
    assert main(["config", "check", str(file)]) == 2
    text = capsys.readouterr().out
    assert "2 problems" in text
    assert "decision.setle: unknown; did you mean settle?" in text
    assert "checked as a collector configuration" in text
    assert main(["config", "check", str(file), "--json", "--kind", "collector"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert [problem["path"] for problem in answer["problems"]] == ["decision.setle", "journal_max_bytes"]
    assert main(["config", "check", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().out


def test_problems_of_a_started_process_come_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collector", "--api", "x", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["problems"][0]["where"] == "--api"


# --- pages ----------------------------------------------------------------------------------------------------------------


def test_the_configuration_page_is_the_generated_one(pytestconfig: pytest.Config) -> None:
    page = ROOT / "docs" / "configuration.md"
    if pytestconfig.getoption("--update"):
        page.write_text(configuration_page(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == configuration_page(), "run this test with --update"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("sidecar", "collector", "demo")])
def test_the_command_page_names_every_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"## handrail {name}" in page
    main([name, *{"config": ["check"], "dashboards": ["export"], "alerts": ["render"]}.get(name, []), "--help"])
    flags = {word.strip("[],") for word in capsys.readouterr().out.split() if word.strip("[],").startswith("--")}
    assert {flag for flag in flags if f"`{flag}" not in page} <= {"--help"}
