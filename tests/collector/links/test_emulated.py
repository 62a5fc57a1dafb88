"""The articles' emulated pairs, from their evidence to link findings.

The evidence comes from hosts, engines and UCX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from handrail.device_counters import link as names
from handrail_collector.explain.request.request_row import Fleet, explain_all
from handrail_collector.links.devices import counted
from handrail_collector.links.findings import LinkFindingKind
from handrail_collector.links.handoffs import hand_offs
from handrail_collector.links.report import LinkLine, link_lines
from handrail_collector.links.summary import of_period, sentence
from handrail_collector.links.transport import Transport
from handrail_collector.rows import FetchRow
from handrail_collector.stitch.stitcher import SECOND, Stitcher
from handrail_sim.emulator import faults, scenario, virtual_run
from handrail_sim.emulator.simulate import Flight
from handrail_sim.virtual.links import link_evidence
from handrail_sim.virtual.observers import arrivals

STARTED = 1_700_000_000 * SECOND
SEED = 11


@dataclass(frozen=True)
class Emulated:
    """A run: what truly happened, and the findings about its links."""

    flights: list[Flight]
    lines: list[LinkLine]
    ttft_p50_ns: int


@cache
def emulated(name: str, requests: int = 200, *fault: str) -> Emulated:
    chosen = scenario.load(name)
    given = tuple(faults.parse(text, chosen.hosts()) for text in fault)
    settings = virtual_run.VirtualRunSettings(scenario=chosen, requests=requests, seed=SEED, faults=given)
    flights = virtual_run.fly(settings)
    made = arrivals(chosen, flights, given, seed=SEED, started_unix_ns=STARTED, plugin=True)
    stitcher, fetches, ttfts = Stitcher(), dict[tuple[str, str], tuple[FetchRow, ...]](), []
    for offset, one in enumerate(made):
        stitcher.add(one.record, offset, one.received_unix_ns)
    last = made[-1].received_unix_ns
    for decision in stitcher.sweep(last + 30 * 60 * SECOND):
        explained = explain_all(decision.group, Fleet(frozenset(), clocks=stitcher.clocks))
        if explained.row is not None:
            fetches[explained.row.trace_id, explained.row.request_id] = explained.fetches
            ttfts.append(explained.row.ttft_token_ns or 0)
    of_devices, rows = link_evidence(chosen, flights, given, SEED, STARTED)
    samples = [sample for run in of_devices for sample in run.samples()]
    offsets = {pair: (i.low_ns, i.high_ns) for pair, i in stitcher.clocks.intervals().items()}
    handed = hand_offs(row for of in fetches.values() for row in of)
    return Emulated(flights, link_lines(handed, counted(samples), rows, offsets), sorted(ttfts)[len(ttfts) // 2])


def kinds(line: LinkLine) -> set[LinkFindingKind]:
    return {finding.kind for finding in line.findings}


def busy_s(flights: list[Flight]) -> float:
    """Return the true time during which bytes were on the wire, in s."""
    intervals = sorted((f.contact_ns, f.loaded_ns) for f in flights if f.contact_ns is not None and f.loaded_ns is not None)
    covered, until = 0, 0
    for begin, end in intervals:
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered / 1e9


def test_L40S_the_link_is_named_slow_with_its_rate_and_what_it_goes_over() -> None:
    run = emulated("l40s-split")
    (line,) = run.lines
    assert (line.figures.link.producer, line.figures.link.consumer) == ("p0:8000", "d0:8000")
    assert line.figures.hand_offs == len(run.flights)
    truth = sum(flight.kv_bytes for flight in run.flights) / busy_s(run.flights)
    assert line.figures.rate == pytest.approx(truth, rel=0.01)
    assert line.figures.rate == pytest.approx(0.3614e9, rel=0.02)
    assert line.transport.transport is Transport.TCP
    assert line.share_of_line == pytest.approx(0.3614e9 / 3.125e9, rel=0.02)
    assert {LinkFindingKind.TCP, LinkFindingKind.SLOW_PATH, LinkFindingKind.NO_PEER_TO_PEER} <= kinds(line)
    (output,) = of_period(run.lines, run.ttft_p50_ns)
    assert output.startswith("The link p0:8000>d0:8000 is slow: KV moves at 0.36 GB/s while transferring (1.")
    assert "over TCP (eth0: 12 % of its line rate of 3.12 GB/s)" in output
    assert "of the median time to first token" in output


def test_H100_over_RDMA_nothing_is_wrong_and_it_runs_at_its_line_rate() -> None:
    run = emulated("h100-70b-split")
    assert len(run.lines) == 2
    for line in run.lines:
        assert (line.transport.transport, line.findings) == (Transport.RDMA, ())
        assert line.share_of_line == pytest.approx(1.0, abs=0.05)
        assert "mlx5_0/1" in sentence(line)
    assert not [output for output in of_period(run.lines, run.ttft_p50_ns) if "slow" in output]


def test_a_path_that_falls_back_to_TCP_is_distinguished_from_one_that_does_not() -> None:
    """One of four links loses its peer-to-peer path.

    P's RDMA port is up, and the bytes move on eth0 instead.
    """
    run = emulated("split", 1500, "no_p2p:p0>d1:0.36e9")
    by_link = {line.figures.link.hosts: line for line in run.lines}
    slow = by_link["p0>d1"]
    assert slow.slow
    assert LinkFindingKind.SLOW_PATH in kinds(slow)
    assert [link for link, line in by_link.items() if line.slow] == ["p0>d1"]


def test_what_the_hosts_count_is_what_was_moved() -> None:
    run = emulated("l40s-split")
    of_devices, _ = link_evidence(scenario.load("l40s-split"), run.flights, (), SEED, STARTED)
    (nic,) = (each for each in of_devices if each.process.host == "d0")
    (received,) = (each.values for each in nic.series if (each.name, each.label) == (names.BYTES, names.RECEIVE))
    counts = [count for count in received if count is not None]
    assert len(counts) == len(nic.at)
    assert counts == sorted(counts)
    assert counts[-1] == pytest.approx(1.04 * sum(flight.kv_bytes for flight in run.flights), rel=0.001)
