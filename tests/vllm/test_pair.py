"""The test bed itself: KV blocks really move from P to D.

So the other tests observe a real hand-off.
"""

from __future__ import annotations

import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from vllm.client import prompt
from vllm.pair import MODEL_NAME
from vllm.proxy import REMOTE_DECODE
from vllm.stack import Bed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

BLOCK_TOKENS = 32


def complete(url: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": text, "temperature": 0, "ignore_eos": True, "max_tokens": 12, **fields}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def hand_off(bed: Bed, text: str) -> dict[str, Any]:
    """Return what P gives D to read the blocks of ``text``."""
    answer = complete(bed.pair.prefill.url, text, max_tokens=1, kv_transfer_params=REMOTE_DECODE)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def pair_rows(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


@pytest.mark.parametrize("seed", range(3))
def test_decode_answers_from_the_blocks_that_it_read(seed: int, bed: Bed) -> None:
    source = random.Random(f"pair:{seed}")
    mine, other = (prompt(source, words=(100, 100)) for _ in range(2))
    alone = pair_rows(complete(bed.pair.prefill.url, mine))
    assert pair_rows(complete(bed.pair.decode.url, mine, kv_transfer_params=hand_off(bed, mine))) == alone
    # the same prompt with the blocks of another: an engine that ignores them gives the same answer
    query = f"{mine} {seed}"
    wrong = hand_off(bed, other)
    needed = -(-complete(bed.pair.prefill.url, query, max_tokens=1)["usage"]["prompt_tokens"] // BLOCK_TOKENS)
    blocks = wrong["remote_block_ids"][0]
    wrong["remote_block_ids"] = [(blocks * needed)[: max(needed, len(blocks))]]  # too few would end the engine
    assert pair_rows(complete(bed.pair.decode.url, query, kv_transfer_params=wrong)) != pair_rows(
        complete(bed.pair.prefill.url, query)
    )


def test_everything_listens_on_loopback_only(bed: Bed) -> None:
    """No part of the test bed can be reached from outside the machine."""
    found = listening(session_processes(bed.pair.prefill.child.pid) | session_processes(bed.pair.decode.child.pid))
    assert found, "no listening socket found: the test looks in the wrong place"
    outside = {address for address in found if address != "0100007F"}
    assert not outside, f"sockets that listen on {outside}"


def session_processes(leader: int) -> set[int]:
    """Return all processes of the session that a child leads."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if session == leader:
            found.add(int(stat.parent.name))
    return found


def listening(pids: set[int]) -> set[str]:
    """Return the local addresses on which sockets of these processes listen.

    IPv4 and IPv6, as in /proc/net/tcp.
    """
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(descriptor.readlink())
            except FileNotFoundError:
                continue
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found
