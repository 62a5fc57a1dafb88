-- Every span of these traces.
SELECT *
FROM spans
WHERE list_contains($trace_ids, trace_id)
ORDER BY start_unix_ns, span_id, "offset"
