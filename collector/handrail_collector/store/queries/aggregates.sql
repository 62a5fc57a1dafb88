-- Requests counted by place, outcome and time (bin), with the sums of their times and phases.
-- They come from rows in requests and from whole hours in rollups. A rollup is this very answer over the rows of one file.
-- measure ttft: time to first token; requests without one have no bin. measure gap: largest gap of a stream; it has no phases.
-- bins_per_e: bins of a time within a factor of e. A host without a name goes by its process.
WITH measured AS (
    SELECT
        measure, scope, model, outcome, kv_outcome, complete,
        coalesce(prefill_host, prefill_instance) AS prefill_host,
        coalesce(decode_host, decode_instance) AS decode_host,
        CASE WHEN measure = 'gap' THEN gap_max_ns WHEN phase_of = 'ttft' THEN ttft_token_ns END AS value_ns,
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
    CROSS JOIN (SELECT unnest(['ttft', 'gap']) AS measure)
    WHERE (measure = 'ttft' OR gap_max_ns IS NOT NULL)
        AND ($since_unix_ns IS NULL OR started_unix_ns >= $since_unix_ns)
        AND ($until_unix_ns IS NULL OR started_unix_ns < $until_unix_ns)
        AND ($scope IS NULL OR scope = $scope)
        AND ($model IS NULL OR model = $model)
)
SELECT
    measure, scope, model, prefill_host, decode_host, outcome, kv_outcome,
    CASE WHEN value_ns IS NOT NULL THEN CAST(floor(ln(greatest(value_ns, 1)) * $bins_per_e) AS INTEGER) END AS bin,
    count(*) AS requests,
    count(value_ns) AS timed,
    count(*) FILTER (WHERE complete) AS complete,
    sum(value_ns) AS value_sum_ns,
    sum(phase_prefill_admission_ns) FILTER (WHERE measure = 'ttft') AS phase_prefill_admission_ns,
    sum(phase_prefill_queue_ns) FILTER (WHERE measure = 'ttft') AS phase_prefill_queue_ns,
    sum(phase_prefill_compute_ns) FILTER (WHERE measure = 'ttft') AS phase_prefill_compute_ns,
    sum(phase_prefill_respond_ns) FILTER (WHERE measure = 'ttft') AS phase_prefill_respond_ns,
    sum(phase_decode_admission_ns) FILTER (WHERE measure = 'ttft') AS phase_decode_admission_ns,
    sum(phase_kv_wait_ns) FILTER (WHERE measure = 'ttft') AS phase_kv_wait_ns,
    sum(phase_kv_handshake_ns) FILTER (WHERE measure = 'ttft') AS phase_kv_handshake_ns,
    sum(phase_kv_transfer_ns) FILTER (WHERE measure = 'ttft') AS phase_kv_transfer_ns,
    sum(phase_kv_notice_ns) FILTER (WHERE measure = 'ttft') AS phase_kv_notice_ns,
    sum(phase_decode_queue_ns) FILTER (WHERE measure = 'ttft') AS phase_decode_queue_ns,
    sum(phase_first_step_ns) FILTER (WHERE measure = 'ttft') AS phase_first_step_ns,
    sum(phase_decode_respond_ns) FILTER (WHERE measure = 'ttft') AS phase_decode_respond_ns,
    sum(phase_router_and_hops_ns) FILTER (WHERE measure = 'ttft') AS phase_router_and_hops_ns,
    sum(phase_router_ns) FILTER (WHERE measure = 'ttft') AS phase_router_ns,
    sum(phase_prefill_hops_ns) FILTER (WHERE measure = 'ttft') AS phase_prefill_hops_ns,
    sum(phase_decode_hops_ns) FILTER (WHERE measure = 'ttft') AS phase_decode_hops_ns,
    sum(phase_unattributed_ns) FILTER (WHERE measure = 'ttft') AS phase_unattributed_ns,
    sum(unattributed_prefill_ns) FILTER (WHERE measure = 'ttft') AS unattributed_prefill_ns,
    sum(unattributed_decode_ns) FILTER (WHERE measure = 'ttft') AS unattributed_decode_ns
FROM measured
GROUP BY measure, scope, model, prefill_host, decode_host, outcome, kv_outcome, bin
UNION ALL
SELECT
    measure, scope, model, prefill_host, decode_host, outcome, kv_outcome, bin,
    requests, timed, complete, value_sum_ns,
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
FROM rollups
WHERE measure IN ('ttft', 'gap') AND ($scope IS NULL OR scope = $scope) AND ($model IS NULL OR model = $model)
