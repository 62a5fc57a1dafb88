"""State that the merges share: the engine, its facts, the ids of its records.

A record's span belongs to the engine's trace context if it had one, else to the trace that every sidecar derives from the
request id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from handrail.identity import IdOrigin, derive_trace_id, joinable, new_span_id, new_trace_id, request_key
from handrail.records import EngineFacts, Process, Source, SpanIds
from handrail.trace_context import Origin, TraceContext, parse_traceparent


def read_context(traceparent: str | None) -> TraceContext | None:
    """Read a trace context; None for anything that is not a strict ``traceparent``."""
    return parse_traceparent(traceparent.encode("utf-8", "replace")) if traceparent else None


def ids_of(request_id: str, context: TraceContext | None) -> tuple[SpanIds, str]:
    """Ids of a new span below ``context``, and where the trace id came from."""
    if context is not None:
        ids = SpanIds(trace_id=context.trace_id, span_id=new_span_id(), parent_span_id=context.span_id, flags=context.flags)
        return ids, Origin.INBOUND.value
    key = request_key(request_id, IdOrigin.VLLM_ENGINE).key
    if joinable(key):
        return SpanIds(trace_id=derive_trace_id(key), span_id=new_span_id()), Origin.DERIVED.value
    return SpanIds(trace_id=new_trace_id(), span_id=new_span_id()), Origin.RANDOM.value


ENGINE: Final = "vllm"
_TEXTS: Final = frozenset(f.name for f in fields(EngineFacts) if str(f.type) == "str | None")
_NUMBERS: Final = frozenset(f.name for f in fields(EngineFacts) if str(f.type) == "int | None")
_LISTS: Final = frozenset({"capabilities", "missing", "agents"})
_TO_LIST: Final = {"nixl_capabilities": "capabilities", "nixl_missing": "missing", "agents": "agents"}
_FROM_ONE_PROCESS: Final = frozenset({"pid"})  # filled in by the sidecar
MAX_LISTED: Final = 128


@dataclass(slots=True)
class ObservedEngine:
    """One engine beside this sidecar; its facts come from several of its processes."""

    process: Process
    known: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)

    @property
    def engine_id(self) -> str | None:
        return self.known.get("engine_id")

    @property
    def connector(self) -> str | None:
        return self.known.get("connector")

    @property
    def policy(self) -> str | None:
        return self.known.get("failure_policy")

    @property
    def ranks(self) -> int:
        """Workers that take part in a load: tensor parallel times pipeline parallel."""
        return max(1, self.known.get("tp_size") or 1) * max(1, self.known.get("pp_size") or 1)

    def learn(self, given: Mapping[str, Any]) -> bool:
        """Take over facts, each of its own type; True when something is new."""
        before = (dict(self.known), {name: list(items) for name, items in self.lists.items()})
        for name, value in given.items():
            if isinstance(value, list):
                target = _TO_LIST.get(name, name)
                if target in _LISTS:
                    listed = self.lists.setdefault(target, [])
                    listed += [item for item in dict.fromkeys(value) if item not in listed][: MAX_LISTED - len(listed)]
            elif name in _FROM_ONE_PROCESS:
                continue
            elif (name in _TEXTS and isinstance(value, str)) or (name in _NUMBERS and _is_count(value)):
                self.known[name] = value
        return before != (self.known, self.lists)

    def forget(self) -> None:
        """Forget the facts: another engine is in this one's place."""
        self.known.clear()
        self.lists.clear()

    def facts(self, at_unix_ns: int, pid: int | None) -> EngineFacts:
        lists: dict[str, Any] = {name: tuple(items) for name, items in self.lists.items()}
        return EngineFacts(
            process=self.process, source=Source.PLUGIN, at_unix_ns=at_unix_ns, engine=ENGINE, pid=pid, **self.known, **lists
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
