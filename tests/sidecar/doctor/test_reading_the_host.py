"""Read the host: NVML with its errors, sysfs with gaps, and drivers that hang."""

from __future__ import annotations

import threading
from pathlib import Path

import pynvml  # type: ignore[import-untyped,unused-ignore]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles.doctor import CNS, ROCE_GIDS, FakeGpu, FakeNvml, add_driver, add_nic, add_rdma, h100, write
from handrail_doctor.facts import Gid, GpusFacts, P2pStatus, PairSide
from handrail_doctor.gather import sysfs
from handrail_doctor.gather.gpus import NvmlReader
from handrail_doctor.gather.host import packages, plugin_found, read_host, within

# --- NVML -------------------------------------------------------------------------------------------------------------------


def error(code: int) -> Exception:
    """Build pynvml's own error for that code."""
    made: Exception = pynvml.NVMLError(code)
    return made


def test_two_gpus_without_a_path_between_them() -> None:
    found = FakeNvml(gpus=[FakeGpu(p2p=CNS), FakeGpu(p2p=CNS)]).reader().read()
    assert (found.missing, found.driver, found.refused) == ("", "580.95.05", ())
    assert [(gpu.index, gpu.name, gpu.mig, gpu.nvlinks) for gpu in found.devices] == [
        (0, "NVIDIA L40S", None, (0, 0)),
        (1, "NVIDIA L40S", None, (0, 0)),
    ]
    assert [(pair.source, pair.target, pair.read, pair.nvlink) for pair in found.p2p] == [
        (0, 1, P2pStatus.CHIPSET, P2pStatus.NOT_SUPPORTED),
        (1, 0, P2pStatus.CHIPSET, P2pStatus.NOT_SUPPORTED),
    ]


def test_nvlinks_are_counted_and_their_rates_summed() -> None:
    found = FakeNvml(gpus=[FakeGpu(links=[True] * 17 + [False]), FakeGpu(links=[True] * 18)]).reader().read()
    assert [(gpu.nvlinks, gpu.nvlink_bytes_per_s) for gpu in found.devices] == [
        ((17, 18), 17 * 26_562 * 10**6),
        ((18, 18), 18 * 26_562 * 10**6),
    ]
    assert found.p2p[0].nvlink is P2pStatus.OK


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no libnvidia-ml.so.1 here"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver is not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "of different versions"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML: "),
    ],
)
def test_F05_a_driver_that_cannot_be_queried_is_a_reason(code: int, text: str) -> None:
    found = FakeNvml(init=error(code)).reader().read()
    assert text in found.missing
    assert found.devices == ()


def test_without_pynvml_it_says_what_to_install() -> None:
    def load() -> None:
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert NvmlReader(load).read().provide == "pip install 'handrail[gpu]'"


@pytest.mark.parametrize(
    "name",
    [
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlSystemGetDriverVersion",
    ],
)
@pytest.mark.parametrize("how", ["refused", "unknown", "absent"])
def test_F18_one_call_that_is_refused_costs_that_fact_alone(name: str, how: str) -> None:
    """A call that NVML refuses costs only its own fact; the GPUs stay.

    WSL and Jetson refuse some calls, and old bindings lack some.
    """
    whole = [FakeGpu(links=[True] * 4), FakeGpu(links=[True] * 4)]
    if how == "absent":
        nvml = FakeNvml(gpus=whole, missing=frozenset({name}))
    else:
        code = pynvml.NVML_ERROR_NOT_SUPPORTED if how == "refused" else pynvml.NVML_ERROR_UNKNOWN
        nvml = FakeNvml(gpus=whole, broken={name: error(code)})
    found = nvml.reader().read()
    assert [gpu.index for gpu in found.devices] == [0, 1]
    assert len([each for each in found.refused if each.startswith(name)]) <= 1
    if name == "nvmlDeviceGetP2PStatus":
        assert all(pair.read is None for pair in found.p2p)


def test_a_gpu_that_is_lost_between_calls_leaves_the_others() -> None:
    class Lost(FakeNvml):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index == 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return index

    found = Lost(gpus=[FakeGpu(), FakeGpu()]).reader().read()
    assert [gpu.index for gpu in found.devices] == [1]
    assert "nvmlDeviceGetHandleByIndex" in found.refused[0]


def test_the_count_itself_fails() -> None:
    found = FakeNvml(gpus=[FakeGpu()], broken={"nvmlDeviceGetCount": error(pynvml.NVML_ERROR_UNKNOWN)}).reader().read()
    assert found.missing.startswith("NVML: ")


def test_nvml_is_shut_down_again() -> None:
    nvml = FakeNvml(gpus=[FakeGpu()])
    nvml.reader().read()
    assert nvml.calls[-1] == "nvmlShutdown"


def test_the_numbers_of_capabilities_are_nvmls() -> None:
    """The numbers are NVML's: pynvml's NVML_P2P_CAPS_INDEX_READ is wrong.

    A stray comma makes it a tuple.
    """
    queries: set[int] = set()

    class Noting(FakeNvml):
        def nvmlDeviceGetP2PStatus(self, source: int, target: int, capability: int) -> int:
            queries.add(capability)
            return 0

    Noting(gpus=[FakeGpu(), FakeGpu()]).reader().read()
    assert queries == {0, pynvml.NVML_P2P_CAPS_INDEX_WRITE, pynvml.NVML_P2P_CAPS_INDEX_NVLINK}


# --- hanging ------------------------------------------------------------------------------------------------------------------


