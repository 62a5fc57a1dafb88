-- The highest version of these requests, where it is above base_version.
SELECT trace_id, request_id, max(version) AS version
FROM later_rows
WHERE version > $base_version AND list_contains($request_ids, request_id)
GROUP BY trace_id, request_id
