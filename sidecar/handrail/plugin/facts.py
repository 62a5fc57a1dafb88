"""Read an engine's configuration into fields of ``records.EngineFacts``.

Missing values are left out.
"""

from __future__ import annotations

import sys
from typing import Any

from handrail.plugin.layout import KvLayout


def engine_facts(config: Any) -> dict[str, Any]:
    """Facts that every engine has, with a connector or without one.

    ``config``: vLLM's ``VllmConfig``.
    """
    model, cache, parallel = _part(config, "model_config"), _part(config, "cache_config"), _part(config, "parallel_config")
    return _known(
        {
            "engine_version": _version("vllm"),
            "model": _text(model, "model"),
            "model_revision": _text(model, "revision"),
            "dtype": _word(getattr(model, "dtype", None)),
            "kv_cache_dtype": _text(cache, "cache_dtype"),
            "block_size": _number(cache, "block_size"),
            "kv_blocks": _number(cache, "num_gpu_blocks"),
            "tp_size": _number(parallel, "tensor_parallel_size"),
            "pp_size": _number(parallel, "pipeline_parallel_size"),
            "dp_rank": _number(parallel, "data_parallel_rank"),
        }
    )


def connector_facts(connector: Any, config: Any, layout: KvLayout) -> dict[str, Any]:
    """Facts about the hand-off of one leaf connector."""
    transfer = _part(config, "kv_transfer_config")
    blocks = layout.rank_block_bytes
    kv_layout = None
    try:
        kv_layout = type(connector).get_required_kvcache_layout(config)
    except Exception:  # some connectors only know later
        kv_layout = None
    return _known(
        {
            "engine_id": engine_id_of(config),
            "connector": type(connector).__name__,
            "connector_role": _text(transfer, "kv_role"),
            "lease_ns": lease_ns_of(config),
            "failure_policy": _text(transfer, "kv_load_failure_policy"),
            "kv_layout": kv_layout,
            "block_bytes": blocks[0] if len(blocks) == 1 else None,
        }
    )


def engine_id_of(config: Any) -> str | None:
    return _text(_part(config, "kv_transfer_config"), "engine_id")


def lease_ns_of(config: Any, *, decode: bool = False) -> int | None:
    """Lease of blocks kept for a reader, at P or (``decode``) at D.

    It comes from NIXL's settings; None for other connectors.
    """
    transfer = _part(config, "kv_transfer_config")
    if "Nixl" not in str(getattr(transfer, "kv_connector", "")):
        return None
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    seconds = extra.get("decoder_kv_blocks_ttl", 480) if decode else extra.get("kv_lease_duration", 30)
    return int(seconds * 1e9) if isinstance(seconds, (int, float)) else None


def rank_of(config: Any) -> int:
    """Rank of this worker within its engine."""
    return _number(_part(config, "parallel_config"), "rank") or 0


def ranks_of(config: Any) -> int:
    """Number of workers that hold a part of every block: the tensor-parallel ranks."""
    return _number(_part(config, "parallel_config"), "tensor_parallel_size") or 1


def _version(name: str) -> str | None:
    found = getattr(sys.modules.get(name), "__version__", None)
    return found if isinstance(found, str) else None


def _part(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _text(part: Any, name: str) -> str | None:
    found = getattr(part, name, None)
    return found[:256] if isinstance(found, str) and found else None


def _number(part: Any, name: str) -> int | None:
    found = getattr(part, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _word(value: Any) -> str | None:
    """Name of a dtype without its module: ``torch.bfloat16`` as ``bfloat16``."""
    return None if value is None else str(value).rsplit(".", 1)[-1][:64]


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
