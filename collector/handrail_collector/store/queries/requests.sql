-- Requests that match a filter. A parameter that is NULL matches every request.
-- since_unix_ns, until_unix_ns: start in [since, until). instance: host:port of any process of the request.
-- finding: a finding, or its kind (the part before ':'). text: a lower-case part of an id, model, instance, error or finding.
SELECT *
FROM requests
WHERE ($since_unix_ns IS NULL OR started_unix_ns >= $since_unix_ns)
    AND ($until_unix_ns IS NULL OR started_unix_ns < $until_unix_ns)
    AND ($scope IS NULL OR scope = $scope)
    AND ($outcome IS NULL OR outcome = $outcome)
    AND ($model IS NULL OR model = $model)
    AND ($instance IS NULL OR $instance IN (edge_instance, router_instance, prefill_instance, decode_instance))
    AND ($min_ttft_ns IS NULL OR ttft_token_ns >= $min_ttft_ns)
    AND (
        $finding IS NULL
        OR list_contains(findings, $finding)
        OR list_contains(list_transform(findings, lambda finding: split_part(finding, ':', 1)), $finding)
    )
    AND (
        $text IS NULL
        OR contains(lower(client_request_id), $text)
        OR contains(lower(request_key), $text)
        OR contains(lower(response_id), $text)
        OR contains(lower(model), $text)
        OR contains(lower(edge_instance), $text)
        OR contains(lower(router_instance), $text)
        OR contains(lower(prefill_instance), $text)
        OR contains(lower(decode_instance), $text)
        OR contains(lower(error_type), $text)
        OR contains(lower(array_to_string(findings, chr(10))), $text)
        OR contains(lower(hex(trace_id)), $text)
        OR contains(lower(hex(request_id)), $text)
    )
