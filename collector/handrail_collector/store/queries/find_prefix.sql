-- Places (file and start) of requests with an id that begins with id.
-- first_trace_id to last_trace_id, first_request_id to last_request_id: the bytes that begin with it; NULL if it is not hex.
SELECT filename, started_unix_ns
FROM requests
WHERE starts_with(client_request_id, $id)
    OR (stored_request_key <> '=' AND starts_with(request_key, $id))
    OR (
        (
            starts_with($id, split_part(stored_response_id, '=', 1))
            OR starts_with(stored_response_id, $id)
            OR starts_with(stored_response_id, '\')
        )
        AND starts_with(response_id, $id)
    )
    OR trace_id BETWEEN $first_trace_id AND $last_trace_id
    OR request_id BETWEEN $first_request_id AND $last_request_id
ORDER BY started_unix_ns DESC
LIMIT $row_limit
