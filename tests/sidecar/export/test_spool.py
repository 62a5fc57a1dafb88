"""The spool keeps order, is bounded, and survives the death of its process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from doubles.crash_files import CrashFiles
from handrail.otlp.signals import Signal
from handrail.wal.log import Full
from handrail_sidecar.export.spool import Spool, Spooled

MIB = 1 << 20


def drained(spool: Spool) -> list[bytes]:
    found = []
    while (batch := spool.first()) is not None:
        found.append(batch.payload)
        spool.acknowledge(batch.next_offset)
    return found


@pytest.fixture(params=["disk", "memory"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Spool:
    return Spool(tmp_path if request.param == "disk" else None, MIB)


def test_first_in_first_out(spool: Spool) -> None:
    for number, signal in enumerate((*Signal, *Signal)):
        spool.put(signal, b"%d" % number, number)
    assert spool.first() == spool.first() == Spooled(0, 29, Signal.TRACES, 0, b"0")
    assert drained(spool) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert spool.waiting_bytes == 0
    spool.close()


def test_full_refuses_the_newest_and_room_comes_back(spool: Spool) -> None:
    for number in range(20):
        spool.put(Signal.TRACES, bytes([number]) * 50_000, 0)
    with pytest.raises(Full):
        spool.put(Signal.TRACES, bytes(50_000), 0)
    for _ in range(4):
        batch = spool.first()
        assert batch is not None
        spool.acknowledge(batch.next_offset)
    spool.put(Signal.TRACES, b"again", 0)
    assert [payload[:1] for payload in drained(spool)] == [bytes([n]) for n in range(4, 20)] + [b"a"]
    spool.close()


def test_space_does_not_leak_over_many_batches(spool: Spool) -> None:
    for number in range(200):
        spool.put(Signal.TRACES, bytes([number]) * 60_000, 0)
        assert drained(spool) == [bytes([number]) * 60_000]
    spool.close()


def test_what_is_too_large_is_an_error_at_once(spool: Spool) -> None:
    with pytest.raises(ValueError, match="above the limit"):
        spool.put(Signal.TRACES, bytes(MIB), 0)
    spool.close()


def test_a_restart_goes_on_after_the_last_acknowledged(tmp_path: Path) -> None:
    spool = Spool(tmp_path, MIB)
    for number in range(5):
        spool.put(Signal.TRACES, b"%d" % number, 0)
    for _ in range(2):
        batch = spool.first()
        assert batch is not None
        spool.acknowledge(batch.next_offset)
    spool.close()
    spool = Spool(tmp_path, MIB)
    assert drained(spool) == [b"2", b"3", b"4"]
    spool.close()


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"12x", b"-4"], ids=["empty", "zeros", "letters", "negative"])
def test_a_lost_acknowledgement_sends_again(tmp_path: Path, content: bytes) -> None:
    spool = Spool(tmp_path, MIB)
    spool.put(Signal.TRACES, b"a", 0)
    assert drained(spool) == [b"a"]
    spool.close()
    (tmp_path / "acknowledged").write_bytes(content)
    spool = Spool(tmp_path, MIB)
    assert drained(spool) == [b"a"]
    spool.close()


def test_a_turned_bit_in_the_acknowledgement_skips_nothing(tmp_path: Path) -> None:
    """A larger number would count as batches that the collector has."""
    whole = tmp_path / "whole"
    spool = Spool(whole, MIB)
    for number in range(4):
        spool.put(Signal.TRACES, b"%d" % number, 0)
    batch = spool.first()
    assert batch is not None
    spool.acknowledge(batch.next_offset)
    spool.close()
    acknowledged = (whole / "acknowledged").read_bytes()
    for bit in range(len(acknowledged) * 8):
        folder = tmp_path / str(bit)
        shutil.copytree(whole, folder)
        data = bytearray(acknowledged)
        data[bit // 8] ^= 1 << bit % 8
        (folder / "acknowledged").write_bytes(data)
        spool = Spool(folder, MIB)
        assert drained(spool)[-3:] == [b"1", b"2", b"3"], f"bit {bit}"
        spool.close()


def test_the_acknowledgement_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    spool = Spool(tmp_path, MIB)
    for number in range(3):
        spool.put(Signal.TRACES, b"%d" % number, 0)
    spool.close()
    (tmp_path / "acknowledged").write_bytes(b"29\n")
    spool = Spool(tmp_path, MIB)
    assert drained(spool) == [b"1", b"2"]
    spool.close()


def test_offsets_go_on_above_what_was_acknowledged_even_if_the_segments_are_gone() -> None:
    files = CrashFiles()
    spool = Spool("spool", MIB, files=files)
    spool.put(Signal.TRACES, b"x" * 100, 0)
    assert drained(spool) == [b"x" * 100]
    # A power loss that kept the acknowledgement and nothing else.
    for name in files.list_dir("spool"):
        if name.endswith(".seg"):
            files.unlink(f"spool/{name}")
    files._locked.clear()
    spool = Spool("spool", MIB, files=files)
    spool.put(Signal.TRACES, b"new", 0)
    assert drained(spool) == [b"new"]


def test_a_damaged_batch_is_passed_over_and_counted() -> None:
    files = CrashFiles()
    spool = Spool("spool", MIB, files=files)
    for number in range(3):
        spool.put(Signal.TRACES, b"%d" % number * 72, 0)
    files.damage(f"spool/{0:020d}.seg", 150)
    assert drained(spool) == [b"0" * 72, b"2" * 72]
    assert spool.damaged_bytes == 100


def test_a_damaged_end_is_no_end() -> None:
    files = CrashFiles()
    spool = Spool("spool", MIB, files=files)
    spool.put(Signal.TRACES, b"x" * 72, 0)
    files.damage(f"spool/{0:020d}.seg", 50)
    assert drained(spool) == []
    spool.put(Signal.TRACES, b"y", 0)
    assert drained(spool) == [b"y"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path, MIB)
    with pytest.raises(BlockingIOError):
        Spool(tmp_path, MIB)
    spool.close()
