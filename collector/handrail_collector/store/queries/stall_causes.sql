-- Stalls of a period by scope, cause and host: how many, in how many streams and events, and how many are among the longest gaps.
-- An event is a time in which streams of one host stall for one cause, however many they are (case B12).
-- every_ns: median time from one event to the next. longest: at least as long as the threshold of slow gaps of their scope.
WITH began AS (
    SELECT
        stalls.scope, cause, coalesce(host, instance, '') AS host, trace_id, request_id,
        started_unix_ns AS begin_ns, gap_ns, lift, gap_ns >= slow_from_ns AS is_longest
    FROM stalls
    LEFT JOIN (SELECT scope, slow_from_ns FROM thresholds WHERE measure = 'gap') AS cuts ON cuts.scope = stalls.scope
    WHERE started_unix_ns >= $since_unix_ns
        AND started_unix_ns < $until_unix_ns
        AND ($scope IS NULL OR stalls.scope = $scope)
        AND ($model IS NULL OR model = $model)
),
events AS (
    SELECT
        *,
        begin_ns > coalesce(
            max(begin_ns + gap_ns) OVER (
                PARTITION BY scope, cause, host ORDER BY begin_ns, gap_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ),
            -1
        ) AS is_first
    FROM began
),
apart AS (
    SELECT
        *,
        CASE
            WHEN is_first
                THEN begin_ns - lag(CASE WHEN is_first THEN begin_ns END IGNORE NULLS) OVER (
                    PARTITION BY scope, cause, host ORDER BY begin_ns, gap_ns
                )
        END AS since_ns
    FROM events
)
SELECT
    scope, cause, host,
    count(*) AS stalls,
    count(DISTINCT (trace_id, request_id)) AS streams,
    count(*) FILTER (WHERE is_first) AS events,
    CAST(median(since_ns) AS BIGINT) AS every_ns,
    CAST(sum(gap_ns) AS BIGINT) AS gap_sum_ns,
    max(gap_ns) AS gap_max_ns,
    count(*) FILTER (WHERE is_longest) AS longest,
    median(lift) AS lift
FROM apart
GROUP BY scope, cause, host
ORDER BY scope, stalls DESC, cause, host
