"""What vLLM's NIXL connector compares before the first hand-off, by release.

D asks P for a hash over its configuration and refuses a peer whose hash differs (``compute_nixl_compatibility_hash`` in
``nixl_connector.py``, later ``nixl/metadata.py``). Its factors were read in the sources of the releases 0.13 to 0.32, and
``tests/vllm/test_nixl_handshake.py`` compares them with those of the installed engine.
``kv_connector_extra_config: {"enforce_handshake_compat": false}`` switches this comparison off, on the engine that asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Release = tuple[int, int]

FIRST: Final[Release] = (0, 13)
"""The first release that compares anything (vllm-project/vllm#29503)."""
NEWEST: Final[Release] = (0, 32)
"""The newest release whose source was read; later ones are taken to compare the same."""

_RELEASE: Final = re.compile(r"v?(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of the hash.

    ``setting``: the check of the pair that compares it (``pair.<setting>``). ``until``: the first release without it.
    """

    setting: str
    since: Release = FIRST
    until: Release | None = None
    source: str = "vllm-project/vllm#29503"

    def held(self, release: Release) -> bool:
        """Test whether this release compares it."""
        return self.since <= release and (self.until is None or release < self.until)


HASHED: Final[Mapping[str, Factor]] = {
    "vllm_version": Factor(setting="version"),
    "nixl_connector_version": Factor(setting="version"),
    "model": Factor(setting="model"),
    "dtype": Factor(setting="dtype"),
    "num_kv_heads": Factor(setting="hf_overrides"),
    "head_size": Factor(setting="hf_overrides"),
    "num_hidden_layers": Factor(setting="hf_overrides"),
    "attn_backend_name": Factor(setting="attention_backend"),
    "cache_dtype": Factor(setting="kv_cache_dtype"),
    "cross_layers_blocks": Factor(setting="cross_layers", since=(0, 16), until=(0, 29), source="vllm-project/vllm#30207"),
    "is_hma_enabled": Factor(setting="hybrid", since=(0, 18), source="vllm-project/vllm#35758"),
    "speculative_config": Factor(setting="speculation", since=(0, 28), source="vllm-project/vllm#49230"),
    "transfer_mode": Factor(setting="connector", since=(0, 28), source="nixl/metadata.py, NIXL_CONNECTOR_VERSION 7"),
}
"""The hash's factors by their key in it."""

HIDDEN_STATE_METHODS: Final = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Methods whose draft reads the target's hidden states (``SpeculativeConfig.use_eagle``): only these are in the hash."""
METHODS_WITHOUT_KV: Final = ("ngram", "[ngram]", "ngram_gpu", "suffix")
"""Methods that guess from text and keep no KV: P and D need not agree."""

SPLIT_BLOCKS_WITH_HYBRID: Final[Release] = (0, 28)
"""Since then models with several kinds of layers may have other block sizes on P and D."""
MEMORY_TYPES: Final[Release] = (0, 30)
"""Since then P tells which memory its blocks lie in; before, D takes it for its own kind (NIXL_CONNECTOR_VERSION 11)."""
MORE_RANKS_ON_P: Final[Release] = (0, 14)
"""Since then P may have more tensor-parallel ranks than D."""


def factor(setting: str, release: Release) -> Factor | None:
    """Return the factor that compares this setting in this release; None where nothing does."""
    return next((each for each in HASHED.values() if each.setting == setting and each.held(release)), None)


def release_of(version: str | None) -> Release | None:
    """Return (0, 32) of ``0.32.0+cu129``; None where the text is no version."""
    found = _RELEASE.match(version or "")
    return (int(found[1]), int(found[2])) if found is not None else None
