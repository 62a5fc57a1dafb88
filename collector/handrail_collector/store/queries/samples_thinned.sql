-- Samples of devices in a period, one for each device and part of every_ns: means of gauges (g.) and last values of counters (c.).
SELECT
    max(at_unix_ns) AS at_unix_ns,
    max(took_ns) AS took_ns,
    (at_unix_ns - $since_unix_ns) // $every_ns AS part,
    COLUMNS(lambda name: name NOT IN ('at_unix_ns', 'took_ns', 'more') AND name[1:2] NOT IN ('c.', 'g.')),
    max(COLUMNS(lambda name: name[1:2] = 'c.')) AS "\0",
    avg(COLUMNS(lambda name: name[1:2] = 'g.')) AS "\0"
FROM samples
WHERE at_unix_ns >= $since_unix_ns
    AND at_unix_ns < $until_unix_ns
    AND ($hosts IS NULL OR list_contains($hosts, host) OR list_contains($hosts, host_name))
GROUP BY ALL
