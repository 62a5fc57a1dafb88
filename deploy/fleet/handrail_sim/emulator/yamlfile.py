"""Read a YAML file, or say on one line why it is not YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class NotYamlError(Exception):
    """The file is not YAML; the message says what is wrong, and where."""


def read_yaml(path: Path) -> Any:
    """Return the content of the file. Raises ``OSError`` and ``NotYamlError``."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise NotYamlError("it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        fault = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).partition("\n")[0]
        raise NotYamlError(f"{fault}, line {mark.line + 1}" if mark else fault) from None
