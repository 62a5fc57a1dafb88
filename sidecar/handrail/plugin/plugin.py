"""Entry point of ``vllm.general_plugins``.

vLLM calls it in each of its processes, in some more than once. Without ``HANDRAIL_SOCKET`` it does nothing. With it, it waits
for the engine to import two of its modules and wraps their products: the connector classes of the factory, and the scheduler
object. Where a module or a member differs from the versions that were tried, the plugin leaves that part alone, logs one
warning, and goes on with the rest.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from types import ModuleType
from typing import Any, Final

from handrail.plugin import logs
from handrail.plugin.events import CORE, SOCKET_ENV
from handrail.plugin.facts import engine_facts
from handrail.plugin.guard import HookGuard
from handrail.plugin.import_hook import when_imported
from handrail.plugin.mixin import Mixer
from handrail.plugin.recorder import Recorder
from handrail.plugin.scheduler import watch_scheduler

FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory"
SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
TRIED: Final = ("0.32",)
"""Versions of vLLM that the tests ran."""

_log = logging.getLogger("vllm.plugins.handrail")
_MARK: Final = "_handrail"
_installed: Plugin | None = None


class Plugin:
    """State of the plugin, set up once a process."""

    def __init__(self, path: str) -> None:
        self.recorder = Recorder(path)
        self.guard = HookGuard(self.recorder)
        self.mixer = Mixer(self.guard)
        self.hooked: list[str] = []
        self.missing: list[str] = []

    def install(self) -> None:
        os.register_at_fork(after_in_child=self.recorder.after_fork)
        atexit.register(self._end)
        logs.listen(self.recorder)
        self.recorder.each_second = lambda: logs.listen(self.recorder)
        when_imported(FACTORY, lambda module: self._try("connectors", self._watch_factory, module))
        when_imported(SCHEDULER, lambda module: self._try("scheduler", self._watch_schedulers, module))

    def _end(self) -> None:
        """Handle the end of the interpreter.

        A process that never sent anything sends nothing now either.
        """
        if self.recorder.running:
            self.recorder.say_stopping()
        self.recorder.stop()

    def _try(self, part: str, set_up: Any, module: ModuleType) -> None:
        try:
            set_up(module)
        except Exception as error:
            self.missing.append(part)
            version = engine_facts(None).get("engine_version", "of an unknown version")
            _log.warning(
                "handrail observes less of this engine: %s cannot be observed on vLLM %s (%s: %s); tested with %s",
                part,
                version,
                type(error).__name__,
                error,
                ", ".join(TRIED),
            )

    def _watch_factory(self, module: Any) -> None:
        """Wrap ``get_connector_class``.

        Built-in connectors and those of ``kv_connector_module_path`` both come from it.
        """
        factory = module.KVConnectorFactory
        original = factory.get_connector_class
        if getattr(original, _MARK, False):
            return
        given = original.__func__
        mixer = self.mixer

        @functools.wraps(given)
        def get_connector_class(cls: Any, *given_: Any, **named: Any) -> Any:
            return mixer(given(cls, *given_, **named))

        setattr(get_connector_class, _MARK, True)
        factory.get_connector_class = classmethod(get_connector_class)
        self.hooked.append("connectors")

    def _watch_schedulers(self, module: Any) -> None:
        """Wrap the ``__init__`` that makes every scheduler of the engine's own.

        Its subclasses' schedulers are included.
        """
        scheduler = module.Scheduler
        original = scheduler.__init__
        if getattr(original, _MARK, False):
            return
        for name in ("add_request", "schedule", "update_from_output"):
            getattr(scheduler, name)

        @functools.wraps(original)
        def init(made: Any, *given: Any, **named: Any) -> None:
            original(made, *given, **named)
            self.guard("scheduler_init", self._begin, made)

        setattr(init, _MARK, True)
        scheduler.__init__ = init
        self.hooked.append("scheduler")

    def _begin(self, made: Any) -> None:
        methods = watch_scheduler(made, self.guard)
        missing = self.missing + (["_free_request"] if "_free_request" not in methods else [])
        facts = engine_facts(made.vllm_config)
        version = str(facts.get("engine_version", ""))
        if not version.startswith(TRIED):
            _log.warning(
                "handrail is tested with vLLM %s; this is %s: it observes only what has not changed since%s",
                ", ".join(TRIED),
                version or "of an unknown version",
                f"; missing: {', '.join(missing)}" if missing else "",
            )
        self.recorder.say(
            {
                **facts,
                "plugin_version": _own_version(),
                "capabilities": [*self.hooked, *methods],
                "missing": missing,
            }
        )
        self.recorder.start(CORE)


def register() -> None:
    """Start the plugin; vLLM calls this. Never raises."""
    global _installed
    path = os.environ.get(SOCKET_ENV)
    if not path or _installed is not None:
        return
    plugin = Plugin(path)
    _installed = plugin
    try:
        plugin.install()
    except Exception as error:
        _log.warning("handrail observes nothing of this process: %s: %s", type(error).__name__, error)


def recorder() -> Recorder | None:
    """This process's recorder, for the middleware; None where the plugin is inert."""
    register()
    return None if _installed is None else _installed.recorder


def _own_version() -> str | None:
    from handrail import __version__

    return __version__
