"""A hypothesis strategy for valid plugin records, by the types of their fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final, TypeVar

from hypothesis import strategies as st

from handrail.records import (
    Direction,
    EngineFacts,
    EngineTimes,
    FetchEffect,
    Iteration,
    KvFetch,
    KvPublish,
    Process,
    ProcessEvent,
    ProcessEventKind,
    Role,
    Source,
    SpanIds,
)

_text = st.text(st.characters(codec="utf-8"), max_size=20)
_number = st.integers(0, 2**53 - 1)
_unix = st.integers(1, 2**62 - 1)
_hex = {size: st.binary(min_size=size, max_size=size).map(bytes.hex) for size in (8, 16)}
_BY_TYPE: Final[dict[str, st.SearchStrategy[Any]]] = {
    "str": _text,
    "int": _number,
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(_text, max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(_number, max_size=4).map(tuple),
    "Direction": st.sampled_from(Direction),
    "FetchEffect": st.sampled_from(FetchEffect),
    "ProcessEventKind": st.sampled_from(ProcessEventKind),
    "Source": st.just(Source.PLUGIN),
    "SpanIds": st.builds(
        SpanIds,
        trace_id=_hex[16],
        span_id=_hex[8],
        parent_span_id=st.just("") | _hex[8],
        flags=st.integers(0, 255),
    ),
    "Process": st.builds(
        Process, role=st.sampled_from(Role), instance=_text, host=_text, service=_text, sender=_text, host_name=_text
    ),
}
R = TypeVar("R", EngineTimes, KvFetch, KvPublish, Iteration, ProcessEvent, EngineFacts)


def _strategy(name: str, type_name: str) -> st.SearchStrategy[Any]:
    plain = type_name.removesuffix(" | None")
    found = _unix if name.endswith("_unix_ns") else _BY_TYPE[plain]
    if name.endswith("_span_id"):
        found = st.just("") | _hex[8]
    return found if plain == type_name else st.none() | found


def sane(kind: type[R]) -> st.SearchStrategy[R]:
    """Generate any valid record of a class.

    A field added to the class takes part by its type, or the strategy fails and names the missing type.
    """
    return st.builds(kind, **{field.name: _strategy(field.name, str(field.type)) for field in fields(kind)})
