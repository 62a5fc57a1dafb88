"""Decide which request ids mean the same request.

Each origin has a grammar, and only the parts that the grammar adds are removed. Forms seen on real engines: testbed measurements
section 4c (vLLM 0.32, vllm-router 0.1.17). Child ids of parallel sampling: vllm/v1/engine/parallel_sampling.py.
A client's own ``user-42-7`` and ``user-42-8`` stay two keys, because the client's header is never taken apart.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from enum import Enum

from handrail.printable import printable

MAX_ID_CHARS = 128
"""Longest request id that is stored.

A longer one keeps its first 128 characters and a hash of the whole (case C10).
"""


class IdOrigin(str, Enum):
    """Writer of the id, which decides what may be removed from it."""

    CLIENT = "client"  # an X-Request-Id header, whoever sent it: the client, or a router that replaces ids
    VLLM_RESPONSE = "vllm_response"  # "id" of a response body: cmpl-<stem>, chatcmpl-<stem>
    VLLM_EXTERNAL = "vllm_external"  # gen_ai.request.id, FinishedRequestStats: cmpl-<stem>-<prompt index>, chatcmpl-<stem>
    VLLM_ENGINE = "vllm_engine"  # inside the engine and remote_request_id: external id + -<8 hex>; <n>_ before it for choices
    OTHER = "other"  # an engine without a grammar here: taken as it is


class JoinKind(str, Enum):
    """How a record was joined to a request, strongest evidence first.

    The strongest evidence wins.
    """

    OPENED = "opened"  # the evidence that gave the request its row
    CONNECTOR = "connector"  # remote engine id + remote request id, bootstrap room, transfer id
    ENGINE_ID = "engine_id"  # the same request id inside one engine
    ANCESTOR = "ancestor"  # same trace, and a parent chain that reaches a span we sent
    REQUEST_KEY = "request_key"  # same key, inside the lifetime of one edge or router exchange
    ONLY_ONE = "only_one"  # names no request, and no other can be meant: a failure that an engine counted


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Request key with the index in a batch.

    The index is set where the id names one prompt or choice of a batch.
    """

    key: str
    sub: int | None = None


@dataclass(frozen=True, slots=True)
class ClippedId:
    """Request id for storage: printable, at most 128 characters.

    ``hash`` covers the raw bytes and is set only where the id was clipped.
    """

    text: str
    hash: str | None = None


_COMPLETION = re.compile(r"cmpl-(?P<stem>.+?)-(?P<index>\d+)\Z", re.S)
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "embd-", "pooling-", "classify-", "score-", "generate-tokens-")
_ENGINE_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_CHOICE = re.compile(r"(?P<index>\d+)_(?=(?:chatcmpl-|cmpl-))")
_VLLM_ROUTER = re.compile(r"___prefill_addr_(?P<prefill>.+?)___decode_addr_(?P<decode>.+)_(?P<hex>[0-9a-f]{32})\Z", re.S)


def request_key(raw: str, origin: IdOrigin) -> RequestKey:
    """Request key of ``raw`` by the grammar of ``origin``.

    Equal keys from processes of one edge or router lifetime mean the same request; they prove nothing without that lifetime.
    An id that does not follow its origin's grammar is its own key.
    """
    text, sub = raw, None
    if origin is IdOrigin.VLLM_ENGINE:
        text = _ENGINE_SUFFIX.sub("", text)
        if choice := _CHOICE.match(text):
            sub, text = int(choice["index"]), text[choice.end() :]
    if origin in (IdOrigin.VLLM_ENGINE, IdOrigin.VLLM_EXTERNAL) and (completion := _COMPLETION.match(text)):
        sub = int(completion["index"]) if sub is None else sub
        text = completion["stem"]
    elif origin in (IdOrigin.VLLM_ENGINE, IdOrigin.VLLM_EXTERNAL, IdOrigin.VLLM_RESPONSE):
        text = _strip_prefix(text)
    if router := _VLLM_ROUTER.match(text):
        text = router["hex"]
    if len(text) > MAX_ID_CHARS:
        text = f"{text[:64]}~{_hash(text.encode('utf-8', 'surrogateescape'))}"
    return RequestKey(text, sub)


def router_peers(raw: str) -> tuple[str, str] | None:
    """Prefill and decode addresses in a vllm-router request id; None for any other id."""
    found = _VLLM_ROUTER.search(raw)
    return (found["prefill"], found["decode"]) if found else None


def candidate_keys(raw: str) -> tuple[str, ...]:
    """All keys that ``raw`` may mean, the unchanged id first.

    For an id of unknown origin that a person pastes.
    """
    keys = dict.fromkeys(request_key(raw, origin).key for origin in IdOrigin)
    return tuple(keys)


def joinable(key: str) -> bool:
    """Whether processes can be joined by this id.

    False for counters that every process counts for itself (case C27).
    """
    return len(key) > 0 and not (key.isdecimal() and len(key) < 12)


def clip_request_id(raw: bytes) -> ClippedId:
    """Header bytes ``raw`` as text for storage.

    Characters that are not ``printable`` become ``?``, so that a log line stays one line.
    """
    text = printable(raw[: 4 * MAX_ID_CHARS].decode("utf-8", "replace"), "?")
    if len(raw) <= MAX_ID_CHARS:
        return ClippedId(text)
    return ClippedId(text[:MAX_ID_CHARS], _hash(raw))


def derive_trace_id(key: str) -> str:
    """Trace id of a request that came without one: BLAKE2b-128 of its key.

    Sidecars agree on it without communication.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16, person=b"handrail-trace").hexdigest()
    return digest if digest.strip("0") else "1".zfill(32)


def new_trace_id() -> str:
    """Random W3C trace id."""
    return os.urandom(16).hex()


def new_span_id() -> str:
    """Random W3C span id.

    It is never derived, so two observers of one request never get the same one.
    """
    return os.urandom(8).hex()


def new_request_id() -> str:
    """Request id for a client that sent none.

    96 random bits follow a prefix that names Handrail as the source.
    """
    return f"hr-{os.urandom(12).hex()}"


def _strip_prefix(text: str) -> str:
    for prefix in _PREFIXES:
        if text.startswith(prefix) and len(text) > len(prefix):
            return text[len(prefix) :]
    return text


def _hash(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
