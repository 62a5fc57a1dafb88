"""List every kind of finding.

A kind is the text before the colon in a row's ``findings``, or names a finding that belongs to no request.
"""

from __future__ import annotations

from typing import Final

FINDINGS: Final = (
    "ambiguous_request_id",
    "answered_after_failure",
    "bad_attribute",
    "clocks_unknown",
    "context_lost",
    "duplicate_request_id",
    "engine_hung",
    "engine_lost",
    "engine_restarted",
    "engine_stopped",
    "fallback_local",
    "handoff_near_lease",
    "handoff_over_lease",
    "kv_bytes_short",
    "kv_mismatch",
    "model_mismatch",
    "no_handoff_data",
    "prefill_decode_overlap",
    "prefill_error",
    "prefill_retried",
    "request_id_reused",
    "return_failed",
    "stale_read",
    "unexplained_failures",
    "waiting_after_failure",
    "wrong_request",
)
