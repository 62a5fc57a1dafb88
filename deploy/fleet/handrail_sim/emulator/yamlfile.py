"""YAML files that come with the package, or that a user names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml


def names_in(folder: Path) -> list[str]:
    """List the names of the folder's files."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_named(folder: Path, name: str, error: type[ValueError]) -> tuple[str, Mapping[str, object]]:
    """Read the folder's file of this name, or a file by its path.

    Returns the file's name and its content. Raises ``error`` with what is wrong, and where.
    """
    path = folder / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise error(f"{name}: neither a file nor one of {', '.join(names_in(folder))}") from None
    except UnicodeDecodeError:
        raise error(f"{path}: not YAML: it is not UTF-8 text") from None
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        fault = getattr(failure, "problem", None) or getattr(failure, "reason", None) or str(failure).partition("\n")[0]
        raise error(f"{path}: not YAML: {f'{fault}, line {mark.line + 1}' if mark else fault}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: a mapping is expected")
    return path.stem, content
