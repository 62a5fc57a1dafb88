"""Make an observed subclass of a connector class, with the same names.

It is made when the engine asks its factory for the class. ``__name__``, ``__qualname__`` and ``__module__`` stay (MultiConnector
looks classes up by name), and so do interfaces such as ``SupportsHMA`` (without it the engine turns its hybrid cache manager off,
and NIXL's handshake fails). Only hooks that the class has are wrapped. A composite is not observed itself: its children come from
the same factory.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from handrail.plugin.connector import SchedulerSide, WorkerSide
from handrail.plugin.events import CORE, WORKER
from handrail.plugin.facts import connector_facts, rank_of, ranks_of
from handrail.plugin.guard import HookGuard
from handrail.plugin.layout import KvLayout
from handrail.plugin.nixl import watch_nixl

COMPOSITES: Final = frozenset({"MultiConnector"})
_SIDE: Final = "_handrail_side"
_MARK: Final = "_handrail_mixed"


class Mixer:
    """Make observed classes, one for each class of the engine's.

    A class that cannot be observed is returned as it is.
    """

    def __init__(self, guard: HookGuard) -> None:
        self._guard = guard
        self._made: dict[type, type] = {}

    def __call__(self, base: Any) -> Any:
        if not isinstance(base, type) or base.__name__ in COMPOSITES or getattr(base, _MARK, False):
            return base
        if base not in self._made:
            self._made[base] = self._guard("mix", self._mix, base) or base
        return self._made[base]

    def _mix(self, base: type) -> type:
        hooks: dict[str, Any] = {
            name: wrap(getattr(base, name), self._guard) for name, wrap in _HOOKS.items() if callable(getattr(base, name, None))
        }
        if "get_transfer_results" in hooks:
            hooks.pop("get_finished", None)  # the default of the one calls the other
        made = type(base)(
            base.__name__,
            (base,),
            {**hooks, _MARK: True, "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__},
        )
        made.__init__ = _observed_init(base.__init__, self._guard)  # type: ignore[misc]
        return made


def _observed_init(original: Callable[..., None], guard: HookGuard) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        if getattr(self, _SIDE, None) is None:
            guard("connector_init", _begin, self, guard, given, named)

    return init


def _begin(connector: Any, guard: HookGuard, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Choose the side by the role (``KVConnectorRole``), and find optional members.

    These are members by which the connector can be observed further.
    """
    config = named.get("vllm_config", given[0] if given else None)
    role = named.get("role", given[1] if len(given) > 1 else None)
    cache = named.get("kv_cache_config", given[2] if len(given) > 2 else None)
    recorder = guard.recorder
    if getattr(role, "name", "") == "SCHEDULER":
        layout = KvLayout(cache, ranks_of(config))
        setattr(connector, _SIDE, SchedulerSide(connector, recorder, layout, config))
        recorder.say(connector_facts(connector, config, layout))
        recorder.start(CORE)
        return
    side = WorkerSide(connector, recorder, rank_of(config))
    setattr(connector, _SIDE, side)
    recorder.start(WORKER)
    worker = getattr(connector, "connector_worker", None)
    if worker is not None and hasattr(worker, "nixl_wrapper"):
        guard("watch_nixl", watch_nixl, worker, side, rank_of(config), guard)


def _matched(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        found = original(self, request, num_computed_tokens)
        side = getattr(self, _SIDE, None)
        if side is not None:
            guard("get_num_new_matched_tokens", side.matched, request, num_computed_tokens, found)
        return found

    return get_num_new_matched_tokens


def _new_request(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_new_request(self: Any, request: Any) -> Any:
        side = getattr(self, _SIDE, None)
        if side is not None:
            guard("on_new_request", side.new_request, request)
        return original(self, request)

    return on_new_request


def _allocated(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        result = original(self, request, blocks, num_external_tokens)
        side = getattr(self, _SIDE, None)
        if side is not None:
            guard("update_state_after_alloc", side.allocated, request, blocks, num_external_tokens)
        return result

    return update_state_after_alloc


def _output(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_connector_output(self: Any, connector_output: Any) -> Any:
        side = getattr(self, _SIDE, None)
        if side is not None:
            guard("update_connector_output", side.output, connector_output)
        return original(self, connector_output)

    return update_connector_output


def _meta(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_connector_meta(self: Any, *given: Any, **named: Any) -> Any:
        meta = original(self, *given, **named)
        side = getattr(self, _SIDE, None)
        if side is not None:
            guard("build_connector_meta", side.meta_built, meta)
        return meta

    return build_connector_meta


def _finished(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    """Wrap ``request_finished`` or ``request_finished_all_groups``.

    One may call the other, so only the outer one reports.
    """

    @functools.wraps(original)
    def finished(self: Any, request: Any, block_ids: Any) -> Any:
        side = getattr(self, _SIDE, None)
        if side is None or getattr(side, "inside", False):
            return original(self, request, block_ids)
        side.inside = True
        try:
            result = original(self, request, block_ids)
        finally:
            side.inside = False
        guard("request_finished", side.finished, request, block_ids, result)
        return result

    return finished


def _start_load(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_load_kv(self: Any, *given: Any, **named: Any) -> Any:
        begin_ns = time.monotonic_ns()
        side = getattr(self, _SIDE, None)
        if side is not None:
            guard("start_load_kv", side.load_began, begin_ns)
        result = original(self, *given, **named)
        if side is not None:
            guard("start_load_kv", side.load_ended)
        return result

    return start_load_kv


def _results(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_transfer_results(self: Any, *given: Any, **named: Any) -> Any:
        results = original(self, *given, **named)
        side = getattr(self, _SIDE, None)
        if side is not None:
            guard("get_transfer_results", side.results, results.finished_recving, getattr(results, "failed_recving", None))
        return results

    return get_transfer_results


def _shutdown(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    """Wrap the engine's shutdown. In EngineCore the scheduler reports it first."""

    @functools.wraps(original)
    def shutdown(self: Any, *given: Any, **named: Any) -> Any:
        guard("connector_shutdown", guard.recorder.say_stopping)
        return original(self, *given, **named)

    return shutdown


def _get_finished(original: Callable[..., Any], guard: HookGuard) -> Callable[..., Any]:
    """Wrap ``get_finished``, which engines before 0.32 call.

    It does not report which loads failed.
    """

    @functools.wraps(original)
    def get_finished(self: Any, *given: Any, **named: Any) -> Any:
        result = original(self, *given, **named)
        side = getattr(self, _SIDE, None)
        if side is not None:
            guard("get_finished", side.results, result[1], None)
        return result

    return get_finished


_HOOKS: Final[dict[str, Callable[[Callable[..., Any], HookGuard], Callable[..., Any]]]] = {
    "on_new_request": _new_request,
    "get_num_new_matched_tokens": _matched,
    "update_state_after_alloc": _allocated,
    "build_connector_meta": _meta,
    "update_connector_output": _output,
    "request_finished": _finished,
    "request_finished_all_groups": _finished,
    "start_load_kv": _start_load,
    "get_transfer_results": _results,
    "get_finished": _get_finished,
    "shutdown": _shutdown,
}
HOOKS: Final = tuple(_HOOKS)
