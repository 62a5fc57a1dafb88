-- The KV fetches of one request, in order.
SELECT *
FROM kv_fetches
WHERE trace_id = $trace_id AND request_id = $request_id
ORDER BY "number"
