"""The pairs of chart, overlay and Compose file, checked by ``handrail doctor``.

An operator does the same before traffic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from handrail_cli.main import main
from harness.manifests import chart, compose, kustomization


def examined(documents: Sequence[Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Return the checks by their name."""
    file = folder / "pair.yaml"
    file.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    main(["doctor", "--config", str(file), "--on", "neither", "--placement", "across-hosts", "--json"])
    answer = json.loads(capsys.readouterr().out)
    return {check["check"]: check for check in answer["checks"]}


@pytest.mark.parametrize("source", ["helm", "kustomize", "compose"])
def test_nothing_about_the_pair_fails_before_traffic(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources: dict[str, Callable[[], list[Any]]] = {
        "helm": lambda: chart({"example": {"enabled": True}}),
        "kustomize": lambda: kustomization("overlays/vllm-pd"),
        "compose": lambda: [compose("vllm")],
    }
    documents = sources[source]()
    checks = examined(documents, tmp_path, capsys)
    assert [check for check in checks.values() if check["verdict"] == "fail"] == []
    for side in ("prefill", "decode"):
        assert checks[f"engine.{side}.plugin"]["verdict"] == "pass"
        assert checks[f"engine.{side}.side_channel_host"]["verdict"] in ("pass", "skip")
    assert checks["pair.connector"]["verdict"] == "pass"
    assert checks["pair.model"]["verdict"] == "pass"
