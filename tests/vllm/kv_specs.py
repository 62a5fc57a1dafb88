"""Print the KV cache that vLLM allocates for models, from their config alone.

It runs in the engine's environment and needs no weights, no GPU, no server.

    python kv_specs.py TP KV_DTYPE < configs.json

Reads a JSON object of configs by name. Writes one JSON object a line: name, and a list of (class, block_size, bytes of one
block, window, layers).
Models are built on torch's meta device, as one rank of ``TP`` in a process group that only pretends.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1"
)

import torch
import vllm.distributed.parallel_state as groups
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model

TEXT_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}
"""Architecture of a multi-modal model's language model, by model type.

The image code of the whole model needs torchvision.
"""
SMALL = {
    "gemma3n_text": {"hidden_size": 64, "intermediate_size": [64] * 35, "vocab_size": 512, "vocab_size_per_layer_input": 512}
}
"""Settings unrelated to the cache, made small.

This model reads a number while it is built, which the meta device does not have.
"""
BLOCK_SIZE = 32  # what the CPU's attention accepts; MLA chooses its own


def pretend_ranks(tp: int) -> None:
    """Make a world of ``tp`` ranks of which this is the first; nothing is ever sent."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    new_group, begin = torch.distributed.new_group, groups.GroupCoordinator.__init__

    def fake_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend="fake")

    def quiet(self: Any, *values: Any, **named: Any) -> None:
        begin(self, *values, **{**named, "use_message_queue_broadcaster": False, "use_device_communicator": False})

    torch.distributed.new_group = fake_group
    groups.GroupCoordinator.__init__ = quiet
    with set_current_vllm_config(VllmConfig()):
        groups.init_distributed_environment(tp, 0, "fake://", 0, "fake")
        groups.initialize_model_parallel(tp)


def specs(config: dict[str, Any], tp: int, kv_dtype: str) -> list[list[Any]]:
    """Return every kind of layer that keeps something.

    Each is (class, block_size, bytes of a block, window, layers).
    """
    text = config.get("text_config")
    if text is not None:
        config = {"torch_dtype": config.get("torch_dtype"), **text, "architectures": [TEXT_ARCHITECTURES[text["model_type"]]]}
    small = SMALL.get(config["model_type"], {})
    config.update(small)
    config.pop("quantization_config", None)  # of weights: this CPU has no kernels for some
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=1024,
            block_size=BLOCK_SIZE,
            kv_cache_dtype=kv_dtype,
            enable_prefix_caching=False,
        ).create_engine_config()
        engine.parallel_config.tensor_parallel_size = tp
        with set_current_vllm_config(engine), torch.device("cpu" if small else "meta"):
            initialize_model(engine)
    found: Counter[tuple[str, int, int, int | None]] = Counter()
    for layer in engine.compilation_config.static_forward_context.values():
        if not isinstance(layer, AttentionLayerBase) or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(engine)
        if spec is not None:
            window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
            found[type(spec).__name__, spec.block_size, spec.real_page_size_bytes, window] += 1
    return [[*key, count] for key, count in found.items()]


def main() -> None:
    tp, kv_dtype = int(sys.argv[1]), sys.argv[2]
    torch.cpu._is_avx512_bf16_supported = lambda: False  # else the CPU widens Mamba's state to float32, which GPUs do not
    pretend_ranks(tp)
    for name, config in json.load(sys.stdin).items():
        try:
            answer: dict[str, Any] = {"specs": specs(config, tp, kv_dtype)}
        except Exception as error:  # a model that this CPU cannot build does not end the others
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps({"name": name, **answer}), flush=True)


if __name__ == "__main__":
    main()
