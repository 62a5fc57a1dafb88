-- Number of values of each measure by scope, and the values at these ranks: exact, nearest rank. NULL where there is no value.
SELECT
    scope,
    count(CASE WHEN phase_of = 'ttft' THEN ttft_token_ns END) AS ttft_counted,
    quantile_disc(CASE WHEN phase_of = 'ttft' THEN ttft_token_ns END, $ranks) AS ttft_values,
    count(gap_max_ns) AS gap_counted,
    quantile_disc(gap_max_ns, $ranks) AS gap_values
FROM requests
WHERE ($since_unix_ns IS NULL OR started_unix_ns >= $since_unix_ns)
    AND ($until_unix_ns IS NULL OR started_unix_ns < $until_unix_ns)
    AND ($scope IS NULL OR scope = $scope)
    AND ($model IS NULL OR model = $model)
GROUP BY scope
