"""Compare ``handrail kv-size`` with vLLM's own KV cache specifications.

It covers every model that vLLM can build without weights and GPU.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from handrail_doctor.kv_size.read import read_model
from handrail_doctor.kv_size.shape import LayerKind
from handrail_doctor.kv_size.size import Serving, sizes
from vllm.pair import find_installation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONFIGS: Final = Path(__file__).parents[1] / "data/model_configs"
SPECS: Final = Path(__file__).with_name("kv_specs.py")
CLASSES: Final = {
    "FullAttentionSpec": LayerKind.FULL,
    "SlidingWindowSpec": LayerKind.WINDOW,
    "ChunkedLocalAttentionSpec": LayerKind.CHUNK,
    "MLAAttentionSpec": LayerKind.MLA,
    "MambaSpec": LayerKind.STATE,
}
NOT_ON_CPU: Final = {
    "deepseek-v3.2": "Sparse Attention is not supported on CPU",
    "kimi-linear-48b-a3b": "No module named 'cutlass'",
}
"""Models that vLLM 0.32 cannot build on a CPU, with its error text.

Their sizes rest on its source alone.
"""
SEVERAL_RANKS: Final = ("llama-3.1-70b", "deepseek-v3", "jamba-v0.1", "qwen3-next-80b-a3b", "gemma-3-27b")
FP8: Final = ("llama-3.1-70b", "deepseek-v3", "mistral-7b-v0.1")


@dataclass(frozen=True, slots=True)
class Kept:
    """One kind of layer on one rank.

    It has the bytes of a token in one layer (of a state: of a request), and its window.
    """

    kind: LayerKind
    each_bytes: float
    window: int | None


def engine_says(names: tuple[str, ...], tp: int, kv_dtype: str) -> Mapping[str, Any]:
    """Return what the engine allocates, or why it cannot, by model."""
    configs = {name: json.loads((CONFIGS / f"{name}.json").read_text()) for name in names}
    command = [str(find_installation().python), "-P", str(SPECS), str(tp), kv_dtype]
    done = subprocess.run(command, input=json.dumps(configs), capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {answer["name"]: answer.get("specs") or answer["error"] for answer in answers}


def of_engine(specs: list[list[Any]]) -> Counter[Kept]:
    found: Counter[Kept] = Counter()
    for name, block_size, size, window, layers in specs:
        kind = CLASSES[name]
        found[Kept(kind, size if kind is LayerKind.STATE else size / block_size, window)] += layers
    return found


def of_ours(name: str, tp: int, kv_dtype: str) -> Counter[Kept]:
    found: Counter[Kept] = Counter()
    for part in sizes(read_model(CONFIGS / f"{name}.json"), Serving(tp=tp, kv_dtype=kv_dtype)).parts:
        each = (part.rank_state_bytes + part.rank_token_bytes) / part.layers
        if each:
            found[Kept(part.layer.kind, each, part.layer.window)] += part.layers
    return found


@pytest.mark.parametrize(
    ("names", "tp", "kv_dtype"),
    [
        pytest.param(tuple(sorted(path.stem for path in CONFIGS.glob("*.json"))), 1, "auto", id="all-models"),
        pytest.param(SEVERAL_RANKS, 16, "auto", id="sixteen-ranks"),
        pytest.param(FP8, 1, "fp8", id="fp8"),
    ],
)
def test_sizes_are_those_of_the_engine(names: tuple[str, ...], tp: int, kv_dtype: str) -> None:
    answers = engine_says(names, tp, kv_dtype)
    assert set(answers) == set(names)
    refused = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    assert set(refused) == set(NOT_ON_CPU) & set(names), refused
    for name, output in refused.items():
        assert NOT_ON_CPU[name] in output
    wrong = {
        name: (of_ours(name, tp, kv_dtype), of_engine(answer))
        for name, answer in answers.items()
        if name not in refused and of_ours(name, tp, kv_dtype) != of_engine(answer)
    }
    assert not wrong
