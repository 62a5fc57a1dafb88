"""Compare the table of NIXL's compatibility hash with the installed engine's source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from handrail_doctor.nixl_handshake import HASHED, release_of
from vllm.pair import VERSION, find_installation

pytestmark = pytest.mark.vllm

SOURCE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py"


def factors(source: str) -> set[str]:
    """Return the keys of the hash's dictionary."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    (compute,) = [each for each in functions if each.name == "compute_nixl_compatibility_hash"]
    (made,) = [node for node in ast.walk(compute) if isinstance(node, ast.Dict)]
    return {key.value for key in made.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_the_table_has_the_factors_of_the_installed_engine() -> None:
    (file,) = Path(find_installation().root).glob(f"venv/lib/python*/site-packages/{SOURCE}")
    release = release_of(VERSION)
    assert release is not None
    assert factors(file.read_text("utf-8")) == {name for name, each in HASHED.items() if each.held(release)}
