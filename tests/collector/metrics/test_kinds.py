"""The list of finding kinds that are counted from 0 on.

It holds every kind that the code can produce.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import handrail_collector
from handrail_cli.glossary import FINDING
from handrail_collector.explain.request.findings import _EVENTS, FINDINGS
from handrail_collector.stitch.group import AMBIGUOUS

ROOT = Path(handrail_collector.__file__).parent
SAYING = (*sorted((ROOT / "explain").rglob("*.py")), *sorted((ROOT / "stitch").glob("*.py")), ROOT / "pipeline.py")
KIND = re.compile(r"([a-z]+(?:_[a-z]+)+)(?:: |$)")
CALLS = {"_find", "finding_row", "append", "extend", "Breakdown"}


def metric_values(source: str) -> Iterator[str]:
    """Yield the kinds that a module's code produces.

    A kind begins a text ``kind: detail`` that is yielded, found or appended, or is a text of its own where a kind is expected.
    """
    for node in ast.walk(ast.parse(source)):
        given: list[ast.expr] = []
        alone = False
        if isinstance(node, ast.Yield) and node.value is not None:
            given = [node.value]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            alone = name in ("_find", "finding_row", "Breakdown")
            given = node.args if name in CALLS else []
        texts = [str(part.value) for value in given for part in ast.walk(value) if isinstance(part, ast.Constant)]
        for text in texts:
            found = KIND.match(text)
            if found is not None and (alone or text.startswith(f"{found[1]}: ")):
                yield found[1]


def test_the_list_is_what_the_code_says() -> None:
    names = {kind for path in SAYING for kind in metric_values(path.read_text())}
    others = {*_EVENTS.values(), AMBIGUOUS, "handoff_near_lease", "handoff_over_lease", "unexplained_failures"}
    assert len(names) >= 15
    assert names | others == set(FINDINGS)
    assert set(FINDING) <= set(FINDINGS)


def test_a_new_kind_would_be_seen() -> None:
    assert list(metric_values('def f():\n    yield f"clock_gone: {1} s"\n    self._find(g, "odd_word", "x")\n')) == [
        "clock_gone",
        "odd_word",
    ]
