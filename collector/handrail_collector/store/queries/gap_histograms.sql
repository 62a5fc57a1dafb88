-- The gaps of all streams by scope and model, as histograms: of rows in requests, and of whole hours in rollups.
-- Bucket n holds gaps within 1 %; docs/http-api.md gives its time.
WITH streams AS (
    SELECT scope, model, gap_sum_ns, gap_min_ns, gap_max_ns, gap_buckets, gap_counts
    FROM requests
    WHERE array_length(gap_buckets) > 0
        AND ($since_unix_ns IS NULL OR started_unix_ns >= $since_unix_ns)
        AND ($until_unix_ns IS NULL OR started_unix_ns < $until_unix_ns)
        AND ($scope IS NULL OR scope = $scope)
        AND ($model IS NULL OR model = $model)
    UNION ALL
    SELECT scope, model, gap_sum_ns, gap_min_ns, gap_max_ns, gap_buckets, gap_counts
    FROM rollups
    WHERE measure = 'gaps' AND array_length(gap_buckets) > 0 AND ($scope IS NULL OR scope = $scope) AND ($model IS NULL OR model = $model)
),
buckets AS (
    SELECT scope, model, bucket, sum(gaps) AS gaps
    FROM (SELECT scope, model, unnest(gap_buckets) AS bucket, unnest(gap_counts) AS gaps FROM streams)
    GROUP BY scope, model, bucket
),
merged AS (
    SELECT scope, model, sum(gaps) AS gaps, list(bucket ORDER BY bucket) AS gap_buckets, list(gaps ORDER BY bucket) AS gap_counts
    FROM buckets
    GROUP BY scope, model
),
times AS (
    SELECT scope, model, least(sum(gap_sum_ns), 9223372036854775807) AS gap_sum_ns, min(gap_min_ns) AS gap_min_ns, max(gap_max_ns) AS gap_max_ns
    FROM streams
    GROUP BY scope, model
)
SELECT
    merged.scope, merged.model, merged.gaps, times.gap_sum_ns, times.gap_min_ns, times.gap_max_ns, merged.gap_buckets, merged.gap_counts
FROM merged
JOIN times ON merged.scope = times.scope AND merged.model IS NOT DISTINCT FROM times.model