def test_F04_a_driver_that_hangs_costs_its_part_alone(tmp_path: Path) -> None:
    hang = threading.Event()

    class Hanging:
        def read(self) -> GpusFacts:
            hang.wait()
            return GpusFacts()

    add_rdma(tmp_path, "mlx5_0")
    try:
        found = read_host(frozenset({PairSide.DECODE}), Hanging(), tmp_path, timeout_s=2.0)
    finally:
        hang.set()
    assert "the driver hangs" in found.gpus.missing
    assert found.rdma is not None
    assert found.rdma[0].adapter == "mlx5_0"


def test_within_gives_the_answer() -> None:
    assert within(10.0, lambda: 3, 0) == 3


def test_this_python() -> None:
    assert "handrail" in packages()
    assert plugin_found()


# --- sysfs --------------------------------------------------------------------------------------------------------------------


def test_a_port_as_the_kernel_shows_it(tmp_path: Path) -> None:
    add_rdma(tmp_path, "mlx5_0", link_layer="Ethernet", rate="100 Gb/sec (2X HDR)", netdev="eth1", gids=ROCE_GIDS)
    ports = sysfs.rdma_ports(tmp_path)
    assert ports is not None
    (port,) = ports
    assert (port.key, port.state, port.active, port.physical) == ("mlx5_0:1", "ACTIVE", True, "LinkUp")
    assert (port.bits_per_s, port.lanes, port.link_layer, port.netdev) == (100e9, 2, "Ethernet", "eth1")
    assert port.gids == (
        Gid(index=0, address=ROCE_GIDS[0][0], kind="IB/RoCE v1"),
        Gid(index=3, address=ROCE_GIDS[3][0], kind="RoCE v2"),
    )


@pytest.mark.parametrize(
    ("rate", "bits", "lanes"),
    [
        ("400 Gb/sec (4X NDR)", 400e9, 4),
        ("2.5 Gb/sec (1X SDR)", 2.5e9, 1),
        ("100 Gb/sec", 100e9, None),
        ("0 Gb/sec (0X)", None, 0),
        ("", None, None),
        ("fast", None, None),
    ],
)
def test_rates(tmp_path: Path, rate: str, bits: float | None, lanes: int | None) -> None:
    add_rdma(tmp_path, "mlx5_0", rate=rate)
    (port,) = sysfs.rdma_ports(tmp_path) or ()
    assert (port.bits_per_s, port.lanes) == (bits, lanes)


def test_a_port_of_which_nothing_can_be_read_is_there_and_not_up(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/notes").mkdir()
    write(tmp_path, "sys/class/infiniband/README", "what is this")
    (port,) = sysfs.rdma_ports(tmp_path) or ()
    assert (port.key, port.active, port.bits_per_s, port.gids) == ("mlx5_0:1", False, None, ())


def test_no_folder_is_no_adapter_and_a_file_in_its_place_is_unread(tmp_path: Path) -> None:
    assert sysfs.rdma_ports(tmp_path) == ()
    write(tmp_path, "sys/class/infiniband", "a file")
    assert sysfs.rdma_ports(tmp_path) is None
    assert sysfs.modules(tmp_path) is None
    assert sysfs.open_driver(tmp_path) is None
    assert sysfs.kernel(tmp_path) is None


def test_interfaces(tmp_path: Path) -> None:
    add_nic(tmp_path, "eno1", speed="25000")
    add_nic(tmp_path, "eno2", speed="-1", state="down")
    add_nic(tmp_path, "veth0", speed="10000", physical=False)
    add_nic(tmp_path, "lo")
    write(tmp_path, "sys/class/net/bonding_masters", "")
    found = {nic.name: nic for nic in sysfs.nics(tmp_path)}
    assert set(found) == {"eno1", "eno2", "veth0"}
    assert (found["eno1"].bits_per_s, found["eno1"].mtu, found["eno1"].up, found["eno1"].physical) == (25e9, 9000, True, True)
    assert (found["eno2"].bits_per_s, found["eno2"].up) == (None, False)
    assert not found["veth0"].physical


def test_the_driver_and_the_kernel(tmp_path: Path) -> None:
    add_driver(tmp_path, modules=("nvidia", "nvidia_peermem"), open_modules=True, kernel="5.12.0-rc1")
    assert sysfs.modules(tmp_path) == frozenset({"nvidia", "nvidia_peermem"})
    assert sysfs.open_driver(tmp_path) is True
    assert sysfs.kernel(tmp_path) == (5, 12)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a first run builds tables of characters
@given(state=st.text(max_size=20), rate=st.text(max_size=20), gid=st.text(max_size=20))
def test_any_text_in_a_port_is_read(state: str, rate: str, gid: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("sys")
    encoded = [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for text in (state, rate, gid)]
    add_rdma(root, "mlx5_0", state=encoded[0], rate=encoded[1], gids={1: (encoded[2], "RoCE v2")})
    (port,) = sysfs.rdma_ports(root) or ()
    assert port.bits_per_s is None or port.bits_per_s > 0


def test_the_h100_host_is_read_whole(tmp_path: Path) -> None:
    found = read_host(frozenset({PairSide.DECODE}), h100(tmp_path).reader(), tmp_path, timeout_s=60.0)
    assert len(found.gpus.devices) == 8
    assert len(found.gpus.p2p) == 56
    assert found.rdma is not None
    assert [port.active for port in found.rdma] == [True] * 8
    assert found.modules is not None
    assert "nvidia_peermem" in found.modules
