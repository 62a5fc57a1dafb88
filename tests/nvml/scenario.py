"""Write scenario files: what the fake GPUs return over time.

A line holds one fact. A fact after ``at SECONDS`` holds from that time on.

    count N | count_told N | driver VERSION | nvml VERSION     count_told: the count that NVML reports, if different
    init CODE ...                        results of successive nvmlInit calls, the last one stays; without it 0
    at S driver_gone CODE SECONDS|never  calls fail from S on; a new driver, and a new session, are needed after that
    gpu WHICH name TEXT | uuid TEXT | pci BUS
    gpu WHICH mig N                      N MIG devices, addressed as GPU.MIG
    gpu WHICH set KEY VALUE [rate PER_SECOND] [bits N] [type NVML_VALUE_TYPE]     VALUE -: goes on from where it is
    gpu WHICH error CALL CODE            0 ends it
    gpu WHICH hang CALL SECONDS|released calls that begin while it lasts return when it is over
    gpu WHICH latency CALL SECONDS       slept in real time only; the last line that fits a call counts
    gpu WHICH process PID BYTES|none | xid CODE

``WHICH``: ``*``, ``3``, ``0-7`` or ``0.1``. ``CALL``: nvml.h's name without ``nvmlDeviceGet``, ``field.ID``, or ``*`` for all.
Values are in NVML's units. A key that is not set is Not Supported: ``utilization``, ``memory.total``, ``power``, ``clock.1``,
``field.197``, ``field.138:all``, ``gpm.2`` and so on (fake_nvml.c).
"""

from __future__ import annotations

from pathlib import Path

UNSIGNED_INT, UNSIGNED_LONG_LONG, DOUBLE, SIGNED_INT = 1, 3, 0, 5
NOT_SUPPORTED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GPU_IS_LOST, MISMATCH, UNKNOWN = 3, 9, 12, 15, 18, 999


class Scenario:
    """A scenario's lines, oldest first."""

    def __init__(self, *lines: str, count: int = 1) -> None:
        self.lines = [f"count {count}", *lines]

    def add(self, *lines: str) -> Scenario:
        self.lines += lines
        return self

    def write(self, path: Path) -> Path:
        path.write_text("\n".join(self.lines) + "\n", encoding="utf-8", errors="surrogateescape")  # a driver may return anything
        return path


def h100(count: int = 1) -> Scenario:
    """Build GPUs that answer as an H100 SXM does, as far as nvml.h documents it.

    They have everything: 18 NVLinks, PCIe 5 x16, GPM.
    """
    gpm = {2: 41.5, 3: 22.0, 5: 30.25, 10: 63.0, 20: 100.0, 21: 200.0, 60: 3000.0, 61: 2900.0}
    return Scenario(
        "gpu * name NVIDIA H100 80GB HBM3",
        "gpu * set utilization 87",
        "gpu * set utilization.memory 35",
        *memory(total=85_899_345_920, used=40_000_000_000, reserved=600_000_000),
        "gpu * set power 512500",
        "gpu * set power.limit 700000",
        "gpu * set temperature.0 61",
        "gpu * set clock.1 1755",
        "gpu * set clock.2 2619",
        "gpu * set clock.max.1 1980",
        "gpu * set clock.max.2 2619",
        "gpu * set reasons 4",
        "gpu * set reasons.supported 511",
        "gpu * set pcie.generation 5",
        "gpu * set pcie.generation.max 5",
        "gpu * set pcie.width 16",
        "gpu * set pcie.width.max 16",
        f"gpu * set field.186 530000 type {UNSIGNED_INT}",
        f"gpu * set field.82 58 type {UNSIGNED_INT}",
        "gpu * set field.83 9000000000 rate 530000",
        *(
            f"gpu * set field.{policy} 1000000 rate {rate}"
            for policy, rate in ((74, 50_000_000), (75, 0), (76, 0), (77, 0), (79, 0))
        ),
        "gpu * set field.197 4000000000 rate 3000000000",
        "gpu * set field.198 17000000000 rate 25000000000",
        "gpu * set field.138:all 1000000 rate 90000000",
        "gpu * set field.139:all 5000000 rate 180000000",
        f"gpu * set field.90 25000 type {UNSIGNED_INT}",
        f"gpu * set field.91 18 type {UNSIGNED_INT}",
        *(f"gpu * set field.{each} 0" for each in (3, 4, 38, 45, 52, 59, 94, 142, 143, 144, 145)),
        *(f"gpu * set gpm.{metric} {value}" for metric, value in gpm.items()),
        "gpu * process 4242 39000000000",
        count=count,
    )


def l40s(count: int = 1) -> Scenario:
    """Build GPUs that answer as an L40S does: no NVLink, no GPM, PCIe 4.

    Their byte counters are 32 bits wide here.
    """
    return Scenario(
        "gpu * name NVIDIA L40S",
        "gpu * set utilization 12",
        *memory(total=48_305_799_168, used=20_000_000_000, reserved=500_000_000),
        "gpu * set power 120000",
        "gpu * set power.limit 350000",
        "gpu * set temperature.0 44",
        "gpu * set clock.1 2520",
        "gpu * set clock.2 9001",
        "gpu * set clock.max.1 2520",
        "gpu * set clock.max.2 9001",
        "gpu * set reasons 1",
        "gpu * set reasons.supported 511",
        "gpu * set pcie.generation.max 4",
        "gpu * set pcie.width.max 16",
        "gpu * set field.83 1000000000 rate 120000",
        f"gpu * set field.197 4294000000 rate 25000000000 bits 32 type {UNSIGNED_INT}",
        f"gpu * set field.198 0 rate 1000000000 bits 32 type {UNSIGNED_INT}",
        "gpu * set field.94 2",
        count=count,
    )


def memory(*, total: int, used: int, reserved: int = 0, which: str = "*") -> tuple[str, ...]:
    """Return the scenario lines of one device's memory, in bytes."""
    named = {"total": total, "used": used, "reserved": reserved}
    return tuple(f"gpu {which} set memory.{name} {value}" for name, value in named.items())
