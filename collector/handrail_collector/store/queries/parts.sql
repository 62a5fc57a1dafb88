-- Requests counted by place, outcome and part of their scope, with the sums of their times and phases.
-- part: slow, usual or other by the thresholds of scope and measure. measure: as in aggregates.sql.
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
    CASE
        WHEN value_ns >= slow_from_ns THEN 'slow'
        WHEN value_ns BETWEEN baseline_from_ns AND baseline_to_ns THEN 'usual'
        ELSE 'other'
    END AS part,
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
LEFT JOIN thresholds USING (scope, measure)
GROUP BY measure, scope, model, prefill_host, decode_host, outcome, kv_outcome, part
