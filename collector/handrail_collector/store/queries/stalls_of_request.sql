-- The stalls of one request, in order.
SELECT *
FROM stalls
WHERE trace_id = $trace_id AND request_id = $request_id
ORDER BY "number"
