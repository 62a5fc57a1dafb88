"""List log lines of vLLM's other connectors: Mooncake, MoRIIO, LMCache and stores.

The stores are those behind these connectors.
The wordings of 0.32.0 are from its installed source; none of these connectors was run here. Standard library only.
"""

from __future__ import annotations

from typing import Final

from handrail.records import LogKind
from handrail_sidecar.engine_logs.line_pattern import EACH, ONCE, PEER, PEER_ENGINE
from handrail_sidecar.engine_logs.lines_vllm import read_reason, row

_K = LogKind

MOONCAKE: Final = (
    row(
        "mooncake.pull_failed",
        _K.FETCH_FAILED,
        "pulling kv_caches for {request_ids} failed: {rest}",
        "0.14-0.33",
        reader=read_reason,
    ),
    row(
        "mooncake.send_failed",
        _K.LINK_ERROR,
        "Sending to {peer} failed (ret={_}) after {_} ({descriptors} descriptors, {bytes} bytes)",
        level="WARNING",
        fold=PEER,
    ),
    row(
        "mooncake.expired",
        _K.EXPIRED,
        "Request {request_id} timed out after {timeout_s} seconds without being sent. Freeing its blocks on the producer side",
        "0.12-0.33",
        level="WARNING",
    ),
    row("mooncake.expired_early", _K.EXPIRED, "Request {request_id} expired before sending on P side", level="WARNING"),
    row("mooncake.peer_slow", _K.FETCH_FAILED, "Timeout waiting for P side ready: {request_ids}", level="WARNING"),
    row(
        "mooncake.no_transfer_id",
        _K.BAD_HANDOFF,
        "Missing transfer_id in kv_transfer_params from router",
        level="WARNING",
        fold=ONCE,
    ),
    row("mooncake.groups", _K.COMPAT_MISMATCH, "req {request_id}: KV group count mismatch: local={blocks}, remote={peer_blocks}"),
    row("mooncake.blocks", _K.BAD_HANDOFF, "req {request_id}: local blocks({blocks}) < remote blocks({peer_blocks})"),
    row("mooncake.rank", _K.COMPAT_MISMATCH, "This D tp_rank {peer_rank} is not paired with P tp_rank {rank}", fold=ONCE),
    row(
        "mooncake.layers",
        _K.COMPAT_MISMATCH,
        "Mooncake non-page-contiguous packed regions keep only the first layer name",
        fold=ONCE,
    ),
    row("mooncake.bootstrap", _K.HANDSHAKE_FAILED, "Failed to connect to bootstrap server {peer} (", fold=PEER),
    row(
        "mooncake.bootstrap_retry",
        _K.TRANSFER_RETRIED,
        "Bootstrap query to {peer} failed on attempt {attempt}/{attempts}",
        level="WARNING",
        fold=PEER,
    ),
    row(
        "mooncake.register_retry",
        _K.TRANSFER_RETRIED,
        "Bootstrap registration attempt {attempt}/{attempts} for ",
        level="WARNING",
        fold=ONCE,
    ),
    row(
        "mooncake.register",
        _K.REGISTRATION_FAILED,
        "Error registering {_} with bootstrap server: {rest}",
        reader=read_reason,
        fold=ONCE,
    ),
    row("mooncake.sender", _K.ENGINE_ERROR, "Error in Mooncake sender thread: {rest}", reader=read_reason, fold=ONCE),
    row("mooncake.worker", _K.ENGINE_ERROR, "Error in _sender_worker: {rest}", reader=read_reason, fold=ONCE),
    row("mooncake.processing", _K.ENGINE_ERROR, "Error processing Mooncake xfer request: {rest}", reader=read_reason, fold=ONCE),
    row("mooncake.unavailable", _K.ENGINE_ERROR, "Mooncake is not available", fold=ONCE),
)

