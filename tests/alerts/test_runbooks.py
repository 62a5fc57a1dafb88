"""Every alert has a page: what it means, what to run, what to do.

The lines to run are ones that run.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from handrail_alerts.groups import alerts
from handrail_alerts.inhibition import COMPANIONS, INHIBITIONS
from handrail_alerts.slo import load
from handrail_cli.client import API_VARIABLE, DEFAULT_API
from handrail_cli.main import COMMANDS, Parser

RUNBOOKS = Path(__file__).parents[2] / "docs/runbooks"
ALERTS = alerts(load())
NAMES = sorted({alert.name for alert in ALERTS})
HEADINGS = ["What it means", "What to look at", "How to mitigate", "May fire with it"]
REACH = f"""Set the address of the collector's API once ([how to reach it](README.md#before-the-first-line)):

    export {API_VARIABLE}=https://COLLECTOR:4380
"""
ASKING = {"requests", "trace", "fetches", "events", "links", "explain", "compare"}
_COMMAND = re.compile(r"^    (handrail .+)$", re.M)
_LINK = re.compile(r"\]\((\w+)\.md\)")


def page_of(alert: str) -> str:
    file = RUNBOOKS / f"{alert}.md"
    assert file.exists(), f"{file} is missing: write what {alert} means, what to look at, how to mitigate"
    return file.read_text("utf-8")


def section(page: str, heading: str) -> str:
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def parses(line: str) -> bool:
    """Return whether the command line accepts a line."""
    _, name, *rest = shlex.split(line)
    module = importlib.import_module(COMMANDS[name].module)
    parser = Parser(prog=f"handrail {name}")
    module.add_arguments(parser)
    try:
        parser.parse_args([each.replace("-", "−", 1) if re.match(r"-\d", each) else each for each in rest])
    except SystemExit:
        return False
    return True


def _missing_parts(alert: str) -> Iterator[str]:
    page = page_of(alert)
    if not page.startswith(f"# {alert}\n"):
        yield "its title is not the alert"
    if re.findall(r"^## (.+)$", page, re.M) != HEADINGS:
        yield f"its headings are not {', '.join(HEADINGS)}"
    yield from (f"'{heading}' is empty" for heading in HEADINGS if not section(page, heading).strip())
    severities = list(dict.fromkeys(each.severity.value for each in ALERTS if each.name == alert))
    if f"\nSeverity: {', '.join(severities)}.\n" not in page:
        yield f"it does not say the severity {', '.join(severities)}"
    if not re.findall(r"^- ", section(page, "How to mitigate"), re.M):
        yield "it says nothing to do"


def test_every_page_has_all_its_parts() -> None:
    assert [f"{alert}: {problem}" for alert in NAMES for problem in _missing_parts(alert)] == []


def _wrong_lines(alert: str) -> Iterator[str]:
    commands = _COMMAND.findall(section(page_of(alert), "What to look at"))
    yield from (f"the command line refuses '{line}'" for line in commands if not parses(line))
    first = next(each.command for each in ALERTS if each.name == alert)
    if first not in commands:
        yield f"the alert says '{first}', its page does not"


def test_the_lines_to_run_are_ones_that_run() -> None:
    assert not parses("handrail explain --no-such-flag")
    assert [f"{alert}: {problem}" for alert in NAMES for problem in _wrong_lines(alert)] == []


def test_every_page_says_once_where_the_collector_is() -> None:
    """A page says once where the collector is, before its first line to run.

    That holds where any of its lines asks the collector. A line that reads a folder needs no collector.
    """
    wrong = []
    for alert in NAMES:
        look = section(page_of(alert), "What to look at")
        asks = [line for line in _COMMAND.findall(look) if line.split()[1] in ASKING and "--data" not in line]
        if look.count(REACH) != bool(asks) or (asks and look.index(REACH) > look.index("    handrail ")):
            wrong.append(alert)
    assert wrong == []


def test_the_commands_that_ask_a_collector_are_those_that_take_its_address() -> None:
    for name, command in COMMANDS.items():
        parser = Parser(prog=name)
        importlib.import_module(command.module).add_arguments(parser)
        takes = {"--api", "--data", "--token-file"} <= {flag for action in parser._actions for flag in action.option_strings}
        assert takes is (name in ASKING), name


def test_where_the_collector_is_is_explained() -> None:
    page = (RUNBOOKS / "README.md").read_text("utf-8")
    before = page.partition("## Before the first line\n")[2].partition("\n## ")[0]
    for word in (API_VARIABLE, "--api", DEFAULT_API, "HANDRAIL_API_CA_FILE", "HANDRAIL_API_TOKEN_FILE", "port-forward", "--data"):
        assert word in before


def test_every_page_lists_the_companions() -> None:
    listed = {alert: _LINK.findall(section(page_of(alert), "May fire with it")) for alert in NAMES}
    assert listed == {alert: list(COMPANIONS[alert]) for alert in NAMES}


def test_there_is_no_page_without_its_alert_and_no_link_without_its_page() -> None:
    pages = {file.stem for file in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == set(NAMES) == set(COMPANIONS)
    for name in pages:
        assert set(_LINK.findall(page_of(name))) <= pages
    assert {name for names in COMPANIONS.values() for name in names} <= pages
    assert all(name not in companions for name, companions in COMPANIONS.items())


def test_an_inhibiting_alert_is_a_companion_of_the_inhibited_one() -> None:
    """A page of an inhibited alert would be no surprise either."""
    for each in INHIBITIONS:
        source = re.findall(r'alertname="(\w+)"', " ".join(each.source))
        for target in re.findall(r'alertname=~"([\w|]+)"', " ".join(each.target)):
            for name in source:
                assert set(target.split("|")) <= set(COMPANIONS[name]), (name, target)


def test_the_list_of_pages_is_complete() -> None:
    listed = _LINK.findall((RUNBOOKS / "README.md").read_text("utf-8"))
    assert sorted(listed) == NAMES
