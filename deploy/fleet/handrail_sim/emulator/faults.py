"""Faults of the emulated fleet, each with a name, a place, a size and a time.

Example: ``slow_link:p0>d1:4@60-120``.
A place is a host (``p0``, ``d1``, ``router``), a link (``p0>d1``) or ``*`` for all places of the fault's kind.
Without a time the fault lasts for the whole run. ``FAULTS`` describes each fault; ``host`` and ``wire`` carry it out for every
driver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class FaultPlace(Enum):
    """The kinds of places that a fault can have."""

    PREFILL = "a prefill host, p0"
    DECODE = "a decode host, d0"
    ENGINE = "an engine's host, p0 or d0"
    HOST = "any host: edge, router, p0 or d0"
    LINK = "a link, p0>d0"
    ROUTER = "router"
    EDGE = "edge"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One row of the table. ``least`` and ``most`` bound the size, both included."""

    place: FaultPlace
    size: str
    effect: str
    least: float = 0.0
    most: float = math.inf


FAULTS: dict[str, FaultKind] = {
    "slow_prefill": FaultKind(FaultPlace.PREFILL, "factor", "prompts take this many times as long to compute", 1.0),
    "prefill_queue": FaultKind(
        FaultPlace.PREFILL, "share", "prompts of somebody else keep the engine busy this share of its time", 0.0, 0.95
    ),
    "slow_link": FaultKind(FaultPlace.LINK, "factor", "the link has this part of its bandwidth (4: a quarter)", 1.0),
    "no_p2p": FaultKind(FaultPlace.LINK, "bytes/s", "the KV goes over host memory at this rate, all transfers together", 1.0),
    "handshake_cold": FaultKind(
        FaultPlace.LINK,
        "seconds",
        "the peers lose each other every 5 s; the next fetch makes first contact, which takes this long",
    ),
    "kv_pressure": FaultKind(FaultPlace.DECODE, "share", "this share of the KV blocks is taken by somebody else", 0.0, 1.0),
    "decode_queue": FaultKind(FaultPlace.DECODE, "requests", "no more than this many run at once", 1.0),
    "preemption_storm": FaultKind(
        FaultPlace.DECODE, "per second", "the stream that came last is preempted this often", 0.01, 1000.0
    ),
    "router_slow": FaultKind(FaultPlace.ROUTER, "seconds", "the router thinks this much longer about each request"),
    "fetch_failed": FaultKind(
        FaultPlace.LINK, "share", "this share of fetches fails; policy fail: the request ends in an error", 0.0, 1.0
    ),
    "fetch_recomputed": FaultKind(
        FaultPlace.LINK, "share", "this share of fetches fails; policy recompute: D computes the prompt", 0.0, 1.0
    ),
    "lease_expired": FaultKind(
        FaultPlace.PREFILL, "seconds", "KV is freed after this time, since no heartbeat comes; policy recompute"
    ),
    "stale_read": FaultKind(
        FaultPlace.PREFILL, "seconds", "KV is freed after this time, and D reads what lies there by then: nobody sees an error"
    ),
    "prefill_failed": FaultKind(
        FaultPlace.PREFILL, "share", "this share of prompts is answered with an error; the router tries another host", 0.0, 1.0
    ),
    "bad_host": FaultKind(
        FaultPlace.ENGINE, "factor", "all steps on it take this many times as long, and its links have this part of theirs", 1.0
    ),
    "gpu_throttled": FaultKind(
        FaultPlace.ENGINE,
        "factor",
        "for 0.4 s in every 6 its GPU has this part of its clock (4: a quarter), so steps take longer",
        1.0,
    ),
    "host_pause": FaultKind(FaultPlace.ENGINE, "seconds", "once in every 4 s its engine's process pauses for so long", 0.0, 3.0),
    "engine_hung": FaultKind(
        FaultPlace.ENGINE, "seconds", "its engine steps no more for so long, once, and its API answers as before", 0.001, 3600.0
    ),
    "client_slow": FaultKind(
        FaultPlace.EDGE, "seconds", "one client in five reads nothing for so long, a quarter into its answer"
    ),
    "clock_offset": FaultKind(FaultPlace.HOST, "seconds", "its wall clock is this much ahead", -math.inf),
    "clock_drift": FaultKind(FaultPlace.HOST, "ppm", "its clocks run this much too fast", -1e5, 1e5),
}

