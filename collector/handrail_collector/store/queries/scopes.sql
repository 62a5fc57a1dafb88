-- Number of requests by scope, and when the first and the last began.
SELECT scope, count(*) AS requests, min(started_unix_ns) AS first_unix_ns, max(started_unix_ns) AS last_unix_ns
FROM requests
WHERE ($since_unix_ns IS NULL OR started_unix_ns >= $since_unix_ns)
    AND ($until_unix_ns IS NULL OR started_unix_ns < $until_unix_ns)
    AND ($scope IS NULL OR scope = $scope)
    AND ($model IS NULL OR model = $model)
GROUP BY scope
ORDER BY requests DESC, scope
