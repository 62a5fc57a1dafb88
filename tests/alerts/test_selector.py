"""Checks of regular expressions against Prometheus's own.

The real promtool is the reference, pattern by pattern.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handrail_alerts.selector import refusal, refused
from harness.alert_tools import needs_promtool

TAKEN = [
    *("", "a|b", "|", "()", "(|a)*", "a*?", "a{2}?", "a{,3}", "a{01}", "x{", "]", "}", "^*", "a(?i)*", "(?i-s:x)", "(?)", "[]a]"),
    *("[^]a]", "[a-]", "[-a]", "[[:alpha:]-z]", "[[:]", r"\pL", r"\p{Greek}", r"\P{^Lu}", r"[\d-z]", r"\Qa(b\E*", r"\_"),
    *(
        r"\x{10FFFF}",
        r"\x41",
        r"\012",
        r"\08",
        r"\A\z\b\B",
        "(?P<n>x)(?P<n>y)",
        "(?:a{10}){100}",
        "(?:a{0}){1000}",
        "llama-3\\.1-.+",
    ),
]
REFUSED = [
    *(
        "a(b",
        "a)b",
        "a)(b",
        "*a",
        "a|*",
        "(*a)",
        "a**",
        "a+*",
        "a*??",
        "a{2}{3}",
        "a{1001}",
        "a{3,2}",
        "(?:a{100}){100}",
    ),
    *("(?=x)", "(?!x)", "(?<=x)", "(?P=n)", "(?P<n", "(?P<>x)", "(?i", "(?-)", "(?i-)", "(?x)", "(?"),
    *("[a", "[]", "[^]", "[z-a]", "[[:foo:]]", "[[:alpha:]", r"[a-\d]", r"\1", r"\8", r"\Z", r"\E", r"\q", "a\\", r"\é"),
    *(r"\x{110000}", r"\x{}", r"\x4", r"\p{Nothing", r"\pX", r"\p{}", r"[\Q]", r"\Qa*("),
]
ONLY_PROMTOOL_REFUSES = ["a{99999999999}", r"\C", "(" * 1200 + ")" * 1200]
"""Any byte, a count that fits no integer, and deep nesting: nobody writes these into a selector."""

CHUNKS = st.sampled_from(
    [
        *(
            "a",
            "é",
            "-",
            "]",
            "[",
            "[^",
            "(",
            ")",
            "(?:",
            "(?i)",
            "(?P<a>",
            "(?P<b>",
            "|",
            "*",
            "+",
            "?",
            "{",
            "}",
            "{2}",
            "{3,}",
        ),
        *("{1,40}", "{0}", "{1001}", "{2,1}", ",", "^", "$", ".", "\\", r"\d", r"\W", r"\pL", r"\p{", r"\Q", r"\E", r"\b", r"\z"),
        *("[:alpha:]", "[:x:]", "x", "1", "7", "z-a", "a-z", "\\.", "\\x", "{4", "\n"),
    ]
)


def test_patterns_that_prometheus_takes_are_taken() -> None:
    assert [(pattern, refusal(pattern)) for pattern in TAKEN if refusal(pattern)] == []


def test_patterns_that_prometheus_refuses_are_refused_with_a_reason() -> None:
    assert [pattern for pattern in REFUSED if not refusal(pattern)] == []


@given(st.text())
def test_any_text_gets_an_answer(text: str) -> None:
    refusal(text)


def of_promtool(selectors: list[str], folder: Path) -> list[bool]:
    """Return whether promtool accepts a series with each of the selectors."""
    rules = [{"record": f"r{index}", "expr": f"x{{{each}}}"} for index, each in enumerate(selectors)]
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}, allow_unicode=True), "utf-8")
    completed = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False)
    bad = set(re.findall(r"rule \d+, \"(r\d+)\"", completed.stdout + completed.stderr))
    assert (completed.returncode == 0) is (not bad), completed.stderr
    return [f"r{index}" not in bad for index in range(len(selectors))]


def quoted(pattern: str) -> str:
    escaped = pattern.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'a=~"{escaped}"'


@needs_promtool
def test_promtool_says_the_same_of_each(tmp_path: Path) -> None:
    patterns = [*TAKEN, *REFUSED, "(?:" * 200 + ")" * 200]
    for pattern, taken in zip(patterns, of_promtool([quoted(each) for each in patterns], tmp_path), strict=True):
        assert (refusal(pattern) == "") is taken, pattern


@needs_promtool
def test_only_three_rare_patterns_are_refused_by_promtool_alone(tmp_path: Path) -> None:
    assert [refusal(each) for each in ONLY_PROMTOOL_REFUSES] == [""] * 3
    assert of_promtool([quoted(each) for each in ONLY_PROMTOOL_REFUSES], tmp_path) == [False] * 3


@needs_promtool
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(CHUNKS, max_size=9).map("".join), min_size=60, max_size=120))
def test_promtool_says_the_same_of_any(tmp_path: Path, patterns: list[str]) -> None:
    for pattern, taken in zip(patterns, of_promtool([quoted(each) for each in patterns], tmp_path), strict=True):
        assert (refusal(pattern) == "") is taken, pattern


@needs_promtool
def test_promtool_says_the_same_of_strings(tmp_path: Path) -> None:
    selectors = [
        *(r'a="b\.c"', r'a="b\\.c"', r"a='\"'", r"a='\''", r'a="\'"', r"a=`\.`", r'a="\x41"', r'a="\x4"', r'a="\101"', r'a="\1"'),
        *(
            r'a="\400"',
            r'a="\u00e9"',
            r'a="\ud800"',
            r'a="\U00110000"',
            r'a="\U0010FFFF"',
            'a = "b" , c!~"d"',
            'a=~".*"',
            'a=="b"',
        ),
        *('a="b" c="d"', "a=b", 'a.b="c"', 'a="', "a='b\"'", 'a=~"("', "a!~`[`", 'a="("'),
    ]
    for selector, taken in zip(selectors, of_promtool(selectors, tmp_path), strict=True):
        assert (refused(selector) == "") is taken, selector
