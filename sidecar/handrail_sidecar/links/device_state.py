"""Keep one device's last values, counter starts and samples that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from handrail.device_counters import link as names
from handrail.records import Process
from handrail.records.devices import Device, DeviceSample, DeviceValue
from handrail.records.quantities import QuantityKind
from handrail_sidecar.engine_metrics.counters import CounterTracks
from handrail_sidecar.links.reading import DeviceReading, Key, LinkReader
from handrail_sidecar.links.sysfs import Why

SECOND: Final = 10**9
MOST_WAITING: Final = 1024
"""Most samples of one device that wait to be taken.

Older ones are dropped and counted."""

MOST_RECENT: Final = 1024
"""Most readings in which the peak is looked for.

At 10 Hz a minute has 600; at 100 Hz they are the last ten seconds.
"""


@dataclass(slots=True)
class LinkStats:
    """Counts since start, each written by one thread; any thread may read them."""

    reads: int = 0
    resets: int = 0  # counters that began again: the driver was reloaded, or they were set to 0
    dropped: int = 0


class _PendingReading(NamedTuple):
    """One reading that is not yet a sample.

    ``life``: of the device; a change means that its counters restart.
    """

    reading: DeviceReading
    device: Device
    at_unix_ns: int
    took_ns: int
    life: int


@dataclass(slots=True, eq=False)  # compared by identity: equality would compare 15 fields
class DeviceState:
    """State of one device: its reader, its last values, and readings not yet taken.

    ``tick`` belongs to one thread, ``take`` to another.
    Samples are made from many readings at once, since code that runs every 100 ms finds its caches cold.
    """

    reader: LinkReader
    process: Process
    stats: LinkStats = field(default_factory=LinkStats)
    device: Device | None = None
    values: dict[Key, float] = field(default_factory=dict)  # the last value of each counter
    missing: dict[str, Why] = field(default_factory=dict)
    recent: deque[tuple[int, float, float]] = field(
        default_factory=lambda: deque(maxlen=MOST_RECENT)
    )  # (monotonic, received, sent)
    waiting: deque[_PendingReading] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))
    reading_since_ns: int | None = None  # monotonic; None between reads
    rest_due_ns: int = 0  # monotonic: when to read more than the bytes
    gone: bool = False
    _quick: CounterTracks = field(default_factory=CounterTracks)
    _slow: CounterTracks = field(default_factory=CounterTracks)
    _identity: str | None = None
    _life: int = 0  # how often another device appeared under the name
    _reported_life: int = 0

    def tick(self, *, everything: bool, now_unix_ns: Callable[[], int], monotonic_ns: Callable[[], int]) -> bool:
        """Read once and keep the result; return False once the device is gone.

        Blocks as long as the driver does.
        """
        began, at = monotonic_ns(), now_unix_ns()
        self.reading_since_ns = began
        try:
            reading = self.reader.bytes_moved()
            middle = (monotonic_ns() - began) // 2  # time of the bytes: reading the rest takes long and affects no rate
            if everything and not reading.gone:
                reading = self._with_the_rest(reading, at)
            took = monotonic_ns() - began
        finally:
            self.reading_since_ns = None
        self.gone = reading.gone
        if reading.gone or self.device is None:
            return not reading.gone
        self.values.update(reading.values)
        self._remember(reading, began + middle)
        if len(self.waiting) == MOST_WAITING:
            self.stats.dropped += 1
        self.waiting.append(_PendingReading(reading, self.device, at + middle, took, self._life))
        self.stats.reads += 1
        return True

    def take(self) -> list[DeviceSample]:
        """Return the samples since the last call, oldest first."""
        return [self._sample(self.waiting.popleft()) for _ in range(len(self.waiting))]

    def peak_bytes_per_second(self) -> dict[str, float]:
        """Return the highest rate over any second of the last minute, by direction.

        Shorter spans do not count: some drivers update their counters only a few times a second, which looks like bursts.
        """
        peaks: dict[str, float] = {}
        points = list(self.recent)
        first = 0
        for last in range(1, len(points)):
            while first + 1 < last and points[last][0] - points[first + 1][0] >= SECOND:
                first += 1
            apart = points[last][0] - points[first][0]
            if apart < SECOND:
                continue
            for place, direction in ((1, names.RECEIVE), (2, names.TRANSMIT)):
                grown = points[last][place] - points[first][place]
                peaks[direction] = max(peaks.get(direction, 0.0), grown / apart * SECOND)
        return peaks

    def _with_the_rest(self, quick: DeviceReading, at_unix_ns: int) -> DeviceReading:
        identity = self.reader.identity()
        if self._identity is not None and identity != self._identity:
            self._begin_again()
        self._identity = identity
        self.device = self.reader.device()
        rest = self.reader.rest()
        self.missing = {**quick.missing, **rest.missing}
        return DeviceReading(values={**quick.values, **rest.values})

    def _begin_again(self) -> None:
        """Forget the values, since another device now has the name and its own counts."""
        self._life += 1
        self.values.clear()
        self.recent.clear()

    def _remember(self, reading: DeviceReading, monotonic_ns: int) -> None:
        moved = [reading.values.get((names.BYTES, direction)) for direction in (names.RECEIVE, names.TRANSMIT)]
        if None not in moved:
            received, sent = (float(value or 0) for value in moved)
            if self.recent and (received < self.recent[-1][1] or sent < self.recent[-1][2]):
                self.recent.clear()
            self.recent.append((monotonic_ns, received, sent))

    def _sample(self, kept: _PendingReading) -> DeviceSample:
        if kept.life != self._reported_life:
            self.stats.resets += 1
            self._reported_life = kept.life
            self._quick, self._slow = CounterTracks(), CounterTracks()
        values = kept.reading.values
        since = self._since(values, kept.at_unix_ns)
        return DeviceSample(
            process=self.process,
            source=self.reader.source,
            device=kept.device,
            at_unix_ns=kept.at_unix_ns,
            took_ns=kept.took_ns,
            values=tuple(
                DeviceValue(name=name, value=value, label=label, start_unix_ns=since.get((name, label), 0))
                for (name, label), value in values.items()
            ),
        )

    def _since(self, values: Mapping[Key, float], at_unix_ns: int) -> dict[Key, int]:
        """Return since when each counter counts.

        Bytes are followed apart from counters that are read less often: each one's restart is found from its own last reading.
        """
        quick: dict[tuple[str, str, str], float] = {}
        slow: dict[tuple[str, str, str], float] = {}
        for (name, label), value in values.items():
            if name == names.BYTES:
                quick[name, "", label] = value
            elif names.BY_NAME[name].kind is QuantityKind.COUNTER:
                slow[name, "", label] = value
        since: dict[Key, int] = {}
        for tracks, part in ((self._quick, quick), (self._slow, slow)):
            if part:
                self.stats.resets += len(tracks.follow(part, at_unix_ns, None))
                for key in part:
                    since[key[0], key[2]] = tracks.since(key)
        return since
