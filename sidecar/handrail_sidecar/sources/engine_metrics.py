"""The metrics tap: scrapes the engine's /metrics into one schema.

It also reports what the page shows about the process.
One scrape runs at a time, with a timeout. A dead or slow endpoint is a state, and delays nothing else. Redirects and proxies of
the environment are not followed: telemetry stays where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from handrail.records import (
    EngineHistogram,
    EngineSample,
    EngineValue,
    LogFact,
    Process,
    ProcessEvent,
    SchemaReport,
    SchemaState,
    Source,
)
from handrail.records.quantities import BY_NAME, QUANTITIES, QuantityKind
from handrail_sidecar.engine_metrics.counters import CounterTracks
from handrail_sidecar.engine_metrics.exposition import families_of
from handrail_sidecar.engine_metrics.failures import counted_failures
from handrail_sidecar.engine_metrics.liveness import Progress, ProgressSettings
from handrail_sidecar.engine_metrics.page import PageReader, PageReading
from handrail_sidecar.engine_metrics.report import schema_notes

log = logging.getLogger(__name__)

ACCEPT: Final = "text/plain;version=0.0.4;q=1,*/*;q=0.1"  # no exemplars, no protobuf
_OFF_LOOP_BYTES: Final = 256 << 10
_TYPE_LINE: Final = b"# TYPE "

MOST_FACTS: Final = 256

Take = Callable[["EngineSample | SchemaReport | LogFact"], Awaitable[bool]]
"""Takes a sample, a report or a fact over; False when it cannot now.

A sample is then dropped and counted. It never raises.
"""

Tell = Callable[[ProcessEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Settings of the metrics tap.

    ``url``: the whole address of the page. ``most_bytes``: size limit of the page after decompression.
    """

    url: str
    interval_s: float = 5.0
    timeout_s: float = 4.0
    headers: Mapping[str, str] = field(default_factory=dict)
    most_bytes: int = 16 << 20
    progress: ProgressSettings = field(default_factory=ProgressSettings)


@dataclass(slots=True)
class MetricsStats:
    """Counts since start and the state of the last scrape."""

    scrapes: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # by kind of error
    invalid: dict[str, int] = field(default_factory=dict)  # numbers that make no sense, by reason
    dropped: int = 0  # samples that were not taken over
    faults: int = 0  # errors of the sidecar
    up: bool = False
    seconds: float = 0.0  # of the last scrape
    page_bytes: int = 0


