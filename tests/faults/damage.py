"""Damage the files of a store, a journal and a spool many times.

The damage is at chosen and at random bytes, in memory and on disk.
After each damage: a start succeeds or is refused with a clear message; what is read was written, or the query is refused; every
loss is counted and reported; undamaged neighbours are read; and no file is deleted unless its replacement is proven.
"""

from __future__ import annotations

import logging
import random
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from faults.trial import Context, Got, Trial
from handrail.otlp.signals import Signal
from handrail.wal.filesystem import MemoryFiles
from handrail.wal.log import Damage, LogLimits, SegmentLog
from handrail.wal.segment_file import HEADER_BYTES
from handrail_collector.store.filters import RequestFilter
from handrail_collector.store.layout import HOUR_NS
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.manifest import MANIFEST, ManifestReader, StoreDamagedError, StoredFile, files_of
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.read import StoreReader
from handrail_collector.store.schema import Table
from handrail_sidecar.export.spool import Spool
from harness.store import EVERYTHING, LATER, ROWS, SPANS

Spoil = Callable[[bytes, random.Random], bytes]


class BrokenPromiseError(Exception):
    """A promise that must hold after any damage does not hold."""


def held(condition: object, what: str) -> None:
    """Raise ``BrokenPromiseError`` when the condition is false."""
    if not condition:
        raise BrokenPromiseError(what)


# --- damage ---------------------------------------------------------------------------------------------------------------


def turned_bit(data: bytes, rng: random.Random) -> bytes:
    """Flip one random bit."""
    return _xor(data, rng.randrange(len(data)), 1 << rng.randrange(8))


def turned_at_ends(data: bytes, rng: random.Random) -> bytes:
    """Flip one bit of the first or last 64 bytes: magic, lengths, checksums, footer."""
    at = rng.randrange(min(64, len(data)))
    return _xor(data, at if rng.random() < 0.5 else len(data) - 1 - at, 1 << rng.randrange(8))


def other_bytes(data: bytes, rng: random.Random) -> bytes:
    """Overwrite a block with random bytes."""
    start = rng.randrange(len(data))
    block = rng.randbytes(rng.choice((1, 4, 32, 512)))[: len(data) - start]
    return data[:start] + block + data[start + len(block) :]


def zeros(data: bytes, rng: random.Random) -> bytes:
    """Zero a block, as if it had never reached the disk."""
    start = rng.randrange(len(data))
    size = min(len(data) - start, rng.choice((1, 28, 512, 4096)))
    return data[:start] + bytes(size) + data[start + size :]


def cut(data: bytes, rng: random.Random) -> bytes:
    """Cut off the end."""
    return data[: rng.randrange(len(data))]


def longer(data: bytes, rng: random.Random) -> bytes:
    """Append bytes: garbage, or a piece of the file itself."""
    start = rng.randrange(len(data))
    return data + rng.choice((rng.randbytes(40), data[start : start + 600], b"\0" * 512))


def without_piece(data: bytes, rng: random.Random) -> bytes:
    """Remove a piece from the middle; the rest moves up."""
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.choice((1, 7, 100, 4096)) :]


ANYWHERE: Final[Mapping[str, Spoil]] = {
    each.__name__: each for each in (turned_bit, turned_at_ends, other_bytes, zeros, cut, longer, without_piece)
}
"""Damages at random bytes of any file."""


def _xor(data: bytes, at: int, mask: int) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


# --- segments: journal and spool ------------------------------------------------------------------------------------------

_FIELDS: Final = {
    "magic": (0, 4),
    "kind": (4, 1),
    "zeros": (5, 3),
    "length": (8, 4),
    "time": (12, 8),
    "sum": (20, 4),
    "head_sum": (24, 4),
}


def header(field: str) -> Spoil:
    """Change a field of a record's header, at any record."""
    at, size = _FIELDS[field]

    def spoil(data: bytes, rng: random.Random) -> bytes:
        starts = _records(data)
        start = rng.choice(starts) + at
        return data[:start] + rng.choice((b"\xff" * size, bytes(size), rng.randbytes(size))) + data[start + size :]

    return spoil


def two_swapped(data: bytes, rng: random.Random) -> bytes:
    """Swap two whole records: each is valid by itself, but in the wrong place."""
    starts = [*_records(data), len(data)]
    if len(starts) < 4:
        return turned_bit(data, rng)
    first = rng.randrange(len(starts) - 2)
    a, b, c = starts[first : first + 3]
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _records(data: bytes) -> list[int]:
    starts, at = [], 0
    while at + HEADER_BYTES <= len(data):
        starts.append(at)
        at += HEADER_BYTES + int(struct.unpack_from("<I", data, at + 8)[0])
    return starts or [0]


