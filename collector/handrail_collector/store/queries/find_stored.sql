-- Places (file and start) of requests that have one of these ids in the form in which a file holds it.
-- ids: the id and the keys that it may mean. id: the id itself. span_id, trace_id: its bytes, if it is one; hex: its digits then.
-- Each column has its own branch, so that Bloom filters work: with OR, DuckDB reads every row of every column.
SELECT DISTINCT filename, started_unix_ns
FROM (
    SELECT filename, started_unix_ns FROM requests WHERE list_contains($ids, client_request_id)
    UNION ALL
    SELECT filename, started_unix_ns FROM requests WHERE list_contains($ids, stored_request_key)
    UNION ALL
    SELECT filename, started_unix_ns FROM requests WHERE stored_response_id = $id
    UNION ALL
    SELECT filename, started_unix_ns FROM requests WHERE request_id = $span_id
    UNION ALL
    SELECT filename, started_unix_ns FROM requests WHERE trace_id = $trace_id
    UNION ALL
    SELECT filename, started_unix_ns FROM requests WHERE contains(lower(hex(other_trace_ids)), $hex)
)
ORDER BY started_unix_ns DESC
LIMIT $row_limit
