"""Record a disk's operations, then compute what a crash before any of them leaves.

A crash is a power loss or the death of the process.
``RecordingFiles`` works on a real folder and notes every operation that changes something.
``Disk`` applies these notes one by one. At each moment it knows what exists and what of it is durable: bytes since the last sync
of their file, names since the last sync of their folder.
So ``left_by`` computes every state that a crash at that moment leaves.
Syncs are noted and not carried out: no real power loss happens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from handrail.wal.filesystem import OsFiles

MAX_LOOSE_NAMES = 4
"""Up to this many non-durable names, each one is also kept alone."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the disk.

    ``kind``: folder, create, write, truncate, sync, failed_sync, sync_folder, rename, unlink or remove_folder.
    """

    kind: str
    path: str
    data: bytes = b""
    size: int = 0
    target: str = ""


class RecordingFiles(OsFiles):
    """Files below ``root`` that record every change.

    ``before`` is called with each operation before it happens, and may make it fail.
    """

    def __init__(self, root: Path, before: Callable[[Operation], None] = lambda operation: None) -> None:
        self.done: list[Operation] = []
        self._root = root
        self._before = before
        self._paths: dict[int, str] = {}

    def make_dir(self, path: str) -> None:
        for folder in reversed([Path(path), *Path(path).parents]):
            if not folder.exists():
                self._note("folder", str(folder))
                folder.mkdir()
                self._did()

    def fsync_dir(self, path: str) -> None:
        self._note("sync_folder", path)
        self._did()

    def open_append(self, path: str) -> int:
        new = not os.path.exists(path)
        if new:
            self._note("create", path)
        fd = super().open_append(path)
        if new:
            self._did()
        self._paths[fd] = path
        return fd

    def write(self, fd: int, parts: tuple[bytes, ...]) -> int:
        self._note("write", self._paths[fd], data=b"".join(parts))
        written = super().write(fd, parts)
        self._did()
        return written

    def truncate(self, fd: int, size: int) -> None:
        if size != self.size(fd):
            self._note("truncate", self._paths[fd], size=size)
            super().truncate(fd, size)
            self._did()

    def fdatasync(self, fd: int) -> None:
        self._note("sync", self._paths[fd])
        self._did()

    def rename(self, old: str, new: str) -> None:
        self._note("rename", old, target=self._below(new))
        super().rename(old, new)
        self._did()

    def unlink(self, path: str) -> None:
        if os.path.exists(path):
            self._note("unlink", path)
        super().unlink(path)
        self._did()

    def remove_dir(self, path: str) -> None:
        self._note("remove_folder", path)
        super().remove_dir(path)
        self._did()

    def _below(self, path: str) -> str:
        return PurePosixPath(os.path.relpath(path, self._root)).as_posix()

    def _note(self, kind: str, path: str, *, data: bytes = b"", size: int = 0, target: str = "") -> None:
        self._next = Operation(kind, self._below(path), data, size, target)
        self._before(self._next)

    def _did(self) -> None:
        self.done.append(self._next)


@dataclass(slots=True, eq=False)
class Content:
    """The bytes of one file: as they are, and as a power loss would leave them."""

    now: bytes = b""
    durable: bytes = b""
    dropped: tuple[tuple[int, int], ...] = ()
    """Byte ranges whose sync failed.

    The kernel has forgotten them: a later sync that succeeds does not make them durable.
    """

    def synced(self) -> bytes:
        """Return the bytes that a sync makes durable."""
        data = bytearray(self.now)
        for start, stop in self.dropped:
            data[start:stop] = bytes(len(data[start:stop]))
        return bytes(data)


@dataclass(frozen=True, slots=True)
class NameChange:
    """A change of a folder's names.

    One name goes, one comes, or a name takes another's place.
    """

    folder: str
    gone: str = ""
    come: str = ""
    content: Content | None = None  # of the name that comes; None for a folder

    def apply(self, names: dict[str, Content | None]) -> None:
        """Apply the change to ``names``."""
        names.pop(self.gone, None)
        if self.come:
            names[self.come] = self.content


def _folder(path: str) -> str:
    return PurePosixPath(path).parent.as_posix()


@dataclass(slots=True)
class Disk:
    """Names below one folder, '.'; a folder is a name without content."""

    names: dict[str, Content | None] = field(default_factory=dict)
    durable_names: dict[str, Content | None] = field(default_factory=dict)
    loose: list[NameChange] = field(default_factory=list)

    def copy(self) -> Disk:
        """Return an independent copy."""
        twins: dict[int, Content] = {}

        def twin(content: Content | None) -> Content | None:
            if content is None:
                return None
            return twins.setdefault(id(content), Content(content.now, content.durable, content.dropped))

        def mapped(names: dict[str, Content | None]) -> dict[str, Content | None]:
            return {path: twin(content) for path, content in names.items()}

        loose = [replace(change, content=twin(change.content)) for change in self.loose]
        return Disk(mapped(self.names), mapped(self.durable_names), loose)

    def apply(self, operation: Operation) -> None:
        """Apply one operation."""
        path = operation.path
        folder = _folder(path)
        if operation.kind in ("folder", "create"):
            self._rename(NameChange(folder, come=path, content=None if operation.kind == "folder" else Content()))
        elif operation.kind in ("unlink", "remove_folder"):
            self._rename(NameChange(folder, gone=path))
        elif operation.kind == "rename":
            self._rename(NameChange(folder, gone=path, come=operation.target, content=self.names[path]))
        elif operation.kind == "sync_folder":
            for change in self.loose:
                if change.folder == path:
                    change.apply(self.durable_names)
            self.loose = [change for change in self.loose if change.folder != path]
        else:
            self._change(self._content(path), operation)

    def _rename(self, change: NameChange) -> None:
        change.apply(self.names)
        self.loose.append(change)

    def _content(self, path: str) -> Content:
        content = self.names[path]
        assert content is not None, path
        return content

    @staticmethod
    def _change(content: Content, operation: Operation) -> None:
        if operation.kind == "write":
            content.now += operation.data
        elif operation.kind == "truncate":
            content.now = content.now[: operation.size].ljust(operation.size, b"\0")
            content.dropped = tuple(
                (start, min(stop, operation.size)) for start, stop in content.dropped if start < operation.size
            )
        elif operation.kind == "failed_sync":
            content.dropped += ((len(content.durable), len(content.now)),)
        else:
            assert operation.kind == "sync", operation.kind
            content.durable = content.synced()

    def left_by(self, coming: Operation | None) -> Iterator[tuple[str, Disk]]:
        """Yield each state that a crash can leave, with its name.

        The crash happens before the operation ``coming``, or in the middle of it when it is a write.
        """
        yield "killed", self.copy()
        torn = self._with_half(coming)
        if torn is not None:
            yield "killed, torn write", torn
        yield "power lost, names too", self._without_power(self.durable_names, _durable)
        yield "power lost, names kept", self._without_power(self.names, _durable)
        if 1 < len(self.loose) <= MAX_LOOSE_NAMES:
            for change in self.loose:
                names = dict(self.durable_names)
                change.apply(names)
                yield "power lost, one name kept", self._without_power(names, _durable)
        for how, survives in (("half its bytes", _half), ("zeros for its bytes", _zeros)):
            yield f"power lost, {how}", (torn or self)._without_power((torn or self).names, survives)

    def _with_half(self, coming: Operation | None) -> Disk | None:
        if coming is None or coming.kind != "write" or len(coming.data) < 2:
            return None
        torn = self.copy()
        torn.apply(Operation("write", coming.path, coming.data[: len(coming.data) // 2]))
        return torn

    @staticmethod
    def _without_power(names: dict[str, Content | None], survives: Callable[[Content], bytes]) -> Disk:
        left: dict[str, Content | None] = {}
        for path, content in sorted(names.items()):
            if _folder(path) in (".", *left):
                data = b"" if content is None else survives(content)
                left[path] = None if content is None else Content(data, data)
        return Disk(left, dict(left))

    def write_to(self, root: Path) -> None:
        """Write the disk's files to a real folder."""
        root.mkdir(parents=True)
        for path, content in sorted(self.names.items()):
            if content is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(content.now)

    def key(self) -> bytes:
        """Return a digest that is equal for equal disks.

        It covers the state after a power loss as well.
        """
        digest = hashlib.blake2b(digest_size=16)
        for names in (self.names, self.durable_names):
            for path, content in sorted(names.items()):
                for data in () if content is None else (content.now, content.durable):
                    digest.update(b"%d " % len(data) + data)
                digest.update(path.encode() + b"\0")
        return digest.digest()

    def looks(self) -> bytes:
        """Return a digest that is equal for disks that look equal to a starting process."""
        left = Disk(self._without_power(self.names, _now).names)
        return left.key()


def _durable(content: Content) -> bytes:
    return content.durable


def _now(content: Content) -> bytes:
    return content.now


def _half(content: Content) -> bytes:
    loose = len(content.now) - len(content.durable)
    grown = loose > 0 and content.now.startswith(content.durable)
    return content.now[: len(content.durable) + loose // 2] if grown else content.durable


def _zeros(content: Content) -> bytes:
    grown = content.now.startswith(content.durable)
    return content.durable.ljust(len(content.now), b"\0") if grown else content.durable
