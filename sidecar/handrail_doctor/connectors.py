"""KV connectors by name: what they do, what they wrap, and which use the hybrid KV cache manager.

A wrapper runs other connectors, which it names in its own configuration. What is handed over follows from these, never from the
wrapper's name. A class that is not listed is not known: nothing is concluded from its name.
Source: the registry of vLLM 0.32 (``kv_connector/factory.py``), the classes with ``SupportsHMA``, ``supports_hma_config``
and ``MultiConnector.all_children_support_hma``; for PdConnector ai-dynamo/dynamo#11608.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from handrail_doctor.nixl_handshake import Release

_LONGEST: Final = 16  # connectors in one wrapper
_DEEPEST: Final = 4  # wrappers in wrappers


class ConnectorKind(str, Enum):
    """How a connector brings KV from P to D."""

    NIXL_PULL = "NIXL, D reads"
    NIXL_PUSH = "NIXL, P writes"
    MOONCAKE = "Mooncake"
    MORIIO = "MoRI-IO"
    P2P_NCCL = "NCCL, point to point"
    LMCACHE = "LMCache"
    STORE = "a store"  # of its own: it hands over only what both engines find there
    UNKNOWN = "not known here"


NIXL: Final = frozenset({ConnectorKind.NIXL_PULL, ConnectorKind.NIXL_PUSH})
_DIRECT: Final = NIXL | {ConnectorKind.MOONCAKE, ConnectorKind.MORIIO, ConnectorKind.P2P_NCCL}

_KINDS: Final[Mapping[str, ConnectorKind]] = {
    "NixlConnector": ConnectorKind.NIXL_PULL,
    "NixlPullConnector": ConnectorKind.NIXL_PULL,
    "NixlPushConnector": ConnectorKind.NIXL_PUSH,
    "MooncakeConnector": ConnectorKind.MOONCAKE,
    "MoRIIOConnector": ConnectorKind.MORIIO,
    "P2pNcclConnector": ConnectorKind.P2P_NCCL,
    "LMCacheConnectorV1": ConnectorKind.LMCACHE,
    "LMCacheMPConnector": ConnectorKind.LMCACHE,
    **dict.fromkeys(
        (
            "DecodeBenchConnector",
            "DynamoConnector",
            "ExampleConnector",
            "ExampleHiddenStatesConnector",
            "FlexKVConnectorV1",
            "HF3FSKVConnector",
            "HiSparseConnector",
            "MooncakeStoreConnector",
            "OffloadingConnector",
            "SharedStorageConnector",
            "SimpleCPUOffloadConnector",
        ),
        ConnectorKind.STORE,
    ),
}
_WRAPPERS: Final = ("MultiConnector", "PdConnector")
_MODULES: Final = ("vllm.", "kvbm.", "dynamo.", "lmcache.")
"""Packages whose connectors the tables mean; the same name from elsewhere is another class."""

_HYBRID_BY_CONNECTOR: Final[Release] = (0, 22)
"""vLLM asks the connectors since then. Before, any connector switched the manager off (``config/vllm.py`` of each release)."""
_HYBRID: Final[Mapping[str, Release]] = {
    **dict.fromkeys(
        (
            "DecodeBenchConnector",
            "ExampleHiddenStatesConnector",
            "MooncakeConnector",
            "MooncakeStoreConnector",
            "NixlConnector",
            "NixlPullConnector",
            "NixlPushConnector",
            "OffloadingConnector",
            "SimpleCPUOffloadConnector",
        ),
        (0, 22),
    ),
    "HiSparseConnector": (0, 30),
    "MoRIIOConnector": (0, 30),
}
"""Connectors that support the hybrid manager, with the release since which they do."""
_HYBRID_ELSEWHERE: Final = ("LMCacheMPConnector",)
"""Their class comes from another package where that is installed, and may support it or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """One connector as an engine is told to run it. ``settings``: its own KVTransferConfig."""

    name: str
    module: str = ""
    children: tuple[Connector, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Return its ``kv_connector_extra_config``."""
        found = self.settings.get("kv_connector_extra_config")
        return found if isinstance(found, Mapping) else {}

    @property
    def known(self) -> bool:
        """Test whether the tables here mean this class."""
        listed = self.name in _KINDS or self.name in _WRAPPERS
        return listed and (not self.module or self.module.startswith(_MODULES))

    @property
    def kind(self) -> ConnectorKind:
        return _KINDS.get(self.name, ConnectorKind.UNKNOWN) if self.known else ConnectorKind.UNKNOWN

    def leaves(self) -> Iterator[Connector]:
        """Yield the connectors that it comes down to; itself where it wraps none."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()

    @property
    def nixl(self) -> Connector | None:
        """Return the NIXL connector in it; None where there is none that is known."""
        return next((leaf for leaf in self.leaves() if leaf.kind in NIXL), None)

    @property
    def direct(self) -> frozenset[ConnectorKind]:
        """Return the ways in which it hands over from engine to engine."""
        return frozenset(leaf.kind for leaf in self.leaves()) & _DIRECT

    @property
    def kinds(self) -> frozenset[ConnectorKind]:
        return frozenset(leaf.kind for leaf in self.leaves())

    def unknown(self) -> tuple[str, ...]:
        """Return the classes in it of which nothing is known here."""
        return tuple(leaf.described for leaf in self.leaves() if leaf.kind is ConnectorKind.UNKNOWN)

    @property
    def described(self) -> str:
        """Describe it with what it wraps: ``MultiConnector [NixlConnector, LMCacheMPConnector]``."""
        origin = f" of {self.module}" if self.module and not self.known else ""
        inner = f" [{', '.join(child.described for child in self.children)}]" if self.children else ""
        return f"{self.name}{origin}{inner}"

    def hybrid(self, release: Release) -> tuple[bool | None, str]:
        """Return (whether the hybrid manager is on by default with it, the reason); None: not known."""
        if release < _HYBRID_BY_CONNECTOR:
            return False, f"vLLM before {_HYBRID_BY_CONNECTOR[0]}.{_HYBRID_BY_CONNECTOR[1]} switches it off with any connector"
        if not self.children:
            return self._own_hybrid(release)
        if not self.known:
            return None, f"{self.described} is not known here"
        found = [child.hybrid(release) for child in self.children]
        off = next((reason for on, reason in found if on is False), None)
        open_ = next((reason for on, reason in found if on is None), None)
        if off is not None:
            return False, f"{off}, and {self.name} switches it off with it"
        return (None, open_) if open_ is not None else (True, "every connector in it supports it")

    def _own_hybrid(self, release: Release) -> tuple[bool | None, str]:
        if self.name in _HYBRID_ELSEWHERE:
            return None, f"whether {self.name} supports it depends on the LMCache that is installed"
        if not self.known:
            return None, f"whether {self.described} supports it is not known here"
        if release >= _HYBRID.get(self.name, (release[0] + 1, 0)):
            return True, f"{self.name} supports it"
        return False, f"{self.name} does not support it"


def connector_of(transfer: Mapping[str, Any], depth: int = 0) -> Connector | None:
    """Return the connector of a KVTransferConfig, with those that it wraps; None where it names none."""
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    if not isinstance(name, str) or not name:
        return None
    extra = transfer.get("kv_connector_extra_config")
    listed = extra.get("connectors") if isinstance(extra, Mapping) else None
    parts = listed[:_LONGEST] if isinstance(listed, list) and depth < _DEEPEST else []
    children = (connector_of(part, depth + 1) for part in parts if isinstance(part, Mapping))
    return Connector(
        name=name,
        module=module if isinstance(module, str) else "",
        children=tuple(child for child in children if child is not None),
        settings=transfer,
    )
