"""The manifest on disk, as its one writer keeps it: lines appended, generations put in each other's place, torn ends cut off."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Sequence

from handrail.wal.log import FolderGoneError
from handrail_collector.store.durable_dir import TEMPORARY, DurableDir
from handrail_collector.store.manifest import (
    MANIFEST,
    OPENING,
    PublishRecord,
    Retired,
    encode_line,
    parse,
    require_new,
    rewritten,
)


class ManifestWriter:
    """What the store holds, in memory and on disk. Its owner's lock guards every call.

    ``publishes`` and ``retired`` are what the manifest on disk says; after an error too.
    """

    def __init__(self, folder: DurableDir) -> None:
        self.publishes: list[PublishRecord] = []
        self.retired: list[Retired] = []
        self._folder = folder
        self._path = folder.root / MANIFEST
        self._bytes = 0
        self._torn = False

    def load(self) -> None:
        """Read it; begin a new one. Raises ``StoreDamagedError`` and ``OSError``. Nothing may rely on it before ``settle``."""
        data = self._folder.read(self._path)
        parsed = parse(data, str(self._path))
        self._bytes = parsed.whole_bytes
        if not self._bytes:
            self._begin()
        self.publishes = list(parsed.publishes)
        self.retired = [retired for publish in parsed.publishes for retired in publish.retired]

    def _begin(self) -> None:
        """A first line, durable before any data file, so that a manifest that is lost is not taken for one not written yet."""
        require_new(self._folder.root)
        line = encode_line(OPENING)
        self._folder.put(self._path, line)
        self._folder.files.fsync_dir(str(self._folder.root))
        self._bytes = len(line)

    def settle(self) -> None:
        """Leave only whole lines, durable: what the last process wrote may not be on disk yet, and is about to be relied on."""
        self._cut()

    def repair(self) -> None:
        """Make good what a failed write may have left; before anything relies on this manifest.

        Raises ``FolderGoneError`` where someone took the manifest away.
        """
        self._require_there()
        if self._torn:
            self._cut()

    def append(self, publish: PublishRecord) -> None:
        """One more line, durable when this returns."""
        line = encode_line(publish)
        self._require_there()
        self._torn = True
        try:
            with self._folder.opened(str(self._path)) as handle:
                self._folder.write_all(handle, line)
                self._folder.files.fdatasync(handle)
        except OSError:
            with contextlib.suppress(OSError):  # else at the next publish or start
                self._cut()
            raise
        self._bytes += len(line)
        self._torn = False
        self.publishes.append(publish)

    def rewrite(self, gone: Collection[str], added: Sequence[PublishRecord], retired: list[Retired]) -> None:
        """Put the next generation of the manifest in the place of this one."""
        self.repair()
        publishes = rewritten(self.publishes, gone, added, retired)
        data = b"".join(map(encode_line, publishes or (OPENING,)))
        self._folder.put(self._path, data)
        self._torn = True  # until its name is durable nothing may be appended: the old one might come back
        self._bytes, self.publishes, self.retired = len(data), list(publishes), retired
        self._folder.files.fsync_dir(str(self._folder.root))
        self._torn = False

    def _require_there(self) -> None:
        """Raise ``FolderGoneError`` where someone took it away or cut it: a new file here would pass for the whole store."""
        files = self._folder.files
        try:
            handle = files.open_read(str(self._path))
        except FileNotFoundError:
            size = -1
        else:
            try:
                size = files.size(handle)
            finally:
                files.close(handle)
        if size < self._bytes:
            raise FolderGoneError(errno.ENOENT, "deleted or replaced while in use", str(self._path))

    def remove_temporary(self) -> None:
        """What a crash may have left beside it."""
        temporary = self._path.with_name(f"{MANIFEST}{TEMPORARY}")
        if temporary.exists():
            self._folder.files.unlink(str(temporary))

    def _cut(self) -> None:
        files = self._folder.files
        with self._folder.opened(str(self._path)) as handle:
            if files.size(handle) > self._bytes:
                files.truncate(handle, self._bytes)
            files.fdatasync(handle)
        files.fsync_dir(str(self._folder.root))  # the name of a new generation
        self._torn = False
