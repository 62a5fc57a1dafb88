-- Every model that the requests of a period name.
SELECT DISTINCT model
FROM requests
WHERE model IS NOT NULL
    AND started_unix_ns >= $since_unix_ns
    AND started_unix_ns < $until_unix_ns
    AND ($scope IS NULL OR scope = $scope)
ORDER BY model
