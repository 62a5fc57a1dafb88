"""Every warning and error that vLLM's KV code can log, extracted from its source.

Each comes with one message as it would be printed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS = (
    "distributed/kv_transfer",
    "v1/core/sched/scheduler.py",
    "v1/engine/core.py",
    "v1/engine/core_client.py",
    "v1/engine/async_llm.py",
    "v1/executor/multiproc_executor.py",
    "entrypoints/generate/base/serving.py",
)
_LEVELS = frozenset({"warning", "error", "exception", "critical", "warning_once", "error_once"})
_PERCENT = re.compile(r"%(?:#?0?\d*(?:\.\d+)?)([sdrfxu])|%%")
_NUMBERS = {"proc.exitcode": "-9"}  # printed by %s
_COLLECTIONS = frozenset({"all_failed_req_ids", "failed", "list(pending_reqs)"})


@dataclass(frozen=True, order=True)
class Call:
    """One logging call: its file, its level, its template and arguments as written."""

    file: str
    level: str
    template: str
    arguments: tuple[str, ...]

    def line(self) -> str:
        return f"{self.file}\t{self.level}\t{self.template}\t{'; '.join(self.arguments)}".replace("\n", "\\n")

    def message(self) -> str:
        """The call's message with a plausible value for each argument."""
        values = iter(self.arguments)

        def value(match: re.Match[str]) -> str:
            if match[0] == "%%":
                return "%"
            argument = next(values, "")
            if argument in _NUMBERS:
                return _NUMBERS[argument]
            if argument in _COLLECTIONS:
                return "{'cmpl-a-0-1a2b3c4d', 'cmpl-b-0-1a2b3c4d'}"
            return {"d": "7", "f": "1.5", "x": "0x7f", "u": "7", "r": "'x'"}.get(match[1], "cmpl-a-0-1a2b3c4d")

        return _PERCENT.sub(value, self.template.replace("{}", "7"))


def read_line(line: str) -> Call:
    """Parse ``Call.line`` back into a call."""
    file, level, template, arguments = line.split("\t")
    return Call(file, level, template.replace("\\n", "\n"), tuple(filter(None, arguments.split("; "))))


def calls(root: Path) -> list[Call]:
    """Return the calls below ``root`` (the vllm package), sorted."""
    return sorted(set(_all(root)))


def _all(root: Path) -> Iterator[Call]:
    for part in PARTS:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else (path,):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in _LEVELS
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "logger"
                ):
                    template = _template(node.args[0])
                    arguments = tuple(_words(argument)[:60].replace("\n", " ").replace(";", ",") for argument in node.args[1:])
                    yield Call(str(file.relative_to(root)), node.func.attr, template, arguments)


def _words(node: ast.expr) -> str:
    """Return the expression's source.

    Python 3.10 writes the brackets of a loop's tuple, later versions do not.
    """
    return re.sub(r"\bfor \(([^()]*)\) in ", r"for \1 in ", ast.unparse(node))


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return f"<{_words(node)}>"
