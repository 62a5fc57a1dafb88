"""Engine adapters: each turns one engine's telemetry into records."""

from __future__ import annotations

from importlib import import_module

from handrail.wire.engines.base import EngineAdapter

REGISTRY: dict[str, str] = {
    "vllm": "handrail.wire.engines.vllm:VllmAdapter",
    "vllm-router": "handrail.wire.engines.vllm_router:VllmRouterAdapter",
}
"""Adapter name to ``module:attribute``; imported on first use.

The contract tests run every entry.
"""


def load(name: str) -> EngineAdapter:
    """Adapter of that name; ``KeyError`` for an unknown one."""
    module, attribute = REGISTRY[name].split(":")
    adapter: EngineAdapter = getattr(import_module(module), attribute)()
    return adapter


def load_all() -> tuple[EngineAdapter, ...]:
    """All adapters, in registry order."""
    return tuple(load(name) for name in REGISTRY)