MORIIO: Final = (
    row("moriio.read_failed", _K.FETCH_FAILED, "RDMA transfer failed for request {request_id}: {rest}", reader=read_reason),
    row("moriio.read_timeout", _K.FETCH_FAILED, "RDMA read TIMED OUT for req {request_id} after {timeout_s}s"),
    row("moriio.write_failed", _K.FETCH_FAILED, "Write task failed for request {request_id}, marking done"),
    row("moriio.deferred_failed", _K.FETCH_FAILED, "Deferred write task failed for request {request_id}, marking done"),
    row("moriio.deferred_expired", _K.EXPIRED, "Deferred write task for request {request_id} expired after {timeout_s}s"),
    row("moriio.queue_full", _K.FETCH_FAILED, "MoRIIO READ send queue stayed full past transfer_timeout for req {request_id}"),
    row("moriio.notify_failed", _K.NOTIFICATION_FAILED, "Failed to send notification to {rest}", reader=read_reason, fold=ONCE),
    row("moriio.notify_error_failed", _K.NOTIFICATION_FAILED, "Failed to send error notification for request {request_id}"),
    row(
        "moriio.notify_nowhere",
        _K.NOTIFICATION_FAILED,
        "Missing remote_ip or remote_port for notification",
        level="WARNING",
        fold=ONCE,
    ),
    row("moriio.handshake_failed", _K.HANDSHAKE_FAILED, "Handshake with {peer_engine_id} failed", fold=PEER_ENGINE),
    row("moriio.eager_handshake", _K.HANDSHAKE_FAILED, "Eager MoRIIO handshake failed for {peer_engine_id}", fold=PEER_ENGINE),
    row(
        "moriio.lost_notifications",
        _K.NOTIFICATION_FAILED,
        "Reaped {requests} deferred sends with no finished_sending notification after {timeout_s}s",
        level="WARNING",
        fold=EACH,
    ),
    row(
        "moriio.rank_unpinned",
        _K.BAD_HANDOFF,
        "MoRI-IO decode notify: remote_dp_size={_} but the router did not pin remote_dp_rank for request {request_id};",
        level="WARNING",
    ),
    row("moriio.heartbeat", _K.LINK_ERROR, "MoRIIO discovery heartbeat send failed", level="WARNING", fold=ONCE),
    row("moriio.unreleased", _K.BAD_HANDOFF, "Cannot release WRITE prefill blocks for request {request_id}:", level="WARNING"),
    row("moriio.hybrid_layer", _K.ENGINE_ERROR, "MoRIIO hybrid READ failed before ", fold=ONCE),
    row("moriio.reads_open", _K.ENGINE_ERROR, "MoRIIO reads did not complete before the forward", fold=ONCE),
    row("moriio.barrier", _K.LINK_ERROR, "MoRIIO READ barrier did not complete for layer", level="WARNING", fold=ONCE),
    row("moriio.wait_write", _K.LINK_ERROR, "Timed out waiting for write_ready_flags[", level="WARNING", fold=ONCE),
    row("moriio.wait_load", _K.LINK_ERROR, "Timed out waiting for load_ready_flag[", level="WARNING", fold=ONCE),
    row("moriio.unavailable", _K.ENGINE_ERROR, "MoRIIO is not available", fold=ONCE),
)

LMCACHE: Final = (
    row(
        "lmcache.short",
        _K.CACHE_SHORT,
        "The number of retrieved tokens is less than the expected number of tokens",
        "0.10-0.33",
        fold=EACH,
    ),
    row(
        "lmcache.short_counts",
        _K.CACHE_SHORT,
        "Num retrieved tokens: {got_tokens}, num expected tokens: {expected_tokens}",
        "0.10-0.33",
        fold=EACH,
    ),
    row(
        "lmcache.retrieve",
        _K.FETCH_FAILED,
        "Something went wrong when processing the retrieve request for request_id={request_id},",
    ),
)

STORES: Final = (
    row("store.keys", _K.CACHE_SHORT, "Failed to get {blocks} Mooncake keys from sub-batch", level="WARNING", fold=ONCE),
    row("store.batch", _K.CACHE_SHORT, "Failed to get Mooncake sub-batch", level="WARNING", fold=ONCE),
    row("store.too_large", _K.CACHE_SHORT, "Skipping Mooncake load for request {request_id} because key", level="WARNING"),
    row("store.lookup", _K.CACHE_SHORT, "Async Mooncake lookup failed for {request_id}:"),
    row("store.lookup_remote", _K.LINK_ERROR, "Remote connection failed in lookup:", fold=ONCE),
    row("store.worker", _K.ENGINE_ERROR, "Error in {process} (req={request_id})"),
    row("hf3fs.load", _K.CACHE_SHORT, "Load worker error:", fold=ONCE),
    row("hf3fs.match", _K.CACHE_SHORT, "Error calculating matches for request {request_id}:"),
)

ROWS: Final = (*MOONCAKE, *MORIIO, *LMCACHE, *STORES)
