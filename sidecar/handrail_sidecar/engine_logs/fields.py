"""List the fields that may leave a log line, with a pattern for each.

It is an allow-list, since a line may echo what a client wrote.
Standard library only: the logging handler inside the engine uses it too.
"""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 256
"""Most characters of a text field; a longer value is clipped.

Request ids of vllm-router are about 140 characters long.
"""

_ID: Final = r"[^\s,'\"<>{}\[\]]{1,512}"
_WORD: Final = r"[A-Za-z_][\w.-]{0,127}"
_NUMBER: Final = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"

IDS: Final = ("request_id", "peer_request_id", "engine_id", "peer_engine_id", "peer", "room")
"""Fields of ``records.LogFact`` with the same names."""

WORDS: Final = ("failure", "policy", "nic", "peer_nic", "transport", "transfer_id", "process", "reach")

NUMBERS: Final = (
    "attempt",
    "attempts",
    "blocks",
    "bytes",
    "descriptors",
    "elapsed_ms",
    "exit_code",
    "expected_tokens",
    "got_tokens",
    "hit_tokens",
    "load_tokens",
    "peer_blocks",
    "peer_port",
    "peer_rank",
    "rank",
    "readers",
    "requests",
    "retries",
    "timeout_s",
    "tokens",
    "rate_mb_s",
    "elapsed_ns",
)

PATTERNS: Final = {
    **dict.fromkeys(IDS, _ID),
    **dict.fromkeys(WORDS, _WORD),
    **dict.fromkeys(NUMBERS, _NUMBER),
    "request_ids": r"[{\[(][^{}\[\]()]{0,65536}[}\])]?",  # the repr of a set, a list or a tuple of ids
    "rest": r".{0,8192}",  # passed to the row's own reader, which takes only allow-listed parts of it
}

_QUOTED: Final = re.compile(r"['\"]([^'\"\s,]{1,512})['\"]")
_MOST_IDS: Final = 256


def clipped(text: str) -> str:
    """Clip an id or word: no trailing punctuation of its sentence, bounded length."""
    return text.rstrip(".:;,)")[:LONGEST]


def quoted_ids(text: str) -> tuple[str, ...]:
    """Return the ids in the repr of a collection; at most 256."""
    return tuple(match[1][:LONGEST] for match, _ in zip(_QUOTED.finditer(text), range(_MOST_IDS), strict=False))


# --- reasons of failures: codes only -----------------------------------------------------------------------------------------

_CODE: Final = re.compile(r"\b(?:NIXL_ERR_[A-Z_]+|UCS_ERR_[A-Z_]+|IBV_WC_[A-Z_]+)\b")
_EXCEPTION: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Interrupt|Timeout|Exit))\b")
_EXCEPTION_LINE: Final = re.compile(_EXCEPTION.pattern + r"(?::|$)")
_QUALIFIED_LINE: Final = re.compile(r"(?:[A-Za-z_]\w*\.)+([A-Z]\w{0,63})(?::|$)")  # zmq.error.Again: ...
_PHRASES: Final = {
    "Endpoint timeout": "endpoint_timeout",
    "Connection reset by remote peer": "connection_reset",
    "transport retry counter exceeded": "transport_retry_exceeded",
    "compatibility hash mismatch": "compat_hash_mismatch",
    "might be dead": "peer_might_be_dead",
    "could be dead": "peer_might_be_dead",
    "Aborted by AbortReq": "aborted",
    "Failed to send kv chunk": "send_failed",
    "timed out": "timed_out",
    "waiting_timeout": "timed_out",
    "Lost connection": "connection_lost",
}
"""Phrase that a message must contain, and the word that stands for it.

The first match wins.
"""


def reason_of(text: str) -> str | None:
    """Return why something failed, as a code, a phrase's word or an exception's class.

    The text itself never leaves.
    """
    head = text[:2048]
    if found := _CODE.search(head):
        return found[0]
    for phrase, word in _PHRASES.items():
        if phrase in head:
            return word
    if found := _EXCEPTION.search(head):
        return found[1][:64]
    return None


def exception_line(text: str) -> str | None:
    """Return the reason in the last line of a Python traceback; None for other lines.

    Such a line looks like ``pkg.SomeError: message``.
    """
    if _EXCEPTION_LINE.match(text):
        return reason_of(text)
    qualified = _QUALIFIED_LINE.match(text)
    return None if qualified is None else qualified[1]
