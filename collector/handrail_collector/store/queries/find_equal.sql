-- Places (file and start) of requests that have one of these ids in any form. Parameters: as in find_stored.sql.
-- A request key equal to the client's id is compared already, and a response id holds its key: so few rows are composed.
SELECT filename, started_unix_ns
FROM requests
WHERE list_contains($ids, client_request_id)
    OR (stored_request_key <> '=' AND list_contains($ids, request_key))
    OR (
        (stored_request_key <> '=' OR contains($id, client_request_id) OR starts_with(stored_response_id, '\'))
        AND response_id = $id
    )
    OR stored_response_id = $id
    OR request_id = $span_id
    OR trace_id = $trace_id
    OR contains(lower(hex(other_trace_ids)), $hex)
ORDER BY started_unix_ns DESC
LIMIT $row_limit
