"""More streams than a sidecar's soft limit of descriptors, in real processes.

The hard limit has room in one test and none in the other.
"""

from __future__ import annotations

import re
import resource

from faults.streams import many_streams
from harness.skips import needs_ability

COUNT, SOFT = 700, 1024

needs_descriptors = needs_ability(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 2048, "2,048 descriptors, which the clients need too (ulimit -Hn)"
)


@needs_descriptors
async def test_streams_beyond_the_soft_limit_are_whole_where_the_hard_one_allows_them() -> None:
    hard = 2048
    got = await many_streams(COUNT, SOFT, hard)
    assert (got["whole"], got["refused"], got["others"]) == (COUNT, 0, {})
    assert got["limit"] == f"descriptors {hard} (raised from {SOFT})"
    assert (got["open"], got["counted"], got["logged"], got["later"]) == (COUNT, 0, [], True)
    assert (got["status"], got["tracebacks"]) == (0, 0)


@needs_descriptors
async def test_streams_beyond_the_hard_limit_get_503_and_those_taken_are_whole() -> None:
    got = await many_streams(COUNT, SOFT, SOFT)
    assert got["others"] == {}
    assert got["whole"] + got["refused"] == COUNT
    assert got["whole"] > 350
    assert got["counted"] == got["refused"] > 0
    assert got["open"] == got["whole"]
    assert len(got["logged"]) == 1, "logged once until there is room again"
    assert re.search(r"proxy refuses streams with 503: no more streams fit", got["logged"][0])
    status, text = got["ready_during"]
    assert status == 503
    assert re.search(rf"{got['whole']} of \d+ streams are open", text)
    assert got["ready_after"] == [200, "ok"]
    assert got["later"]
    assert (got["status"], got["tracebacks"]) == (0, 0)
