-- KV fetches that match a filter. A parameter that is NULL matches every fetch.
-- failures: the outcomes that count as failures. failed: whether the outcome is one of them.
-- peer: host:port of either engine, a host, or the address of the side channel.
SELECT *
FROM kv_fetches
WHERE ($since_unix_ns IS NULL OR started_unix_ns >= $since_unix_ns)
    AND ($until_unix_ns IS NULL OR started_unix_ns < $until_unix_ns)
    AND ($outcome IS NULL OR outcome = $outcome)
    AND ($failed IS NULL OR list_contains($failures, outcome) = $failed)
    AND ($open IS NULL OR "open" = $open)
    AND ($direction IS NULL OR direction = $direction)
    AND ($peer IS NULL OR $peer IN (consumer_instance, producer_instance, consumer_host, producer_host, producer_address))
