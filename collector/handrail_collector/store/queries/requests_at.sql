-- Requests that began at one of these times, latest first.
SELECT *
FROM requests
WHERE list_contains($times_unix_ns, started_unix_ns)
ORDER BY started_unix_ns DESC, trace_id, request_id