SEGMENTS: Final[Mapping[str, Spoil]] = {
    **ANYWHERE,
    **{f"header_{each}": header(each) for each in _FIELDS},
    "swapped": two_swapped,
}


class _Segments:
    """A log of 60 records in several segments, in memory.

    Each damage is done to a copy.
    """

    def __init__(self) -> None:
        self._limits = LogLimits(max_bytes=1 << 20, segment_bytes=4096, max_record_bytes=2048)
        files = MemoryFiles()
        log = SegmentLog("log", self._limits, files=files)
        rng = random.Random(5)
        self.written = {}
        for number in range(60):
            payload = b"%d " % number + rng.choice((rng.randbytes(rng.randrange(400)), b"HRJ1" * 20, b""))
            self.written[log.append(1 + number % 3, payload, 1000 + number)] = payload
        log.sync()
        self.end = log.end
        log.close()
        self.files = {name: bytes(data) for name, data in files._files.items()}

    def try_one(self, name: str, how: Spoil, rng: random.Random) -> str:
        """Damage one segment, open, read, append, read again."""
        before = self.files[name]
        spoilt = how(before, rng)
        files = MemoryFiles()
        files._files = {path: bytearray(data) for path, data in self.files.items()}
        files._files[name] = bytearray(spoilt)
        reported: list[Damage] = []
        log = SegmentLog("log", self._limits, files=files, on_damage=reported.append)
        held(set(files._files) == set(self.files), "a segment is gone after a start")
        first = int(Path(name).stem)
        found = {record.offset: record.payload for record in log.read(0)}
        for offset, payload in found.items():
            held(self.written.get(offset) == payload, f"a record at {offset} that nobody wrote")
        lost = set(self.written) - set(found)
        size = len(before)
        held(all(first <= offset < first + size for offset in lost), "records of another segment are lost")
        statement = log.damaged_bytes + log.recovery.torn_bytes
        # A last segment that is cut between two records looks like a crash before the next record.
        untold = name == max(self.files) and before.startswith(spoilt) and len(spoilt) in _records(before)
        held(not lost or statement or untold, "records are lost and nothing says so")
        held(spoilt == before or lost or statement or len(spoilt) > size or untold, "a damage was not noticed")
        more = log.append(1, b"new", 1)
        log.sync()
        held([r.payload for r in log.read(more)] == [b"new"], "what is appended afterwards is not read")
        again = {record.offset: record.payload for record in log.read(0, more)}
        held(again == found, "a second reading finds something else")
        log.close()
        return "all read" if not lost else f"{len(lost)} lost" if len(lost) < 3 else "more lost"


def segments(ctx: Context) -> Got:
    """Try damages of segments; journal and spool are the same kind of log."""
    made = _Segments()
    names = sorted(made.files)
    last = names[-1]

    def cases(rng: random.Random) -> tuple[str, Callable[[], str]]:
        how = rng.choice(sorted(SEGMENTS))
        name = last if rng.random() < 0.3 else rng.choice(names)
        return how, lambda: made.try_one(name, SEGMENTS[how], rng)

    return _many(ctx, "segments", cases, int(ctx.scale(4000, 60_000)))


def acknowledged(ctx: Context) -> Got:
    """Try damages of the spool's offset of acknowledged records.

    The sidecar sends again what is not surely acknowledged.
    """

    def cases(rng: random.Random) -> tuple[str, Callable[[], str]]:
        how = rng.choice(sorted(ANYWHERE))
        return how, lambda: _try_acknowledged(ANYWHERE[how], rng)

    return _many(ctx, "offsets", cases, int(ctx.scale(2000, 20_000)))


def _try_acknowledged(how: Spoil, rng: random.Random) -> str:
    files = MemoryFiles()
    spool = Spool("spool", 1 << 20, files=files)
    for number in range(9):
        spool.put(Signal.TRACES, b"%d" % number * 50, number)
    sent = rng.randrange(1, 9)
    for _ in range(sent):
        batch = spool.first()
        held(batch is not None, "a batch is gone")
        assert batch is not None
        spool.acknowledge(batch.next_offset)
    spool.close()
    path = "spool/acknowledged"
    files._files[path] = bytearray(how(bytes(files._files[path]), rng))
    spool = Spool("spool", 1 << 20, files=files)
    left = []
    while (batch := spool.first()) is not None:
        left.append(batch.payload)
        spool.acknowledge(batch.next_offset)
    wanted = [b"%d" % number * 50 for number in range(sent, 9)]
    held(left[-len(wanted) :] == wanted, f"{sent} of 9 were acknowledged, and of the others only {len(left)} are sent")
    spool.put(Signal.TRACES, b"new", 1)
    found = spool.first()
    held(found is None or found.next_offset < 1 << 62, "offsets leave their width")
    held(found is not None and found.payload == b"new", "what is spooled afterwards is not sent")
    held(found is not None and found.offset < 1 << 62, "offsets leave their width")
    spool.close()
    return "sent on" if len(left) == len(wanted) else "sent again"


