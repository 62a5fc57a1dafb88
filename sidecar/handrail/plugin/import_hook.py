"""Call back when the engine imports a given module of its own.

The plugin never imports one: an early import could change the engine (torch in a process that wanted none, ``prometheus_client``
before the engine has set its directory).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Imported = Callable[[ModuleType], None]


class _Watcher(MetaPathFinder):
    """Finder that wraps the loader of the awaited modules.

    It finds nothing itself: it asks the other finders.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Imported] = {}
        self._asking: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, self.waiting.pop(name))
        return spec


class _NotifyingLoader(Loader):
    """Module's own loader, with a callback after the import."""

    def __init__(self, loader: Any, imported: Imported) -> None:
        self._loader = loader
        self._imported = imported

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._imported(module)


_watcher = _Watcher()


def when_imported(name: str, imported: Imported) -> None:
    """Call ``imported(module)`` once ``name`` has been imported.

    The call is immediate where the module is already imported. ``imported`` must not raise.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        imported(module)
        return
    _watcher.waiting[name] = imported
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
