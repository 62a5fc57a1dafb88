"""A virtual fleet whose hosts are seconds apart and drift, what is known of their clocks meanwhile, and what is true of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random

from handrail.clock_offset import OffsetInterval
from handrail_collector.stitch.clocks import HostClocks
from handrail_collector.stitch.stitcher import SECOND, Stitcher
from handrail_sim.emulator.faults import Fault, FaultPlace
from handrail_sim.emulator.observe import STARTED_UNIX_NS, HostClock, clocks
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight, Simulation
from handrail_sim.emulator.truth import FetchTruth
from handrail_sim.emulator.virtual_run import VirtualRunSettings, plan_requests
from handrail_sim.virtual.observers import arrivals

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Fleet:
    """A run that is over. ``plugin``: the engines have one, which alone sees what D tells P."""

    scenario: Scenario
    seed: int
    plugin: bool
    flights: Sequence[Flight]
    faults: tuple[Fault, ...]
    shows: dict[str, HostClock]  # by host

    def offset(self, a: str, b: str, at_unix_ns: int) -> tuple[int, int]:
        """The true time at which the clock of ``a`` shows ``at_unix_ns``, and what that of ``b`` shows more then."""
        here = self.shows[a]
        true_ns = round((at_unix_ns - here.unix_ns(0)) / (1 + here.drift_ppm / 1e6))
        return true_ns, self.shows[b].unix_ns(true_ns) - at_unix_ns


APART_S, DRIFT_PPM = 2.0, 50.0


def fly(scenario: Scenario, seed: int, requests: int, *, plugin: bool, faults: tuple[Fault, ...] = ()) -> Fleet:
    """Every clock off by up to ``APART_S``, and ``DRIFT_PPM`` fast or slow or less: one host at each end of both."""
    random, hosts = Random(seed), scenario.hosts().of(FaultPlace.HOST)

    def spread(most: float) -> list[float]:
        return random.sample([-most, most, *(random.uniform(-most, most) for _ in hosts[2:])], len(hosts))

    for host, offset, drift in zip(hosts, spread(APART_S), spread(DRIFT_PPM), strict=True):
        faults += (Fault("clock_offset", host, offset), Fault("clock_drift", host, drift))
    plans = plan_requests(VirtualRunSettings(scenario=scenario, requests=requests, seed=seed))
    flights = Simulation(scenario, plans, seed, faults).run()
    return Fleet(scenario, seed, plugin, flights, faults, clocks(scenario, faults))


def known_offsets(fleet: Fleet) -> Iterator[tuple[int, HostClocks]]:
    """What is known second by second, with the true time; once more when everything that was still open is decided."""
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


def right(fleet: Fleet, pair: Pair, interval: OffsetInterval) -> bool:
    """Whether the truth lies within; two stamps are rounded to a nanosecond."""
    _, true = fleet.offset(*pair, interval.at_unix_ns)
    low, high = interval.low_ns, interval.high_ns
    return (low is None or low - 2 <= true) and (high is None or true <= high + 2)


def one_way(fleet: Fleet, until_ns: int) -> dict[Pair, int]:
    """The smallest true time of a message from one host to another whose two ends somebody has told of; over others too."""
    least: dict[Pair, int] = {}

    def message(a: str, b: str, sent: int | None, came: int | None) -> None:
        if sent is not None and came is not None and came <= until_ns:
            least[a, b] = min(least.get((a, b), came - sent), came - sent)

    for flight in fleet.flights:
        p, d = flight.plan.prefill_host, flight.plan.decode_host
        message("edge", p, flight.plan.arrival.at_ns, flight.prefill_arrival_ns)
        message(p, d, flight.prefill_done_ns, flight.decode_arrival_ns)
        message(d, "edge", flight.sent_ns, flight.edge_first_ns)
        message(d, "edge", flight.engine_end_ns, flight.end_ns)
        if fleet.plugin and flight.fetch is FetchTruth.OK:
            message(d, p, flight.loaded_ns, flight.received_ns)
    hosts = sorted({host for pair in least for host in pair})
    for via in hosts:
        for a, b in permutations(hosts, 2):
            if (a, via) in least and (via, b) in least:
                least[a, b] = min(least.get((a, b), 1 << 62), least[a, via] + least[via, b])
    return least


@dataclass(frozen=True, slots=True)
class Width:
    """How wide the bounds of a pair are, beside what its quickest messages took each way."""

    at_ns: int
    pair: Pair
    width_ns: int
    there_ns: int
    back_ns: int

    @property
    def of_both(self) -> float:
        """To what both ways took together; below 1 the truth could not always be within."""
        return self.width_ns / (self.there_ns + self.back_ns)

    @property
    def of_twice(self) -> float:
        """To twice what the slower way took."""
        return self.width_ns / 2 / max(self.there_ns, self.back_ns)


def widths(fleet: Fleet, from_ns: int, every_ns: int = 5 * SECOND) -> list[Width]:
    """Of every pair, as it is told now and then from ``from_ns`` on; the truth is found within each, always.

    Routers without spans say nothing: no pair has one.
    """
    found = []
    for now, known in known_offsets(fleet):
        intervals = known.intervals()
        assert all(right(fleet, pair, interval) for pair, interval in intervals.items())
        if now < from_ns or now % every_ns:
            continue
        least = one_way(fleet, now)
        for (a, b), interval in intervals.items():
            if interval.width_ns is not None and (a, b) in least and (b, a) in least:
                found.append(Width(now, (a, b), interval.width_ns, least[a, b], least[b, a]))
    return found