# --- store ----------------------------------------------------------------------------------------------------------------


class _Store:
    """A store of four publishes with requests and spans, in folders on disk.

    Each damage is done to a copy.
    """

    def __init__(self, folder: Path) -> None:
        self.whole = folder / "whole"
        self._copy = folder / "copy"
        publisher = StorePublisher(self.whole)
        publisher.open()
        for index, (first, end) in enumerate(pairwise((0, 100, 200, 300, 400))):
            spans = [replace(span, offset=first + 1) for span in SPANS[index * 3 : index * 3 + 3]]
            low = first if index < 2 else 100  # a start reads the later publishes again
            publisher.publish(first, end, low, spans, ROWS[index * 3 : index * 3 + 3])
        publisher.close()
        self.files = files_of(ManifestReader(self.whole).publishes(), Table.REQUESTS)
        self.spans = files_of(ManifestReader(self.whole).publishes(), Table.SPANS)
        self.names = _below(self.whole)

    def spoilt(self, below: str, how: Spoil, rng: random.Random) -> Path:
        """Return a copy of the store with one damaged file."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self.whole, self._copy)
        path = self._copy / below
        path.write_bytes(how(path.read_bytes(), rng))
        return self._copy

    def try_parquet(self, file: StoredFile, how: Spoil, rng: random.Random) -> str:
        """Damage one data file, then try a start, a maintenance pass and queries."""
        root = self.spoilt(file.path, how, rng)
        readable = (root / file.path).read_bytes() == (self.whole / file.path).read_bytes()
        publisher = StorePublisher(root, now_unix_ns=lambda: LATER)
        publisher.open()
        held(_below(root) == self.names, "a start removes or renames a file")
        upkeep = Upkeep(publisher, UpkeepSettings(closed_after_ns=0, grace_ns=HOUR_NS), lambda: LATER)
        for _ in range(2):
            upkeep.run_pass()
        stats = upkeep.stats
        held(not stats.failures, "a pass of upkeep fails")
        held(readable or stats.files_damaged == 1, "an unreadable file is not counted")
        held(self.names <= _below(root), "a file is gone within the grace time")
        listed = files_of(publisher.publishes(), file.table)
        rows = sum(each.rows for each in listed)
        held(
            rows == sum(each.rows for each in (self.files if file.table is Table.REQUESTS else self.spans)), "rows left the store"
        )
        held(readable or any(each.path == file.path for each in listed), "an unreadable file was folded away")
        publisher.close()
        return _requested(root, readable)

    def try_manifest(self, how: Spoil, rng: random.Random) -> str:
        """Damage the manifest, then try a start and readers.

        The start succeeds with every row or is refused.
        """
        root = self.spoilt(MANIFEST, how, rng)
        before = (root / MANIFEST).read_bytes()
        _questioned(root)
        publisher = StorePublisher(root, now_unix_ns=lambda: LATER)
        try:
            publisher.open()
        except StoreDamagedError as error:
            held("Handrail removed nothing" in str(error), f"a refusal without advice: {error}")
            held(_below(root) == self.names, "a start that was refused removes a file")
            held((root / MANIFEST).read_bytes() == before, "a start that was refused changes the manifest")
            return "refused"
        finally:
            publisher.close()
        left = _below(root)
        lost = self.names - left - {name for name in self.names if f"{name}.unlisted" in left}
        # A crash before the last line looks like a removed last line (decision 0007).
        last = {file.path for file in (self.files[-1], self.spans[-1])}
        held(lost <= last, f"a start removes {sorted(lost - last)}")
        held(
            not lost or _last_line_is_torn(before, (self.whole / MANIFEST).read_bytes()), "files go though their line is not torn"
        )
        return f"goes on, {_questioned(root)}"


def _last_line_is_torn(found: bytes, whole: bytes) -> bool:
    """Tell whether the rest is the manifest without its last line.

    A torn piece of that line, or nothing, may follow.
    """
    kept = whole[: whole[:-1].rfind(b"\n") + 1]
    rest = found[len(kept) :]
    return found.startswith(kept) and (b"\n" not in rest[:-1] or b"\0" in rest) and (not rest.endswith(b"\n") or b"\0" in rest)


def _below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*.parquet*")}


def _questioned(root: Path) -> str:
    reader = StoreReader(root, threads=1)
    try:
        rows = reader.requests(EVERYTHING)
        count = reader.count(RequestFilter())
    except StoreDamagedError as error:
        held(len(str(error)) < 1000, "a long error")
        return "questions refused"
    finally:
        reader.close()
    held(all(row in ROWS for row in rows), "a row that nobody stored")
    held(count == len(rows), "the count is another")
    return "all rows" if len(rows) == len(ROWS) else f"{len(rows)} of {len(ROWS)} rows"


def _requested(root: Path, readable: bool) -> str:
    """Query the store and tell whether the answer is allowed.

    DuckDB checks no checksums (decision 0007): it may answer from a damaged file, if the undamaged part is the same.
    """
    reader = StoreReader(root, threads=1)
    try:
        rows = reader.requests(EVERYTHING)
    except StoreDamagedError:
        held(not readable, "a question to a readable store is refused")
        return "noticed, refused"
    finally:
        reader.close()
    same = [row for row in rows if row in ROWS]
    held(not readable or len(same) == len(ROWS), "rows are missing")
    held(len(same) >= len(ROWS) - 3, "rows of neighbours are other")
    return "read" if readable else "noticed, answered with other values" if len(same) < len(ROWS) else "noticed, answered"


def parquet(ctx: Context) -> Got:
    """Try damages of data files."""
    made = _Store(ctx.folder)

    def cases(rng: random.Random) -> tuple[str, Callable[[], str]]:
        how = rng.choice(sorted(ANYWHERE))
        file = rng.choice((*made.files, *made.spans))
        return how, lambda: made.try_parquet(file, ANYWHERE[how], rng)

    return _many(ctx, "files", cases, int(ctx.scale(300, 6000)))


def lines_lost(data: bytes, rng: random.Random) -> bytes:
    """Remove one whole line."""
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def last_line_turned(data: bytes, rng: random.Random) -> bytes:
    """Flip one bit of the last line."""
    start = data[:-1].rfind(b"\n") + 1
    return _xor(data, rng.randrange(start, len(data)), 1 << rng.randrange(8))


def lines_swapped(data: bytes, rng: random.Random) -> bytes:
    """Swap two lines."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines) - 1)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    return b"".join(lines)


