"""Value made from files, and made again when they change.

It serves certificates and tokens, without a restart. Files are compared by content, so any way to replace them works: written
over, renamed, or a symbolic link turned to another folder, as Kubernetes does. New content is taken over whole or not at all.
Unusable content leaves the former in use, and is logged once two looks in a row have seen it: certificate and key are seldom
replaced in the same instant.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Interval between looks at the files.

A change takes effect at most this much later; a bad one is logged after twice as long.
"""

MOST_BYTES: Final = 4 << 20  # of one file; the largest bundles of authorities have a quarter of a megabyte
_TRIES: Final = 3  # at start, for files that are being replaced just then

Contents = Mapping[str, bytes]
"""Contents of the files, by the setting that names each."""

T = TypeVar("T")


class ReloadingFile(Generic[T]):
    """Value made from files; ``poll`` reads them again.

    ``use``: the purpose of the value, in logs and metrics. ``files``: by the setting that names each. ``secrets``: those of them
    that other users must not be able to read. ``make`` raises ``ValueError`` with the setting.
    Construction reads the files; it raises the errors of ``make``, and ``OSError`` for a file that cannot be read. ``poll`` runs
    in one thread at a time, any; ``value`` is replaced whole.
    """

    def __init__(
        self, use: str, files: Mapping[str, Path], make: Callable[[Contents], T], *, secrets: frozenset[str] = frozenset()
    ) -> None:
        self.use = use
        self.files = dict(files)
        self.reloads = 0
        self.refusals = 0
        self.refused = ""  # why the newest content is not used; '' where it is
        self._make = make
        self._secrets = secrets
        self._seen = b""  # digest of the contents that made `value`
        self._unusable = ""  # the problem at the last look
        self._open_to_all: set[str] = set()  # secrets for which that was logged
        self.value = self._first()

    def poll(self) -> bool:
        """Read the files; True when ``value`` is a new one."""
        try:
            contents = self._read()
            digest = _digest(contents)
            if digest == self._seen:
                self._settled()
                return False
            value = self._make(contents)
        except (OSError, ValueError) as error:
            self._fault(str(error))
            return False
        if _digest(self._read_again(contents)) != digest:
            return False  # replaced meanwhile; the next look sees it whole
        self.value, self._seen = value, digest
        self.reloads += 1
        self._settled()
        log.info("%s: %s has changed; the new content is in use", self.use, self._named())
        return True

    def _first(self) -> T:
        for _ in range(_TRIES):
            contents = self._read()
            value = self._make(contents)
            self._seen = _digest(contents)
            if _digest(self._read_again(contents)) == self._seen:
                break
        return value

    def _settled(self) -> None:
        if self.refused:
            log.info("%s: %s is usable again", self.use, self._named())
        self.refused = self._unusable = ""

    def _fault(self, problem: str) -> None:
        if problem == self._unusable and problem != self.refused:
            self.refused = problem
            self.refusals += 1
            log.error("%s: the changed file is not usable, so the previous content stays in use: %s", self.use, problem)
        self._unusable = problem

    def _named(self) -> str:
        return ", ".join(str(path) for path in self.files.values())

    def _read(self) -> dict[str, bytes]:
        return {setting: self._content(setting, path) for setting, path in self.files.items()}

    def _read_again(self, former: Contents) -> Contents:
        """Read the files again; return ``former`` where one has gone meanwhile.

        The next look sees that.
        """
        try:
            return self._read()
        except (OSError, ValueError):
            return former

    def _content(self, setting: str, path: Path) -> bytes:
        # Without O_NONBLOCK a named pipe would block open().
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise type(error)(f"{setting}: {path} cannot be read: {error.strerror}") from None
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError(f"{setting}: {path} is not a file")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MOST_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(content) > MOST_BYTES:
            raise ValueError(f"{setting}: {path} is larger than {MOST_BYTES >> 20} MiB")
        self._mind_mode(setting, path, mode)
        return content

    def _mind_mode(self, setting: str, path: Path, mode: int) -> None:
        if setting not in self._secrets or not mode & stat.S_IROTH:
            self._open_to_all.discard(setting)
        elif setting not in self._open_to_all:
            self._open_to_all.add(setting)
            log.warning("%s: %s can be read by everyone on this host: chmod o-rwx %s", setting, path, path)


class Watcher:
    """Look at the watched files in a thread, off the loop.

    A file on a share that hangs must not hold up a request. ``shutdown`` works without ``start`` and twice.
    """

    def __init__(self, watched: Sequence[ReloadingFile[Any]], interval_s: float = LOOK_S) -> None:
        self._watched = tuple(watched)
        self._interval_s = interval_s
        self._stop = asyncio.Event()
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._watched:
            self._task = asyncio.create_task(self._run())

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._interval_s)
            await self._look()

    async def _look(self) -> None:
        try:
            for each in self._watched:
                await asyncio.to_thread(each.poll)
        except Exception:  # e.g. no thread is left; the next look is in a moment
            if not self._failing:
                log.exception("checking the files of certificates and tokens failed")
            self._failing = True
        else:
            self._failing = False


def _digest(contents: Contents) -> bytes:
    """Digest of contents, so that no key is kept for comparison."""
    whole = hashlib.sha256()
    for setting, content in contents.items():
        whole.update(f"{setting}:{len(content)}:".encode())
        whole.update(content)
    return whole.digest()
