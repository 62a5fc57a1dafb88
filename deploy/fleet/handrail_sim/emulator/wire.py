"""How KV gets from host to host: a link, its handshake and its faults.

Every driver uses it.
Transfers under way share the link's bandwidth evenly, or are served in turn. No clock, no I/O.
"""

from __future__ import annotations

from handrail_sim.emulator.faults import Active
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.truth import FetchTruth


class EmulatedLink:
    """The transfers of one link.

    Every method takes the same monotonic clock, which must not run backwards.
    """

    def __init__(self, bytes_per_s: float, *, in_turn: bool = False) -> None:
        self._bytes_per_s = bytes_per_s
        self._in_turn = in_turn
        self._left: dict[str, float] = {}  # bytes left, in the order of their starts
        self._at_ns = 0

    def set_rate(self, bytes_per_s: float, now_ns: int) -> None:
        """Set the bandwidth from now on."""
        self._move(now_ns)
        self._bytes_per_s = bytes_per_s

    def start(self, transfer: str, size_bytes: int, now_ns: int) -> None:
        self._move(now_ns)
        self._left[transfer] = float(size_bytes)

    def drop(self, transfer: str, now_ns: int) -> None:
        """Drop a transfer that nobody waits for; an unknown one does nothing."""
        self._move(now_ns)
        self._left.pop(transfer, None)

    def finished(self, now_ns: int) -> list[str]:
        """Remove and return the transfers that have arrived."""
        self._move(now_ns)
        bound = self._bytes_per_s * 1e-9  # bytes that move in a nanosecond: times are whole nanoseconds
        done = []
        for transfer, left in self._left.items():
            if left <= bound:
                done.append(transfer)
            elif self._in_turn:
                break  # even a transfer of no bytes waits for those before it
        for transfer in done:
            del self._left[transfer]
        return done

    def next_ns(self) -> int | None:
        """Return when the next transfer arrives if nothing changes; None: nothing moves."""
        if not self._left:
            return None
        shortest = next(iter(self._left.values())) if self._in_turn else min(self._left.values()) * len(self._left)
        return self._at_ns + max(1, round(shortest / self._bytes_per_s * 1e9))

    def _move(self, now_ns: int) -> None:
        if self._left:
            moving = [next(iter(self._left))] if self._in_turn else list(self._left)
            each = (now_ns - self._at_ns) * 1e-9 * self._bytes_per_s / len(moving)
            for transfer in moving:
                self._left[transfer] -= each
        self._at_ns = now_ns


FAILS_AFTER_NS = 50_000_000  # from the post of a transfer to its failure
_COLD_EVERY_NS = 5_000_000_000  # how often the peers of a cold link lose each other
_FAILURES = (("fetch_failed", FetchTruth.FAILED), ("fetch_recomputed", FetchTruth.RECOMPUTED))
_FREED = (("stale_read", FetchTruth.STALE_READ), ("lease_expired", FetchTruth.EXPIRED))


class Wire:
    """The wire ``prefill>decode``.

    Every method takes the monotonic clock to which the faults' times refer.
    """

    def __init__(self, prefill: str, decode: str, scenario: Scenario, faults: Active) -> None:
        self.prefill, self.decode = prefill, decode
        self.name = f"{prefill}>{decode}"
        self.link = EmulatedLink(scenario.link_bytes_per_s, in_turn=scenario.link_order == "in-turn")
        self.wake_ns: int | None = None  # for the driver: when it must look at this wire
        self._scenario = scenario
        self._faults = faults
        self._contact: tuple[int, int] | None = None  # which contact it is, and when it is made

    def contact_ns(self, now_ns: int) -> int:
        """Return when the peers know each other; begins a first contact if they do not."""
        fault = self._faults.find("handshake_cold", self.name, now_ns)
        which = 1 + (now_ns - fault.from_ns) // _COLD_EVERY_NS if fault else 0
        if self._contact is None or (fault and self._contact[0] != which):
            takes_ns = round(fault.size * 1e9) if fault else self._scenario.handshake_ns
            self._contact = (which, now_ns + takes_ns)
        return self._contact[1]

    def failure(self, drawn: float, now_ns: int) -> FetchTruth | None:
        """Return how the fetch that is posted now fails; None: it does not.

        ``drawn`` is the request's own number, from 0 up to 1.
        """
        for name, fetch in _FAILURES:
            fault = self._faults.find(name, self.name, now_ns)
            if fault is not None and drawn < fault.size:
                return fetch
        return None

    def unheld(self, now_ns: int) -> FetchTruth | None:
        """Return the outcome of a fetch whose KV is no longer held.

        None: no fault decides it.
        """
        for name, fetch in _FREED:
            if self._faults.find(name, self.prefill, now_ns) is not None:
                return fetch
        return None

    def apply_faults(self, now_ns: int) -> None:
        """Set the bandwidth that holds from now on; called where a fault begins or ends."""
        rate = self._scenario.link_bytes_per_s / self._faults.factor("slow_link", self.name, now_ns)
        for end in (self.prefill, self.decode):
            rate /= self._faults.factor("bad_host", end, now_ns)
        staged = self._faults.find("no_p2p", self.name, now_ns)
        self.link.set_rate(min(rate, staged.size) if staged else rate, now_ns)
