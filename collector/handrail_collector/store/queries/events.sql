-- Rows of an append-only table (process_events, findings, clock_pairs, iterations, link_facts) in a period, latest first.
SELECT *
FROM events
WHERE at_unix_ns >= $since_unix_ns AND at_unix_ns < $until_unix_ns
ORDER BY at_unix_ns DESC
LIMIT $row_limit
