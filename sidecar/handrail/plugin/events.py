"""Events that the plugin sends to the sidecar, and the datagrams that carry them.

An event is a tuple ``(name, t_ns, field, ...)``: ``t_ns`` is the monotonic clock of the host, the fields are those of ``FIELDS``
in that order. A datagram is a JSON array, at most ``MAX_DATAGRAM_BYTES``::

    [version, boot, pid, process kind, sequence, monotonic_ns, unix_ns, lost, [event, ...]]

``boot`` is random, drawn once a process: pids repeat (1 in every container). ``sequence`` counts the datagrams of one boot from
1; the clock pair is read when the datagram is made; ``lost`` counts events that the plugin lost since the boot.
``sources/datagram.py`` reads the datagrams and trusts no value in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

VERSION: Final = 1
MAX_DATAGRAM_BYTES: Final = 32 * 1024
MAX_TEXT_CHARS: Final = 512  # of one field; a log line may have MAX_LINE_CHARS
MAX_LINE_CHARS: Final = 4096
MAX_PART_CHARS: Final = 4096  # of a body; in JSON each may take six bytes
LONG: Final = frozenset({"line", "part"})  # fields that may be longer than MAX_TEXT_CHARS

REQUEST_HEADERS: Final = frozenset(
    {
        b"traceparent",
        b"b3",
        b"x-b3-traceid",
        b"x-b3-spanid",
        b"x-b3-sampled",
        b"x-b3-flags",
        b"x-request-id",
        b"content-type",
        b"content-encoding",
    }
)

SOCKET_ENV: Final = "HANDRAIL_SOCKET"  # without it the plugin is inert
TRACEPARENT_ENV: Final = "HANDRAIL_TRACEPARENT"  # 0: add nothing to kv_transfer_params
TRACEPARENT_PARAM: Final = "handrail_traceparent"

# --- process kinds --------------------------------------------------------------------------------------------------------
API: Final = "api"
CORE: Final = "core"
WORKER: Final = "worker"
UNKNOWN: Final = "unknown"  # loaded the plugin, no events yet

# --- events ---------------------------------------------------------------------------------------------------------------
FACTS: Final = "facts"
ALIVE: Final = "alive"
STOPPING: Final = "stopping"
DEGRADED: Final = "degraded"
LOG: Final = "log"
HTTP_REQUEST: Final = "http_request"
HTTP_PART: Final = "http_part"
HTTP_HEAD: Final = "http_head"
HTTP_BODY: Final = "http_body"
HTTP_HELD: Final = "http_held"
HTTP_END: Final = "http_end"
QUEUED: Final = "queued"
SCHEDULED: Final = "scheduled"
FIRST_TOKEN: Final = "first_token"
PREEMPTED: Final = "preempted"
FINISHED: Final = "finished"
STEP: Final = "step"
PAUSED: Final = "paused"
KV_KNOWN: Final = "kv_known"
KV_WANTED: Final = "kv_wanted"
KV_LOAD: Final = "kv_load"
KV_HANDSHAKE: Final = "kv_handshake"
KV_POSTED: Final = "kv_posted"
KV_DONE: Final = "kv_done"
KV_LOADED: Final = "kv_loaded"
KV_FAILURE: Final = "kv_failure"
KV_NOTICED: Final = "kv_noticed"
KV_PUBLISHED: Final = "kv_published"
KV_LEASE: Final = "kv_lease"
KV_READ: Final = "kv_read"
KV_EXPIRED: Final = "kv_expired"
KV_FREED: Final = "kv_freed"

FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    # name -> field -> type: i whole number from 0, s text, b flag, m mapping of text to i, s, b or list of s; ?: or null
    FACTS: {"facts": "m"},  # keys: fields of records.EngineFacts
    ALIVE: {"last_step_ns": "i?", "unfinished": "i?"},  # once a second; unfinished: requests the scheduler has to do
    STOPPING: {"clean": "b"},  # this process is about to end; clean: it received the signal to, and nothing had failed
    DEGRADED: {"hook": "s", "error": "s", "off": "b"},  # error: the exception's class; off: disabled for good
    LOG: {"level": "s", "line": "s"},  # one line of the vllm logger, warnings and worse
    HTTP_REQUEST: {  # a request has been read; b: bytes, each as one character of latin-1
        "exchange": "i",  # counts within the boot
        "arrival_ns": "i",
        "method": "s",
        "path": "s",
        "headers": "m",  # those of REQUEST_HEADERS, lower case, each a list of values
        "body_bytes": "i",
    },
    HTTP_PART: {"exchange": "i", "part": "s", "tail": "b"},  # of the request's body: its beginning, then its end
    HTTP_HEAD: {"exchange": "i", "status": "i", "content_type": "s?", "content_encoding": "s?"},
    HTTP_BODY: {"exchange": "i", "part": "s"},  # of the response's body; t_ns: when the engine handed it over
    HTTP_HELD: {
        "exchange": "i",
        "begin_ns": "i",
    },  # until t_ns the server took no more: its client did not
    HTTP_END: {"exchange": "i", "ending": "s"},  # clean | client_gone | failed
    QUEUED: {"request": "s", "arrival_unix_ns": "i?", "prompt_tokens": "i?", "traceparent": "s?"},
    SCHEDULED: {"request": "s", "cached_tokens": "i?", "external_tokens": "i?"},  # the first time, and after a preemption
    FIRST_TOKEN: {"request": "s"},
    PREEMPTED: {"request": "s"},
    FINISHED: {"request": "s", "status": "s?", "output_tokens": "i?"},
    STEP: {
        "begin_ns": "i",
        "requests": "i",
        "prefill_requests": "i",
        "prefill_tokens": "i",
        "decode_tokens": "i",
        "preemptions": "i",
        "running": "i?",
        "waiting": "i?",
        "landed": "b",  # a KV load ended in it
        "resumed_tokens": "i?",  # computed once more, since a preemption had discarded them
    },
    PAUSED: {"begin_ns": "i", "reason": "s", "bound_ns": "i"},  # plugin/pauses.py; it may have begun bound_ns before
    KV_KNOWN: {
        "request": "s",
        "connector": "s",
        "engine_id": "s?",
        "peer_engine_id": "s?",
        "peer_request_id": "s?",
        "peer_host": "s?",
        "peer_port": "i?",
        "direction": "s?",
        "mode": "s?",
        "traceparent": "s?",  # of the peer's kv.publish
    },
    KV_WANTED: {  # blocks are there; 0 tokens: all of it was here already, or another child of a composite loads
        "request": "s",
        "connector": "s",
        "engine_id": "s?",
        "tokens_wanted": "i",
        "tokens_local": "i?",
        "blocks": "i?",
        "bytes_expected": "i?",
        "asynchronous": "b",  # the scheduler goes on and is notified; else the load is over when its step is
    },
    KV_LOAD: {"request": "s", "rank": "i"},
    KV_HANDSHAKE: {"peer_engine_id": "s", "rank": "i", "begin_ns": "i", "ok": "b?"},  # at its begin; at its end with ok
    KV_POSTED: {"request": "s", "rank": "i", "writes": "b"},  # writes: this engine pushes
    KV_DONE: {"request": "s", "rank": "i", "bytes": "i?", "descriptors": "i?", "bound_ns": "i", "writes": "b"},  # one transfer
    KV_LOADED: {"request": "s", "rank": "i", "failed": "b", "bound_ns": "i"},  # the worker reports it to the scheduler
    KV_FAILURE: {"request": "s?", "rank": "i", "type": "s", "error": "s?", "peer_engine_id": "s?"},
    KV_NOTICED: {"request": "s", "failed": "b"},
    KV_PUBLISHED: {
        "request": "s",
        "connector": "s",
        "engine_id": "s?",
        "tokens": "i?",
        "blocks": "i?",
        "kv_bytes": "i?",
        "lease_ns": "i?",
        "direction": "s?",
        "mode": "s?",
        "traceparent": "s?",  # of this kv.publish: its own span id
    },
    KV_LEASE: {"request": "s", "left_ns": "i"},  # a heartbeat extended it
    KV_READ: {"request": "s", "rank": "i", "reader": "s?", "late": "b", "bound_ns": "i"},  # late: after the blocks were freed
    KV_EXPIRED: {"request": "s", "rank": "i"},
    KV_FREED: {"request": "s"},
}

Event = tuple[Any, ...]

_ENCODE: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, check_circular=False).encode
_HEAD_BYTES: Final = 256  # more than any head takes


def datagrams(
    events: Sequence[Event], *, boot: str, pid: int, kind: str, sequence: int, monotonic_ns: int, unix_ns: int, lost: int
) -> tuple[list[bytes], int]:
    """Encode ``events`` as datagrams numbered from ``sequence``.

    Returns them and the new ``lost``. No datagram has more than ``MAX_DATAGRAM_BYTES``. An event that cannot be encoded or is
    too large by itself is left out and counted in ``lost``. Without events there is one empty datagram.
    """
    made: list[bytes] = []
    held: list[str] = []
    size = _HEAD_BYTES
    for event in events:
        try:
            text = _ENCODE(event)
        except (TypeError, ValueError):
            lost += 1
            continue
        if len(text) + _HEAD_BYTES > MAX_DATAGRAM_BYTES:
            lost += 1
            continue
        if size + len(text) + 1 > MAX_DATAGRAM_BYTES:
            made.append(_datagram(held, boot, pid, kind, sequence, monotonic_ns, unix_ns, lost))
            sequence += 1
            held, size = [], _HEAD_BYTES
        held.append(text)
        size += len(text) + 1
    made.append(_datagram(held, boot, pid, kind, sequence, monotonic_ns, unix_ns, lost))
    return made, lost


def _datagram(events: list[str], *head: object) -> bytes:
    return f"{_ENCODE([VERSION, *head])[:-1]},[{','.join(events)}]]".encode("ascii")
