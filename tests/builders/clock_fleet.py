"""A virtual fleet whose hosts' clocks are seconds apart and drift.

Tests compare what Handrail knows of the clocks during the run with the true offsets.
"""

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
    """A run that is over.

    ``plugin``: the engines have the plugin; only it sees D's messages to P.
    """

    scenario: Scenario
    seed: int
    plugin: bool
    flights: Sequence[Flight]
    faults: tuple[Fault, ...]
    shows: dict[str, HostClock]  # by host

    def offset(self, a: str, b: str, at_unix_ns: int) -> tuple[int, int]:
        """Return the true time when the clock of ``a`` shows ``at_unix_ns``; the offset.

        The offset is how much more the clock of ``b`` shows than that of ``a`` at that time.
        """
        here = self.shows[a]
        true_ns = round((at_unix_ns - here.unix_ns(0)) / (1 + here.drift_ppm / 1e6))
        return true_ns, self.shows[b].unix_ns(true_ns) - at_unix_ns


APART_S, DRIFT_PPM = 2.0, 50.0


def fly(scenario: Scenario, seed: int, requests: int, *, plugin: bool, faults: tuple[Fault, ...] = ()) -> Fleet:
    """Run a scenario with wrong clocks.

    Every clock is off by up to ``APART_S`` and drifts by up to ``DRIFT_PPM``; one host is at each end of both ranges.
    """
    random, hosts = Random(seed), scenario.hosts().of(FaultPlace.HOST)

    def spread(most: float) -> list[float]:
        return random.sample([-most, most, *(random.uniform(-most, most) for _ in hosts[2:])], len(hosts))

    for host, offset, drift in zip(hosts, spread(APART_S), spread(DRIFT_PPM), strict=True):
        faults += (Fault("clock_offset", host, offset), Fault("clock_drift", host, drift))
    plans = plan_requests(VirtualRunSettings(scenario=scenario, requests=requests, seed=seed))
    flights = Simulation(scenario, plans, seed, faults).run()
    return Fleet(scenario, seed, plugin, flights, faults, clocks(scenario, faults))


def known_offsets(fleet: Fleet) -> Iterator[tuple[int, HostClocks]]:
    """Yield the known clock offsets second by second, with the true time.

    Yields once more when everything that was still open is decided.
    """
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
    """Return whether the interval holds the true offset.

    Allows 2 ns, because two stamps are rounded to a nanosecond.
    """
    _, true = fleet.offset(*pair, interval.at_unix_ns)
    low, high = interval.low_ns, interval.high_ns
    return (low is None or low - 2 <= true) and (high is None or true <= high + 2)


def one_way(fleet: Fleet, until_ns: int) -> dict[Pair, int]:
    """Return the smallest true travel time of a message between each two hosts.

    Counts messages whose two ends are both reported. Includes paths over other hosts.
    """
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
    """The width of a pair's clock bound, with its quickest messages' travel times.

    Times are in ns, each way.
    """

    at_ns: int
    pair: Pair
    width_ns: int
    there_ns: int
    back_ns: int

    @property
    def of_both(self) -> float:
        """Ratio of the width to the travel times of both ways together.

        Below 1 the bound could not always hold the true offset.
        """
        return self.width_ns / (self.there_ns + self.back_ns)

    @property
    def of_twice(self) -> float:
        """Ratio of the width to twice the travel time of the slower way."""
        return self.width_ns / 2 / max(self.there_ns, self.back_ns)


def widths(fleet: Fleet, from_ns: int, every_ns: int = 5 * SECOND) -> list[Width]:
    """Return the width of every pair's bound at intervals from ``from_ns`` on.

    Asserts that each bound always holds the true offset.
    Routers without spans report no times, so no pair includes one.
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
