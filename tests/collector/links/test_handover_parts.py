"""Case B15: the wire takes 29 of a handover's 197 ms.

The rest is dispatch, wait, and the work after the load.
"""

from __future__ import annotations

import json
from pathlib import Path

from builders.plugin import fetch, publish, times
from builders.records import EPOCH, MS, exchange, kv
from handrail.records import Role
from handrail_collector.explain.request.request_row import Fleet, explain_all
from handrail_collector.links.handoffs import hand_offs
from handrail_collector.links.throughput import figures
from handrail_collector.stitch.evidence import Item
from handrail_collector.stitch.stitcher import SECOND, Stitcher

CASE = json.loads((Path(__file__).parents[2] / "data/replay/join/B15_handover_parts.json").read_text())
EXPECTED = CASE["expected"]
READER = "cmpl-req-a-0-0000dddd"  # of plugin_parts.fetch
NOW = EPOCH + 10 * SECOND


def test_B15_the_parts_of_a_handover_and_no_network_of_168_ms() -> None:
    ended, dispatched, first = (round(CASE[name] * 1000) for name in ("prefill_end", "dispatch", "client_first"))
    begin, end = (round(at * 1000) for at in CASE["xfer"])
    edge = exchange(Role.EDGE, 0, 3000, ttft_ms=first)
    p = exchange(Role.PREFILL, 0, ended, parent=edge, kv_out=kv("cmpl-req-a-0-0000aaaa"))
    d = exchange(Role.DECODE, dispatched, 1900, parent=edge, ttft_ms=first - dispatched, kv_in=kv("cmpl-req-a-0-0000aaaa"))
    load = fetch(
        dispatched,
        parent=d,
        started_ms=begin - dispatched,
        posted_ms=begin - dispatched,
        done_ms=end - dispatched,
        noticed_ms=end - dispatched + 20,
    )
    records: list[Item] = [
        edge,
        p,
        d,
        times(Role.PREFILL, 1, 2, ended - 2, ended - 1, parent=p),
        publish(ended, parent=p),
        times(
            Role.DECODE, dispatched, end - dispatched + 40, first - dispatched - 2, 1800, rid="cmpl-req-a-0-0000dddd", parent=d
        ),
        load,
    ]
    stitcher = Stitcher()
    for offset, record in enumerate(records):
        stitcher.add(record, offset, NOW)
    fleet = Fleet(frozenset({(Role.PREFILL, "plugin"), (Role.DECODE, "plugin")}))
    explaineds = [explain_all(decision.group, fleet) for decision in stitcher.sweep(NOW + 3600 * SECOND)]
    row, fetches = next((each.row, each.fetches) for each in explaineds if each.row is not None)
    took: dict[str, float] = {}
    for phase in row.phases:
        took[phase.phase] = took.get(phase.phase, 0) + phase.duration_ns / MS
    after = ("kv_notice", "decode_queue", "first_step", "decode_respond")
    assert round(took["router_and_hops"]) == EXPECTED["dispatch_ms"]
    assert round(took["decode_admission"] + took["kv_wait"] + took["kv_handshake"]) == EXPECTED["wait_ms"]
    assert round(took["kv_transfer"]) == EXPECTED["wire_ms"]
    assert round(sum(took[name] for name in after)) == EXPECTED["after_load_ms"]
    assert sum(EXPECTED.values()) == first - ended
    # the link's rate rests on the wire time alone
    found = figures(hand_offs(fetches))
    assert found.busy_ns == EXPECTED["wire_ms"] * MS
    assert found.whole is not None
    assert found.whole.p50_ns == (end - dispatched + 20) * MS
