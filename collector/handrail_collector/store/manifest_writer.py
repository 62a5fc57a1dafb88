"""Write the manifest on disk: append lines, replace generations, cut torn ends."""

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
    """The manifest of a store, in memory and on disk, with a single writer.

    Its owner's lock guards every call. ``publishes`` and ``retired`` match the manifest on disk, after an error too.
    """

    def __init__(self, folder: DurableDir) -> None:
        self.publishes: list[PublishRecord] = []
        self.retired: list[Retired] = []
        self._folder = folder
        self._path = folder.root / MANIFEST
        self._bytes = 0
        self._torn = False

    def load(self) -> None:
        """Read the manifest, or begin a new one.

        Raises ``StoreDamagedError`` and ``OSError``. Nothing may rely on the manifest before ``settle``.
        """
        data = self._folder.read(self._path)
        parsed = parse(data, str(self._path))
        self._bytes = parsed.whole_bytes
        if not self._bytes:
            self._begin()
        self.publishes = list(parsed.publishes)
        self.retired = [retired for publish in parsed.publishes for retired in publish.retired]

    def _begin(self) -> None:
        """Write the first line, durable before any data file exists.

        A lost manifest is therefore never mistaken for one that was not written yet.
        """
        require_new(self._folder.root)
        line = encode_line(OPENING)
        self._folder.put(self._path, line)
        self._folder.files.fsync_dir(str(self._folder.root))
        self._bytes = len(line)

    def settle(self) -> None:
        """Cut the manifest to its whole lines and sync it.

        The last process may have written lines that are not on disk yet; from now on others rely on them.
        """
        self._cut()

    def repair(self) -> None:
        """Undo what a failed write may have left, before anything relies on the manifest.

        Raises ``FolderGoneError`` when someone removed the manifest.
        """
        self._require_there()
        if self._torn:
            self._cut()

    def append(self, publish: PublishRecord) -> None:
        """Append one line, durable on return."""
        line = encode_line(publish)
        self._require_there()
        self._torn = True
        try:
            with self._folder.opened(str(self._path)) as handle:
                self._folder.write_all(handle, line)
                self._folder.files.fdatasync(handle)
        except OSError:
            with contextlib.suppress(OSError):  # a failed cut is repeated at the next publish or start
                self._cut()
            raise
        self._bytes += len(line)
        self._torn = False
        self.publishes.append(publish)

    def rewrite(self, gone: Collection[str], added: Sequence[PublishRecord], retired: list[Retired]) -> None:
        """Replace the manifest by its next generation."""
        self.repair()
        publishes = rewritten(self.publishes, gone, added, retired)
        data = b"".join(map(encode_line, publishes or (OPENING,)))
        self._folder.put(self._path, data)
        self._torn = True  # no append until the new name is durable: the old manifest might come back
        self._bytes, self.publishes, self.retired = len(data), list(publishes), retired
        self._folder.files.fsync_dir(str(self._folder.root))
        self._torn = False

    def _require_there(self) -> None:
        """Raise ``FolderGoneError`` when someone removed or cut the manifest.

        A new file in its place would pass for the whole store.
        """
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
        """Remove the temporary file that a crash may have left."""
        temporary = self._path.with_name(f"{MANIFEST}{TEMPORARY}")
        if temporary.exists():
            self._folder.files.unlink(str(temporary))

    def _cut(self) -> None:
        files = self._folder.files
        with self._folder.opened(str(self._path)) as handle:
            if files.size(handle) > self._bytes:
                files.truncate(handle, self._bytes)
            files.fdatasync(handle)
        files.fsync_dir(str(self._folder.root))  # makes the name of a new generation durable
        self._torn = False
