"""``handrail dashboards export``: files for Grafana with the user's choices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from handrail_cli.main import main
from handrail_collector.store.snapshot import names as query_names
from handrail_dashboards.boards import BOARDS

ROOT = Path(__file__).parents[2]
FILES = {f"{board.file}.json" for board in BOARDS}


def test_it_writes_the_five_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made" / "here"
    assert main(["dashboards", "export", str(folder)]) == 0
    assert {file.name for file in folder.iterdir()} == FILES
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert f"{folder / 'fleet.json'}  Handrail / Fleet, " in "\n".join(lines)


def test_what_is_chosen_stands_in_the_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = (
        "--datasource",
        "Prom (eu)",
        "--tempo",
        "Traces",
        "--jaeger-url",
        "https://jaeger/",
        "--handrail-url",
        "https://h:4380",
    )
    assert main(["dashboards", "export", str(tmp_path), *chosen, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {Path(each["file"]).name for each in answer["dashboards"]} == FILES
    assert all(each["panels"] > 10 for each in answer["dashboards"])
    for name in FILES:
        variables = {each["name"]: each for each in json.loads((tmp_path / name).read_text("utf-8"))["templating"]["list"]}
        assert variables["datasource"]["current"]["value"] == "Prom (eu)"
        assert variables["datasource"]["regex"] == r"/^Prom\ \(eu\)$/"
        assert variables["tempo"]["current"]["value"] == "Traces"
        assert variables["jaeger"]["query"] == variables["jaeger"]["current"]["value"] == "https://jaeger"
        assert variables["handrail"]["query"] == "https://h:4380"


@pytest.mark.parametrize(
    ("flag", "value", "output"),
    [
        ("--handrail-url", "handrail:4380", "nearest: http://handrail:4380"),
        ("--handrail-url", "ftp://handrail", "must begin with http:// or https://"),
        ("--handrail-url", "https://", "has no host"),
        ("--handrail-url", "https://h:4380/?x=1", "must not have a query"),
        ("--handrail-url", "", "must begin with http:// or https://"),
        ("--jaeger-url", "https://a b/", "has no host"),
        ("--jaeger-url", "https://h:99999", "is not a URL"),
        ("--datasource", "", "without --datasource you choose it in Grafana"),
        ("--datasource", "  ", "the name or uid that Grafana shows"),
        ("--datasource", "a\nb", "no name of a data source"),
        ("--tempo", " Tempo", "no name of a data source"),
    ],
)
def test_what_no_dashboard_could_use_is_refused_and_nothing_is_written(
    flag: str, value: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "export", str(tmp_path / "made"), flag, value]) == 2
    reported_output = capsys.readouterr().err
    assert f"handrail dashboards: {flag} is {value!r}: " in reported_output
    assert output in reported_output
    assert not (tmp_path / "made").exists()


def test_an_address_may_have_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "export", str(tmp_path), "--handrail-url", "https://tools.example.org/handrail/"]) == 0
    variables = json.loads((tmp_path / "fleet.json").read_text("utf-8"))["templating"]["list"]
    assert [each["query"] for each in variables if each["name"] == "handrail"] == ["https://tools.example.org/handrail"]


def test_examples_of_provisioning_are_yaml_that_grafana_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "export", str(tmp_path), "--provisioning", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["provisioning"]
    assert sorted(written) == [str(tmp_path / f"provisioning/{kind}/handrail.yaml") for kind in ("dashboards", "datasources")]
    sources = yaml.safe_load((tmp_path / "provisioning/datasources/handrail.yaml").read_text("utf-8"))["datasources"]
    prometheus, tempo = sources
    links = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert [link["urlDisplayLabel"] for link in links] == ["Tempo", "Jaeger", "Handrail"]
    assert {link["name"] for link in links} == {"trace_id"}, "the label of our exemplars"
    assert links[0]["datasourceUid"] == tempo["uid"]
    assert all(link["url"].endswith("$${__value.raw}") for link in links[1:]), "one $ would be taken for an environment variable"


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["dashboards", "export", str(blocked / "below"), "--json"]) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert "cannot write" in error["what"]
    assert str(blocked) in error["where"]


def test_it_needs_the_standard_library_alone(tmp_path: Path) -> None:
    """A base install without extras imports only the standard library and Handrail."""
    code = (
        "import sys\n"
        "from handrail_cli.main import main\n"
        f"assert main(['dashboards', 'export', {str(tmp_path)!r}]) == 0\n"
        "ours = {'handrail', 'handrail_cli', 'handrail_dashboards'}\n"
        "foreign = {name.partition('.')[0] for name in sys.modules if getattr(sys.modules[name], '__file__', None)}\n"
        "foreign -= set(sys.stdlib_module_names) | ours | {'__main__', '__mp_main__', 'sitecustomize', 'usercustomize'}\n"
        "foreign = {name for name in foreign if not name.startswith(('_', 'distutils'))}\n"
        "print(sorted(foreign))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_wheel_has_the_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"handrail_dashboards/generated/{name}" for name in FILES} <= names
    assert {f"handrail_collector/store/queries/{name}.sql" for name in query_names()} <= names
    assert {f"handrail_dashboards/provisioning/{kind}.yaml" for kind in ("dashboards", "datasources")} <= names
