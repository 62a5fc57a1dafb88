"""Records of the sources, as plain facts.

Only its ``source`` field says where a record came from. All ids are lower-case hex strings. ``*_unix_ns`` is wall clock; every
other ``*_ns`` is a duration or an offset from the record's own arrival on the observing process's monotonic clock.
``None`` always means "not seen here", never zero.
"""

from handrail.records.engine import (
    EngineFacts,
    EngineTimes,
    Iteration,
    Observation,
    PluginEvent,
    PluginSpan,
    ProcessEvent,
    ProcessEventKind,
    Sink,
)
from handrail.records.engine_samples import (
    EngineHistogram,
    EngineSample,
    EngineValue,
    RequestCounts,
    SchemaNote,
    SchemaReport,
    SchemaState,
)
from handrail.records.exchange import (
    EngineRequest,
    Exchange,
    Gaps,
    Hint,
    KvParams,
    Outcome,
    Record,
    ResponseFacts,
    RouterCall,
)
from handrail.records.kv import ENGINE_GONE, ENGINE_LOST, ENGINE_STOPPED, Direction, FetchEffect, KvFetch, KvPublish
from handrail.records.log_events import FAILED_FETCH_KINDS, LineClock, LogFact, LogKind
from handrail.records.process import (
    Finding,
    Process,
    Role,
    Source,
    SpanIds,
)

__all__ = [
    "ENGINE_GONE",
    "ENGINE_LOST",
    "ENGINE_STOPPED",
    "FAILED_FETCH_KINDS",
    "Direction",
    "EngineFacts",
    "EngineHistogram",
    "EngineRequest",
    "EngineSample",
    "EngineTimes",
    "EngineValue",
    "Exchange",
    "FetchEffect",
    "Finding",
    "Gaps",
    "Hint",
    "Iteration",
    "KvFetch",
    "KvParams",
    "KvPublish",
    "LineClock",
    "LogFact",
    "LogKind",
    "Observation",
    "Outcome",
    "PluginEvent",
    "PluginSpan",
    "Process",
    "ProcessEvent",
    "ProcessEventKind",
    "Record",
    "RequestCounts",
    "ResponseFacts",
    "Role",
    "RouterCall",
    "SchemaNote",
    "SchemaReport",
    "SchemaState",
    "Sink",
    "Source",
    "SpanIds",
]
