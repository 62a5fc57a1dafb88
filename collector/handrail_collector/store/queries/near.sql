-- Ids that resemble id, the most similar first.
SELECT id
FROM (
    SELECT id, max(jaro_winkler_similarity(id, $id)) AS likeness
    FROM (SELECT unnest([client_request_id, response_id, lower(hex(trace_id)), lower(hex(request_id))]) AS id FROM requests)
    WHERE id IS NOT NULL
    GROUP BY id
)
WHERE likeness > 0.7
ORDER BY likeness DESC, id
LIMIT $row_limit
