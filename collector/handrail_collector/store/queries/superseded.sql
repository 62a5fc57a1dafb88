-- Rows of request_rows that a higher version in later_rows replaces or withdraws. base_version: the lowest version of the store.
SELECT DISTINCT request_rows.filename, request_rows.trace_id, request_rows.request_id, request_rows.version
FROM request_rows
JOIN (
    SELECT trace_id, request_id, max(version) AS version FROM later_rows WHERE version > $base_version GROUP BY trace_id, request_id
) AS later ON request_rows.request_id = later.request_id AND request_rows.trace_id = later.trace_id
WHERE request_rows.version < later.version