_TIME = re.compile(r"(?P<what>.+?)(?:@(?P<from>[\d.]+)-(?P<to>[\d.]*))?")


class FaultError(ValueError):
    """The fault is not possible; the message says what is valid."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at a place, active while ``from_ns <= time < to_ns`` of the run.

    ``place`` is ``*`` or the name of a host or link.
    """

    name: str
    place: str
    size: float
    from_ns: int = 0
    to_ns: int | None = None

    def at(self, place: str, now_ns: int) -> bool:
        return self.place in ("*", place) and self.from_ns <= now_ns and (self.to_ns is None or now_ns < self.to_ns)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names of a fleet's hosts. Collocated engines are in both lists."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    @property
    def collocated(self) -> bool:
        return self.prefill == self.decode

    def of(self, place: FaultPlace) -> tuple[str, ...]:
        links = tuple(f"{prefill}>{decode}" for prefill in self.prefill for decode in self.decode if not self.collocated)
        engines = tuple(dict.fromkeys((*self.prefill, *self.decode)))
        return {
            FaultPlace.PREFILL: self.prefill,
            FaultPlace.DECODE: self.decode,
            FaultPlace.ENGINE: engines,
            FaultPlace.HOST: ("edge", "router", *engines),
            FaultPlace.LINK: links,
            FaultPlace.ROUTER: ("router",),
            FaultPlace.EDGE: ("edge",),
        }[place]


def parse(text: str, hosts: Hosts) -> Fault:
    """Parse ``NAME:place:size``, optionally with ``@from-to`` in seconds after it.

    ``to`` may be missing. Raises ``FaultError``.
    """
    match = _TIME.fullmatch(text)
    parts = match["what"].split(":") if match else []
    if match is None or len(parts) != 3:
        raise FaultError(f"fault {text!r}: write NAME:place:size or NAME:place:size@from-to, such as slow_link:p0>d1:4@60-120")
    name, place, size = parts
    kind = FAULTS.get(name)
    if kind is None:
        raise FaultError(f"fault {name!r}: unknown; valid: {', '.join(FAULTS)}")
    places = hosts.of(kind.place)
    if not places:
        raise FaultError(f"fault {name}: this fleet has no place for it; it needs {kind.place.value}")
    if place != "*" and place not in places:
        raise FaultError(f"fault {name}: {place!r} is no place for it; valid: *, {', '.join(places)}")
    try:
        fault = Fault(name, place, float(size), _ns(match["from"]) or 0, _ns(match["to"]))
    except ValueError as error:
        raise FaultError(f"fault {text!r}: {error}") from None
    if not (kind.least <= fault.size <= kind.most and math.isfinite(fault.size)):
        raise FaultError(f"fault {name}: {kind.size} {size} is outside {kind.least:g} to {kind.most:g}")
    if fault.to_ns is not None and fault.to_ns <= fault.from_ns:
        raise FaultError(f"fault {text!r}: it ends before it begins")
    return fault


def _ns(seconds: str | None) -> int | None:
    return round(float(seconds) * 1e9) if seconds else None


class Active:
    """All faults of a run, looked up by name."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._named: dict[str, list[Fault]] = {}
        for fault in faults:
            self._named.setdefault(fault.name, []).append(fault)

    def named(self, name: str) -> list[Fault]:
        return self._named.get(name, [])

    def find(self, name: str, place: str, now_ns: int) -> Fault | None:
        """Return the first fault of this name that is active at this place and time."""
        named = self._named.get(name)
        return next((fault for fault in named if fault.at(place, now_ns)), None) if named else None

    def factor(self, name: str, place: str, now_ns: int) -> float:
        """Return the product of the sizes of the active faults; 1 where there is none."""
        named = self._named.get(name)
        return math.prod(fault.size for fault in named if fault.at(place, now_ns)) if named else 1.0

    def edges(self) -> list[int]:
        """Return the times at which a fault begins or ends."""
        times = {fault.from_ns for named in self._named.values() for fault in named}
        return sorted(times | {fault.to_ns for named in self._named.values() for fault in named if fault.to_ns is not None})
