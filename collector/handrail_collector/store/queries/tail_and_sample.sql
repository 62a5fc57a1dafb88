-- Requests with a slow first token, and a sample of all, one by one: one in sample_every of those that have a first token.
SELECT *
FROM (
    SELECT
        scope, model, outcome, kv_outcome,
        coalesce(prefill_host, prefill_instance) AS prefill_host,
        coalesce(decode_host, decode_instance) AS decode_host,
        trace_id, request_id, version, client_request_id, started_unix_ns,
        ttft_token_ns AS ttft_ns,
        phase_shape,
        coalesce(ttft_token_ns >= slow_from_ns, FALSE) AS slow,
        hash(started_unix_ns) % $sample_every = 0 AS sampled,
        prompt_tokens - coalesce(cached_tokens, 0) AS uncached_tokens,
        coalesce(cached_tokens, 0) AS cached_tokens,
        prefill_attempts > 1 AS moved,
        prefill_paused_ns, decode_paused_ns,
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
    LEFT JOIN (SELECT scope, slow_from_ns FROM thresholds WHERE measure = 'ttft') AS cuts USING (scope)
    WHERE phase_of = 'ttft'
        AND ttft_token_ns IS NOT NULL
        AND ($since_unix_ns IS NULL OR started_unix_ns >= $since_unix_ns)
        AND ($until_unix_ns IS NULL OR started_unix_ns < $until_unix_ns)
        AND ($scope IS NULL OR scope = $scope)
        AND ($model IS NULL OR model = $model)
)
WHERE slow OR sampled
