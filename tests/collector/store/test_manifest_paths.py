"""Paths in a manifest and links below a store never lead out of it.

This holds for reading, compaction and retention.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders.store_rows import request_rows
from handrail.printable import is_printable
from handrail_collector.store.filters import PeriodQuery, RequestFilter
from handrail_collector.store.layout import is_data_path
from handrail_collector.store.maintenance import Upkeep, UpkeepSettings
from handrail_collector.store.manifest import MANIFEST, ManifestReader, PublishRecord, Retired, StoreDamagedError, encode_line
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.queries.scan import compared_requests
from handrail_collector.store.read import StoreReader

ROWS = request_rows(12)
LATER = 4_000_000_000 * 10**9
NAME = f"requests-000-{0:020d}-{10:020d}-000.parquet"
HOUR = "requests/day=2026-11-30/hour=00"

STRANGE = [
    "/etc/passwd",
    "../outside.parquet",
    "../../outside.parquet",
    f"{HOUR}/../../../../outside.parquet",
    f"requests/../../{NAME}",
    f"./{HOUR}/{NAME}",
    f"{HOUR}//{NAME}",
    f"{HOUR}/..",
    f"{HOUR}/.hidden.parquet",
    f"{HOUR}/*.parquet",
    f"{HOUR}/[a].parquet",
    f"{HOUR}/a\x00.parquet",
    f"{HOUR}/a\u202e.parquet",
    f"{HOUR}/a\n.parquet",
    f"{HOUR}/{NAME}\n",
    f"{HOUR}/{'a' * 300}.parquet",
    f"{HOUR}/manifest.jsonl",
    f"requests/day=2026-13-30/hour=00/{NAME}",
    f"requests/day=2026-11-30/hour=24/{NAME}",
    f"requests/day=٢٠٢٦-11-30/hour=00/{NAME}",
    f"journal/day=2026-11-30/hour=00/{NAME}",
    f"spans/day=2026-11-30/hour=00/{NAME}",  # not of the table that the line names
    "s3://bucket/a.parquet",
    "",
]


def made(root: Path) -> Path:
    """Return a store with one publish."""
    publisher = StorePublisher(root / "store")
    publisher.open()
    publisher.publish(0, 10, 10, [], ROWS)
    publisher.close()
    return root / "store"


def change_line(store: Path, change: Callable[[PublishRecord], PublishRecord]) -> None:
    (publish,) = ManifestReader(store).publishes()
    (store / MANIFEST).write_bytes(encode_line(change(publish)))


def every_question(store: Path) -> None:
    reader = StoreReader(store, threads=1)
    try:
        reader.requests(RequestFilter())
        reader.find("anything")
        list(compared_requests(store, PeriodQuery()))
    finally:
        reader.close()


@pytest.mark.parametrize("path", STRANGE)
def test_a_line_that_names_such_a_path_is_refused_and_nothing_is_touched(tmp_path: Path, path: str) -> None:
    store = made(tmp_path)
    outside = tmp_path / "outside.parquet"
    outside.write_bytes(b"not ours")
    change_line(store, lambda publish: replace(publish, files=(replace(publish.files[0], path=path),)))
    refused(store, outside)


@pytest.mark.parametrize("path", [each for each in STRANGE if not each.startswith("spans/")])
def test_retention_removes_nothing_outside(tmp_path: Path, path: str) -> None:
    store = made(tmp_path)
    outside = tmp_path / "outside.parquet"
    outside.write_bytes(b"not ours")
    change_line(store, lambda publish: replace(publish, retired=(Retired(path, 1),)))
    refused(store, outside)


def refused(store: Path, outside: Path) -> None:
    before = (store / MANIFEST).read_bytes()
    with pytest.raises(StoreDamagedError, match="which is no place for a data file") as error:
        StorePublisher(store).open()
    assert is_printable(str(error.value).replace("\n", ""))
    with pytest.raises(StoreDamagedError):
        every_question(store)
    assert outside.read_bytes() == b"not ours"
    assert (store / MANIFEST).read_bytes() == before
    assert len(list(store.rglob(f"*{NAME}"))) == 1


@given(
    st.text(max_size=30) | st.from_regex(r"(requests|spans)/day=[0-9-]{10}/hour=[0-9]{2}/[a-z./]{0,12}\.parquet", fullmatch=True)
)
def test_a_path_that_passes_stays_below_its_folder(path: str) -> None:
    if is_data_path(path):
        root = Path("/store")
        parts = Path(path).parts
        assert len(parts) == 4
        assert ".." not in parts
        assert (root / path).is_relative_to(root)
        assert str(root / path) == f"/store/{path}"


@pytest.mark.parametrize(
    "text", ["[]", "7", "{}", '{"v":5}', '{"v":"x","schema":1}', '{"v":5,"schema":1,"files":[{"table":"no"}]}']
)
def test_a_line_of_other_things_is_damage_and_no_fault(tmp_path: Path, text: str) -> None:
    store = made(tmp_path)
    (store / MANIFEST).write_bytes(b"%08x %s\n" % (zlib.crc32(text.encode()), text.encode()))
    with pytest.raises(StoreDamagedError):
        StorePublisher(store).open()


@pytest.mark.parametrize("depth", [1, 2, 3, 4], ids=["table", "day", "hour", "file"])
def test_a_link_below_the_store_is_not_followed(tmp_path: Path, depth: int) -> None:
    """A link below the store is not followed.

    What was there is moved out of the store and linked to, as somebody may do who wants our process to remove its files.
    """
    store = made(tmp_path)
    (file,) = store.rglob(NAME)
    inside = store.joinpath(*file.relative_to(store).parts[:depth])
    outside = tmp_path / "outside"
    publisher = StorePublisher(store, now_unix_ns=lambda: LATER)
    publisher.open()
    inside.rename(outside)
    inside.symlink_to(outside)
    kept = outside if outside.is_file() else next(outside.rglob(NAME))
    before = kept.read_bytes()
    upkeep = Upkeep(publisher, UpkeepSettings(retention_ns=1, grace_ns=0), lambda: LATER)
    for _ in range(3):
        upkeep.run_pass()
    with pytest.raises((StoreDamagedError, OSError)):
        publisher.remove_retired(0)
    assert kept.read_bytes() == before
    if depth < 4:
        with pytest.raises(OSError, match="is a link"):
            publisher.publish(10, 20, 20, [], [replace(ROWS[0], version=2)])
    publisher.close()
    with pytest.raises(StoreDamagedError, match="is a link"):
        StorePublisher(store).open()
    assert kept.read_bytes() == before


def test_a_start_removes_no_unfinished_file_behind_a_link(tmp_path: Path) -> None:
    store = made(tmp_path)
    outside = tmp_path / "outside" / "hour=00"
    outside.mkdir(parents=True)
    victim = outside / f"{NAME}.tmp"
    victim.write_bytes(b"not ours")
    (store / "requests" / "day=2001-01-01").symlink_to(outside.parent)
    publisher = StorePublisher(store)
    publisher.open()
    publisher.close()
    assert victim.read_bytes() == b"not ours"


def test_the_store_itself_may_be_a_link(tmp_path: Path) -> None:
    store = made(tmp_path / "disk")
    (tmp_path / "store").symlink_to(store)
    every_question(tmp_path / "store")
    publisher = StorePublisher(tmp_path / "store")
    publisher.open()
    publisher.publish(10, 20, 20, [], [replace(ROWS[0], version=2)])
    publisher.close()
