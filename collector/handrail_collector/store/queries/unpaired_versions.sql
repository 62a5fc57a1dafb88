-- Requests of later_rows with an earlier version that later_rows lacks: few or none. base_version: the lowest version of the store.
SELECT trace_id, request_id, max(version) AS version
FROM later_rows
GROUP BY trace_id, request_id
HAVING max(version) - $base_version + 1 > count(DISTINCT version)
