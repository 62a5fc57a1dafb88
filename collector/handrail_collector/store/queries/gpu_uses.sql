-- How busy each GPU was in a period, as each sidecar sampled it.
-- rated: samples that have both shares. busy: those in which the GPU was not idle. tensor, dram: means over the busy samples.
WITH shares AS (
    SELECT
        role, instance, host, device, engine, product,
        "g.d.tensor_active_ratio" AS tensor,
        "g.d.dram_active_ratio" AS dram,
        greatest("g.d.tensor_active_ratio", "g.d.dram_active_ratio", coalesce("g.d.sm_active_ratio", 0)) AS most
    FROM gpu_samples
    WHERE at_unix_ns >= $since_unix_ns AND at_unix_ns < $until_unix_ns
)
SELECT
    role, instance, host, device, engine, product,
    count(*) AS samples,
    count(*) FILTER (WHERE tensor IS NOT NULL AND dram IS NOT NULL) AS rated,
    count(*) FILTER (WHERE tensor IS NOT NULL AND dram IS NOT NULL AND most >= $idle) AS busy,
    avg(tensor) FILTER (WHERE tensor IS NOT NULL AND dram IS NOT NULL AND most >= $idle) AS tensor,
    avg(dram) FILTER (WHERE tensor IS NOT NULL AND dram IS NOT NULL AND most >= $idle) AS dram
FROM shares
GROUP BY role, instance, host, device, engine, product
ORDER BY role, instance, host, device, engine, product
