"""Log lines that contain names and errors from other programs."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from handrail.printable import is_printable
from handrail_cli.logs import JsonFormatter, TextFormatter

FOREIGN = "pod\x1b[2J\u202e\n2026-01-01 00:00:00,000 ERROR handrail: forged\U000e0041"
FORMATTERS = pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])


def record(message: str, *arguments: Any, failing: bool = False) -> logging.LogRecord:
    raised = None
    if failing:
        try:
            raise ValueError(FOREIGN)
        except ValueError:
            raised = sys.exc_info()
    return logging.LogRecord("handrail.x", logging.WARNING, __file__, 1, message, arguments, raised)


@FORMATTERS
def test_a_name_of_others_is_one_line(formatter: logging.Formatter) -> None:
    line = formatter.format(record("peer %s is gone", FOREIGN))
    assert is_printable(line)
    assert r"pod\x1b[2J\u202e\n2026" in (json.loads(line)["message"] if line.startswith("{") else line)


@FORMATTERS
def test_no_line_of_a_traceback_looks_like_an_entry(formatter: logging.Formatter) -> None:
    first, *rest = formatter.format(record("it failed", failing=True)).split("\n")
    assert all(map(is_printable, (first, *rest)))
    assert all(line.startswith("  ") for line in rest)
    assert not any(line.lstrip().startswith("2026-01-01") and not line.startswith("  ") for line in rest)


def test_letters_of_every_script_stand() -> None:
    assert TextFormatter().format(record("модель %s", "通义")).endswith("модель 通义")
    assert json.loads(JsonFormatter().format(record("модель %s", "通义")))["message"] == "модель 通义"
