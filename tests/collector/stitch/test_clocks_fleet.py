"""The bounds of clocks in a virtual fleet whose hosts are seconds apart and drift: by the evidence that sidecars really have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from random import Random

from handrail.cli.simulated import arrivals
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.stitcher import SECOND, Stitcher
from handrail_fleet import scenario as scenarios
from handrail_fleet.faults import Fault, Place
from handrail_fleet.observe import STARTED_UNIX_NS, Clock, clocks
from handrail_fleet.scenario import Scenario
from handrail_fleet.simulate import Flight, Simulation
from handrail_fleet.truth import Fetch
from handrail_fleet.virtual import Settings, asked

US = 1_000
SPLIT = scenarios.load("split")
APART_S, DRIFT_PPM = 2.0, 50.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A run over. ``plugin``: the engines have one."""

    scenario: Scenario
    seed: int
    plugin: bool
    flights: Sequence[Flight]
    faults: tuple[Fault, ...]

    @property
    def shows(self) -> dict[str, Clock]:
        return clocks(self.scenario, self.faults)


def fly(scenario: Scenario, seed: int, requests: int, *, plugin: bool) -> Fleet:
    """Every host's clock two seconds off or less, and up to 50 ppm fast or slow: one host at each end."""
    random = Random(seed)
    hosts = scenario.hosts().of(Place.HOST)
    offsets = random.sample([-APART_S, APART_S, *(random.uniform(-APART_S, APART_S) for _ in hosts[2:])], len(hosts))
    drifts = random.sample([-DRIFT_PPM, DRIFT_PPM, *(random.uniform(-DRIFT_PPM, DRIFT_PPM) for _ in hosts[2:])], len(hosts))
    faults = tuple(
        fault
        for host, offset, drift in zip(hosts, offsets, drifts, strict=True)
        for fault in (Fault("clock_offset", host, offset), Fault("clock_drift", host, drift))
    )
    plans = asked(Settings(scenario=scenario, requests=requests, seed=seed))
    return Fleet(scenario, seed, plugin, Simulation(scenario, plans, seed, faults).run(), faults)


def told(fleet: Fleet) -> Iterator[tuple[int, HostClocks]]:
    """What is known second by second, with the true time."""
    stitcher, now = Stitcher(), 0
    made = arrivals(
        fleet.scenario, fleet.flights, fleet.faults, seed=fleet.seed, started_unix_ns=STARTED_UNIX_NS, plugin=fleet.plugin
    )
    for offset, one in enumerate(made):
        while now + SECOND <= one.received_unix_ns - STARTED_UNIX_NS:
            now += SECOND
            stitcher.sweep(STARTED_UNIX_NS + now)
            yield now, stitcher.clocks
        stitcher.add(one.record, offset, one.received_unix_ns)
    for _ in range(20):
        now += SECOND
        stitcher.sweep(STARTED_UNIX_NS + now)
    yield now, stitcher.clocks


def one_way(fleet: Fleet, until_ns: int) -> dict[tuple[str, str], int]:
    """The smallest true time of a message from one host to another of which both ends are in what is said; over others too."""
    least: dict[tuple[str, str], int] = {}

    def message(a: str, b: str, sent: int | None, came: int | None) -> None:
        if sent is not None and came is not None and came <= until_ns:
            least[a, b] = min(least.get((a, b), came - sent), came - sent)

    for flight in fleet.flights:
        p, d = flight.plan.prefill_host, flight.plan.decode_host
        message("edge", p, flight.plan.arrival.at_ns, flight.prefill_arrival_ns)
        message(p, d, flight.prefill_done_ns, flight.decode_arrival_ns)
        message(d, "edge", flight.sent_ns, flight.edge_first_ns)
        message(d, "edge", flight.engine_end_ns, flight.end_ns)
        if fleet.plugin and flight.fetch is Fetch.OK:
            message(d, p, flight.loaded_ns, flight.heard_ns)
    hosts = sorted({host for pair in least for host in pair})
    for via in hosts:
        for a, b in permutations(hosts, 2):
            if (a, via) in least and (via, b) in least:
                least[a, b] = min(least.get((a, b), 1 << 62), least[a, via] + least[via, b])
    return least

def test_x() -> None:
    for name, scenario in {
        "plain": SPLIT, "spread": replace(SPLIT, hop_spread_ns=300*US), "wide": replace(SPLIT, hop_ns=100*US, hop_spread_ns=2000*US),
        "far": replace(SPLIT, hop_ns=20_000*US, hop_spread_ns=500*US), "traced": replace(SPLIT,router_traces=True),
    }.items():
      for plugin in (False, True):
        fleet = fly(scenario, 1, 800, plugin=plugin)
        shows = fleet.shows
        worst = {}
        for now, known in told(fleet):
            if now % (10*SECOND) and now<205*SECOND: continue
            least = one_way(fleet, now)
            for (a,b), i in known.intervals().items():
                c = shows[a]
                now = round((i.at_unix_ns-c.started_unix_ns-c.offset_ns)/(1+c.drift_ppm/1e6))
                true = shows[b].unix_ns(now) - i.at_unix_ns
                assert i.low_ns is None or i.low_ns <= true+2, (a, b, now, i, true)
                assert i.high_ns is None or i.high_ns >= true-2, (a, b, now, i, true)
                if least and i.width_ns is not None and (a,b) in least and (b,a) in least and a<b:
                    worst.setdefault((a,b),[]).append((round(i.width_ns/(least[a,b]+least[b,a]),3), round(i.width_ns/2/max(least[a,b],least[b,a]),3), least[a,b]//1000, least[b,a]//1000))
        print(name, plugin, now//SECOND)
        for k,v in worst.items(): print('   ',k,v[0],v[len(v)//3],v[-1],'worst of second half', max(x[0] for x in v[len(v)//2:]), max(x[1] for x in v[len(v)//2:]))