MANIFESTS: Final[Mapping[str, Spoil]] = {
    **ANYWHERE,
    **{each.__name__: each for each in (lines_lost, last_line_turned, lines_swapped)},
}


def manifest(ctx: Context) -> Got:
    """Try damages of the manifest, which lists what the store holds."""
    made = _Store(ctx.folder)

    def cases(rng: random.Random) -> tuple[str, Callable[[], str]]:
        how = rng.choice(sorted(MANIFESTS))
        return how, lambda: made.try_manifest(MANIFESTS[how], rng)

    return _many(ctx, "manifests", cases, int(ctx.scale(500, 10_000)))


LEAST_PART: Final = 10
"""A valid trial tries at least one in this many of its damages.

On a busy machine the time ends before all damages are tried.
"""


# --- trials ---------------------------------------------------------------------------------------------------------------


def _many(ctx: Context, what: str, cases: Callable[[random.Random], tuple[str, Callable[[], str]]], most: int) -> Got:
    """Try up to ``most`` damages, each with its own seed, and count the outcomes."""
    rng = ctx.random()
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    done = 0
    end_s = time.monotonic() + 0.6 * ctx.left_s()
    with _quiet():
        while done < most and time.monotonic() < end_s:
            seed = rng.getrandbits(32)
            how, run = cases(random.Random(seed))
            done += 1
            try:
                outcomes[run()] += 1
            except Exception as error:
                failures[f"{how} (seed {seed}): {type(error).__name__}: {str(error)[:200]}"] += 1
    output = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common(6))
    if failures:
        return f"{done} damaged {what}: {output}; {sum(failures.values())} failures, first: {next(iter(failures))}", False
    return f"{done} damaged {what}: {output}; 0 failures", done >= most // LEAST_PART


class _quiet:  # noqa: N801 - a context manager named like a word
    """Silence the product's log: it reports each damage, and here are thousands."""

    def __enter__(self) -> None:
        self._before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        logging.disable(self._before)


def _trial(name: str, expected: str, run: Callable[[Context], Got], seconds: float, long_seconds: float) -> Trial:
    return Trial(
        name=f"damage.{name}", group="damage", expected=expected, seconds=seconds, long_seconds=long_seconds, beside=True, run=run
    )


TRIALS: Final = (
    _trial(
        "random_segments",
        "only what was written is read, losses lie in the damaged segment and are counted, none is removed, appends go on",
        segments,
        20,
        300,
    ),
    _trial("random_acknowledged", "what is not surely acknowledged is sent again, never skipped", acknowledged, 10, 100),
    _trial(
        "random_parquet",
        "the start goes on, the file is named and counted, its neighbours are folded and read, no file is removed",
        parquet,
        40,
        600,
    ),
    _trial("random_manifest", "every row, or a refusal that says what to do; no file is removed", manifest, 30, 500),
)
