"""Time that nothing explains without the plugin is unattributed.

It lists the phases it may hide; none of them is claimed.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from handrail.phases import KV_AND_QUEUE, Phase
from vllm.configurations import CONFIGURATIONS
from vllm.figures import Figures
from vllm.run import Runs
from vllm.stack import Configuration

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

TITLE = "share of the time to first token, streams, no plugin"
KV_PHASES = {phase.value for phase in Phase if phase.value.startswith("kv_")}


@pytest.mark.parametrize("configuration", [pytest.param(each, id=each.id) for each in CONFIGURATIONS])
def test_without_the_plugin_the_hand_off_is_unattributed(configuration: Configuration, runs: Runs, figures: Figures) -> None:
    streams = [row for row in runs.of(configuration).rows if row.phase_of == "ttft"]
    assert streams
    total_ns = sum(row.ttft_token_ns or 0 for row in streams)
    spent_ns: dict[str, int] = defaultdict(int)
    for row in streams:
        for phase in row.phases:
            spent_ns[phase.phase] += phase.duration_ns
    shares = {name: spent / total_ns for name, spent in spent_ns.items()}
    rest = ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
    unattributed = shares.get(Phase.UNATTRIBUTED.value, 0.0)
    figures.add(TITLE, f"{configuration.id:42} unattributed {unattributed:.1%}; {rest}")
    assert not KV_PHASES & spent_ns.keys(), "a phase of the hand-off is claimed that nothing measured"
    left = [(row.client_request_id, p) for row in streams for p in row.phases if p.phase == Phase.UNATTRIBUTED.value]
    bare = [name for name, phase in left if not phase.may_be]
    assert not bare, f"unattributed time that does not say what it may hide: {bare[:3]}"
    hidden = {may for _, phase in left for may in phase.may_be}
    assert hidden >= {phase.value for phase in KV_AND_QUEUE}, "D's queue time holds the KV wait, and the row should say so"
