"""The times in which a host runs slowly or not at all, and their effect on steps.

They are the same for every driver.
A hindrance comes once in each ``every_ns``, at a moment drawn for that turn, so that it is in step with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

from handrail_sim.emulator.faults import Active
from handrail_sim.emulator.noise import uniform

THROTTLED_EVERY_NS, THROTTLED_NS = 6_000_000_000, 400_000_000
PAUSED_EVERY_NS = 4_000_000_000
WATCH_NS = 100_000_000  # the interval at which a plugin thread wakes up (handrail.plugin.pauses)
LATE_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Hindrance:
    """A recurring time of slow or no work.

    ``share``: the share of its usual speed that a host has meanwhile; 0: it stands still.
    """

    seed: int
    share: float
    every_ns: int
    lasts_ns: int
    from_ns: int
    to_ns: int | None

    def times(self, begin_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
        """Yield the times that overlap this interval, in order."""
        turn = max(0, (begin_ns - self.from_ns) // self.every_ns - 1)
        while (start := self.from_ns + turn * self.every_ns) < end_ns:
            first = start + round(uniform(self.seed, turn) * max(0, self.every_ns - self.lasts_ns))
            last = first + self.lasts_ns
            if last > begin_ns and first < end_ns and (self.to_ns is None or first < self.to_ns):
                yield first, last
            turn += 1


def hindrances(host: str, faults: Active) -> dict[str, list[Hindrance]]:
    """Return a host's hindrances by the fault that makes them."""
    found: dict[str, list[Hindrance]] = {}
    for name, every_ns in (("gpu_throttled", THROTTLED_EVERY_NS), ("host_pause", PAUSED_EVERY_NS)):
        for fault in faults.named(name):
            if fault.place in ("*", host):
                stands = name == "host_pause"
                lasts_ns = round(fault.size * 1e9) if stands else THROTTLED_NS
                share = 0.0 if stands else 1 / fault.size
                seed = crc32(f"{name} {host}".encode())
                found.setdefault(name, []).append(Hindrance(seed, share, every_ns, lasts_ns, fault.from_ns, fault.to_ns))
    for fault in faults.named("engine_hung"):
        if fault.place in ("*", host):  # once, from its beginning on
            lasts_ns = round(fault.size * 1e9)
            found.setdefault(fault.name, []).append(Hindrance(0, 0.0, lasts_ns, lasts_ns, fault.from_ns, fault.from_ns + 1))
    return found


def late_wakes(by: Sequence[Hindrance], begin_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
    """Yield when a plugin thread's wake-ups were due and when they happened.

    Only those that were at least ``LATE_NS`` late and happened after ``begin_ns`` and by ``end_ns``.
    """
    for each in by:
        for first, last in each.times(begin_ns, end_ns + 1):
            due = -(-first // WATCH_NS) * WATCH_NS
            if begin_ns < last <= end_ns and last - due >= LATE_NS:
                yield due, last


def hindered_ns(begin_ns: int, work_ns: int, by: Sequence[Hindrance]) -> int:
    """Return how long work takes that begins at ``begin_ns``.

    It takes ``work_ns`` when nothing hinders it.
    """
    at, left = float(begin_ns), float(work_ns)
    while left > 0:
        ahead = at + left + max((each.lasts_ns for each in by), default=0)
        times = [(first, last, each.share) for each in by for first, last in each.times(int(at), int(ahead) + 1)]
        share = 1.0
        for first, last, slowed in times:
            if first <= at < last:
                share *= slowed
        changes = [edge for first, last, _ in times for edge in (first, last) if edge > at]
        until = min(changes, default=ahead)
        if share > 0 and left / share <= until - at:
            at, left = at + left / share, 0.0
        else:
            left -= (until - at) * share
            at = until
    return max(1, round(at) - begin_ns)
