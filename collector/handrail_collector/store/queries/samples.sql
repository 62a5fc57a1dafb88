-- Samples of a table (gpu_samples, link_samples, engine_samples) in a period. hosts: ids or names; NULL: any.
SELECT *
FROM samples
WHERE at_unix_ns >= $since_unix_ns
    AND at_unix_ns < $until_unix_ns
    AND ($hosts IS NULL OR list_contains($hosts, host) OR list_contains($hosts, host_name))
