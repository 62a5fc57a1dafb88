"""Every reported case has a test with its id, or a reason in ``cases_left.py``.

``docs/cases.md`` is made here: ``pytest --update`` rewrites it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from harness.cases_left import LEFT, NO_TEST

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "cases.md"
TITLES: Mapping[str, str] = {case["id"]: case["title"] for case in json.loads((TESTS / "data/cases.json").read_text("utf-8"))}
_ID = re.compile(r"(?<![A-Za-z0-9])[A-HPa-hp]\d\d(?![A-Za-z0-9])")


def ids_in(text: str) -> set[str]:
    return {found.upper() for found in _ID.findall(text.replace("_", " "))}


def ids_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the case ids in a test's name, docstring and decorators' parameters."""
    lines = [function.name, ast.get_docstring(function) or ""]
    for decorator in function.decorator_list:
        lines += [str(node.value) for node in ast.walk(decorator) if isinstance(node, ast.Constant)]
    return set().union(*map(ids_in, lines))


@cache
def shown_by() -> Mapping[str, Mapping[str, int]]:
    """Map each case to the files below ``tests`` and how many of their tests show it."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(set(TESTS.rglob("test_*.py")) - {Path(__file__)}):
        name = path.relative_to(TESTS).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for case in ids_of(node):
                    of_case = found.setdefault(case, {})
                    of_case[name] = of_case.get(name, 0) + 1
    return found


def _problem(case: str) -> str:
    known = shown_by().get(case, {})
    if not known and case not in NO_TEST:
        return f"{case} ({TITLES[case]}) is in the name of no test, and tests/harness/cases_left.py gives no reason"
    if known and case in NO_TEST:
        return f"{case} is tested now: take it out of NO_TEST in tests/harness/cases_left.py"
    return f"{case} is in both lists of tests/harness/cases_left.py" if case in LEFT and case in NO_TEST else ""


def test_every_case_is_a_test_by_its_id_or_has_a_reason_why_not() -> None:
    assert list(filter(None, map(_problem, sorted(TITLES)))) == []


def test_every_reason_is_of_a_case_that_there_is() -> None:
    assert not {*LEFT, *NO_TEST} - set(TITLES)
    assert all(reason.strip() for reason in (*LEFT.values(), *NO_TEST.values()))


def _rows() -> Iterator[str]:
    yield "| case | report | tests | not shown |"
    yield "|---|---|---|---|"
    for case, title in sorted(TITLES.items()):
        files = [f"`{name}`" + (f" ({count})" if count > 1 else "") for name, count in sorted(shown_by().get(case, {}).items())]
        yield f"| {case} | {title.replace('|', '/')} | {', '.join(files) or '–'} | {NO_TEST.get(case) or LEFT.get(case, '')} |"


def test_the_page_is_what_the_tests_are(request: pytest.FixtureRequest) -> None:
    page = "\n".join(
        [
            "# Reported cases",
            "",
            "These cases are public reports from people who run disaggregated serving. The letter is the area: hand-off (A),",
            "latency (B), tracing (C), metrics (D), streams (E), GPU counters (F), collectors (G), dashboards and alerts (H);",
            "P is a second book, of all areas.",
            "The third column lists the tests below `tests/` that replay the case by its id. The last column lists the parts",
            "that no test shows, and why. Nobody went through the parts of B, E, F, G and H one by one.",
            "",
            "`pytest --update tests/test_cases.py` writes this page. The reasons are in `tests/harness/cases_left.py`.",
            "",
            *_rows(),
            "",
        ]
    )
    if request.config.getoption("--update"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text("utf-8") == page, "docs/cases.md is not what the tests are: run this test with --update"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("test_A01_eight_stale_reads", {"A01"}),
        ("the case book's A16, and B16", {"A16", "B16"}),
        ("sha256_AB12_A1_A123", set()),
        ("test_D08_C_new", {"D08"}),
        ("test_c05_no_span", {"C05"}),
    ],
)
def test_ids_are_found_where_they_stand_alone(text: str, ids: set[str]) -> None:
    assert ids_in(text) == ids
