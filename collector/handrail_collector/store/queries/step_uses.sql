-- Steps of engines in a period by role, and the tokens scheduled in them. Rows with full detail are left out: others sum them up.
SELECT role, CAST(sum(steps) AS BIGINT) AS steps, CAST(sum(prefill_tokens + decode_tokens) AS BIGINT) AS tokens
FROM iterations
WHERE at_unix_ns >= $since_unix_ns AND at_unix_ns < $until_unix_ns AND NOT "full"
GROUP BY role
ORDER BY role
