"""Thousands of connections that say nothing, half of them over TLS, beside good senders: a collector's process bears them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from faults.silence import beside_silence

COUNT = 5000
OWN = 200  # descriptors that the flood's process needs beside


@pytest.mark.timeout(600)
@pytest.mark.parametrize("descriptors", [None, 1024], ids=["the limit of this machine", "1024 descriptors"])
async def test_good_senders_lose_nothing(descriptors: int | None, tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = COUNT if hard == resource.RLIM_INFINITY else min(COUNT, hard - OWN)
    seen = await beside_silence(tmp_path, 3.0, count=count, descriptors=descriptors, refusals=100)
    assert seen["alive"], seen["log"]
    assert seen["exit_status"] == 0
    assert seen["lost_spans"] == 0
    assert all(sender["batches"] > 0 for sender in seen["senders"].values())
    # a line for each listener and reason, however many are refused
    assert [line for line in seen["log"] if "refuses connections" not in line and "accepts no connections" not in line] == []
    assert len(seen["log"]) <= 6
