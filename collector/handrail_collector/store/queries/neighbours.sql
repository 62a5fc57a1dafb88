-- Requests of one scope and model in a period that have a first token: one in sample_every of them.
SELECT
    started_unix_ns,
    ttft_token_ns AS ttft_ns,
    prompt_tokens - coalesce(cached_tokens, 0) AS uncached_tokens,
    coalesce(cached_tokens, 0) AS cached_tokens,
    coalesce(prefill_attempts, 0) > 1 AS moved,
    coalesce(prefill_host, prefill_instance) AS prefill_host,
    coalesce(decode_host, decode_instance) AS decode_host,
    phase_prefill_admission_ns,
    phase_prefill_queue_ns,
    phase_prefill_compute_ns,
    phase_prefill_respond_ns,
    phase_decode_admission_ns,
    phase_kv_wait_ns,
    phase_kv_handshake_ns,
    phase_kv_transfer_ns,
    phase_kv_notice_ns,
    phase_decode_queue_ns,
    phase_first_step_ns,
    phase_decode_respond_ns,
    phase_router_and_hops_ns,
    phase_router_ns,
    phase_prefill_hops_ns,
    phase_decode_hops_ns,
    phase_unattributed_ns,
    unattributed_prefill_ns,
    unattributed_decode_ns
FROM requests
WHERE started_unix_ns >= $since_unix_ns
    AND started_unix_ns < $until_unix_ns
    AND hash(started_unix_ns) % $sample_every = 0
    AND scope = $scope
    AND model IS NOT DISTINCT FROM $model
    AND phase_of = 'ttft'
    AND ttft_token_ns IS NOT NULL