class NoPageError(Exception):
    """No page: ``kind`` is a label for metrics, the text is for people."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class MetricsSource:
    """Source of metrics pages.

    ``reading``: from the last page, None while there is none. ``report``: the last schema report.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        process: Process,
        take: Take,
        tell: Tell,
        *,
        open_requests: Callable[[], int] | None = None,
        now_unix_ns: Callable[[], int] = time.time_ns,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = MetricsStats()
        self.reading: PageReading | None = None
        self.report: SchemaReport | None = None
        self.reader = PageReader()
        self.tracks = CounterTracks()
        self.progress = Progress(process, settings.progress)
        self._settings = settings
        self._process = process
        self._take = take
        self._tell = tell
        self._open_requests = open_requests
        self._now = now_unix_ns
        self._monotonic_s = monotonic_s
        self._types = -1
        self._unreported = False
        self._facts: deque[LogFact] = deque(maxlen=MOST_FACTS)  # counted failures not taken over yet
        self._warned_invalid = False
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Begin to scrape; an endpoint that is not there yet is a state, not an error."""
        self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float) -> None:
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def scrape(self) -> None:
        """Scrape once and record the result; skipped while the source scrapes itself."""
        began = self._monotonic_s()
        at = self._now()
        self.stats.scrapes += 1
        try:
            page = await self._fetch()
        except NoPageError as problem:
            self.stats.failures[problem.kind] = self.stats.failures.get(problem.kind, 0) + 1
            if self.stats.up or self.stats.scrapes == 1:
                log.warning("no engine metrics from %s: %s", self._settings.url, problem)
            self.stats.up, self.reading = False, None
            for event in self.progress.failed(at, str(problem)):
                self._tell(event)
            return
        finally:
            self.stats.seconds = self._monotonic_s() - began
        if not self.stats.up and self.stats.scrapes > 1:
            log.info("engine metrics from %s are back", self._settings.url)
        self.stats.up, self.stats.page_bytes = True, len(page)
        await self._look(page, at)

    async def _run(self) -> None:
        due = self._monotonic_s()
        while not self._stop.is_set():
            try:
                await self.scrape()
            except Exception:  # a page is external input: an error in reading one must not end the scraping
                self.stats.faults += 1
                if self.stats.faults == 1:
                    log.exception("reading a metrics page failed")
            due = max(due + self._settings.interval_s, self._monotonic_s())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), max(0.0, due - self._monotonic_s()))

    async def _fetch(self) -> bytes:
        if self._session is None:
            self._session = _open(self._settings)
        return await _get(self._session, self._settings)

    async def _look(self, page: bytes, at: int) -> None:
        large = len(page) > _OFF_LOOP_BYTES
        reading = await asyncio.to_thread(self.reader.read, page) if large else self.reader.read(page)
        self._count_invalid(reading)
        if not reading.values and not reading.histograms and not families_of(page):
            self.reading = None  # not an exposition: an error page with status 200
            for event in self.progress.failed(at, "the page holds no metrics"):
                self._tell(event)
            return
        self.reading = reading
        await self._report(page, at)
        started = max(reading.of("start_time_seconds").values(), default=None)
        counters = {key: value for key, value in reading.values.items() if BY_NAME[key[0]].kind is QuantityKind.COUNTER}
        counters |= {key: buckets.count for key, buckets in reading.histograms.items() if buckets.count is not None}
        grown, before = self.tracks.grown(counters), self.tracks.scraped_unix_ns
        if before is not None:
            until = at + int(self.stats.seconds * 1e9)  # the page was made at some time during the request
            self._facts.extend(counted_failures(self._process, grown, counters, before, until))
        reset = self.tracks.follow(counters, at, None if started is None else int(started * 1e9))
        open_requests = self._open_requests() if self._open_requests is not None else None
        for event in self.progress.seen(reading, at, reset, open_requests):
            self._tell(event)
        while self._facts and await self._take(self._facts[0]):
            self._facts.popleft()
        if not await self._take(sample_of(reading, self._process, at, self.tracks)):
            self.stats.dropped += 1

    async def _report(self, page: bytes, at: int) -> None:
        """Report the families once, and again when their number changes.

        It changes when the engine was replaced, or began to expose more.
        """
        types = page.count(_TYPE_LINE)
        if types == self._types:
            return
        emitters, notes = schema_notes(families_of(page))
        report = SchemaReport(process=self._process, source=Source.METRICS, at_unix_ns=at, emitters=emitters, notes=notes)
        if self.report is None or (self.report.emitters, self.report.notes) != (emitters, notes):
            log_report(report)
            self.report = report
            self._unreported = True
        if self._unreported and not await self._take(report):
            self.stats.dropped += 1
            return  # offered again at the next scrape
        self._types, self._unreported = types, False

    def _count_invalid(self, reading: PageReading) -> None:
        for reason, count in reading.invalid.items():
            self.stats.invalid[reason] = self.stats.invalid.get(reason, 0) + count
        if reading.invalid and not self._warned_invalid:
            self._warned_invalid = True
            log.warning(
                "the engine's metrics hold impossible numbers (%s); the sidecar omits and counts them",
                ", ".join(f"{count} {reason}" for reason, count in sorted(reading.invalid.items())),
            )


async def fetch_once(settings: MetricsSettings) -> bytes:
    """Fetch one page. Raises ``NoPageError``."""
    async with _open(settings) as session:
        return await _get(session, settings)


def _open(settings: MetricsSettings) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
        headers={**settings.headers, "Accept": ACCEPT},
        trust_env=False,
    )


async def _get(session: aiohttp.ClientSession, settings: MetricsSettings) -> bytes:
    try:
        async with session.get(settings.url, allow_redirects=False) as response:
            if response.status != 200:
                raise NoPageError("status", f"HTTP {response.status}")
            parts, size = [], 0
            async for part in response.content.iter_any():
                size += len(part)
                if size > settings.most_bytes:
                    raise NoPageError("too_large", f"the page is larger than {settings.most_bytes >> 20} MiB")
                parts.append(part)
            return b"".join(parts)
    except asyncio.TimeoutError:
        raise NoPageError("timeout", f"no answer within {settings.timeout_s:g} s") from None
    except aiohttp.ClientConnectorError as error:
        reason = os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
        raise NoPageError("unreachable", f"cannot connect: {reason}"[:200]) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoPageError("unreachable", f"{type(error).__name__}: {error}"[:200]) from None


def sample_of(reading: PageReading, process: Process, at: int, tracks: CounterTracks) -> EngineSample:
    """Make a record of a page."""
    order = {quantity.name: place for place, quantity in enumerate(QUANTITIES)}
    return EngineSample(
        process=process,
        source=Source.METRICS,
        at_unix_ns=at,
        model=reading.models[0] if len(reading.models) == 1 else "",
        values=tuple(
            EngineValue(
                name=key[0],
                value=value,
                engine=key[1],
                label=key[2],
                start_unix_ns=tracks.since(key) if BY_NAME[key[0]].kind is QuantityKind.COUNTER else 0,
            )
            for key, value in sorted(reading.values.items(), key=lambda item: (order[item[0][0]], item[0]))
        ),
        histograms=tuple(
            EngineHistogram(
                name=key[0],
                bounds=(counted := buckets.counts())[0],
                counts=counted[1],
                count=sum(counted[1]),
                total=buckets.total,
                engine=key[1],
                label=key[2],
                start_unix_ns=tracks.since(key),
            )
            for key, buckets in sorted(reading.histograms.items(), key=lambda item: (order[item[0][0]], item[0]))
        ),
    )


def log_report(report: SchemaReport) -> None:
    """Log once which families are on the page and which are not."""
    log.info("metrics of %s", ", ".join(report.emitters) or "an unknown engine")
    words = {
        SchemaState.MISSING: "not exported",
        SchemaState.RENAMED: "read under the name of another version",
        SchemaState.BOTH: "exported under two names, the sidecar reads the newer one",
        SchemaState.UNIT_CHANGED: "in another unit, converted",
        SchemaState.UNKNOWN: "perhaps renamed, not read",
    }
    for state, text in words.items():
        found: Sequence[str] = [note.seen or note.expected for note in report.notes if note.state is state]
        if found:
            level = logging.INFO if state in (SchemaState.RENAMED, SchemaState.BOTH) else logging.WARNING
            shown = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
            log.log(level, "metrics %s: %s", text, shown)
