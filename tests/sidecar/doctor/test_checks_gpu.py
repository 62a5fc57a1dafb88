"""GPU checks: peer access to memory, and what it means for a hand-off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from builders.doctor_facts import SOCKET, D, P, facts, found, gpus, host, port, same_host, setup, verdict, view
from handrail_doctor.checks.result import CheckStatus
from handrail_doctor.facts import ANY, SIDES, DoctorOptions, Facts, GpusFacts, P2pStatus, Placement

BOTH = frozenset(SIDES)


def on_gpus(given: GpusFacts, **more: Any) -> Facts:
    return same_host(host=host(here=BOTH, gpus=given, **more))


def test_peers_pass() -> None:
    finding = found(on_gpus(gpus(nvlink=True)), "gpu.p2p")
    assert finding is not None
    assert (finding.verdict, finding.seen) == (CheckStatus.PASS, "reads are OK between 1 pair of GPUs")


@pytest.mark.parametrize("status", [each for each in P2pStatus if each is not P2pStatus.OK])
def test_B02_gpus_that_are_no_peers_fail(status: P2pStatus) -> None:
    finding = found(on_gpus(gpus(read=status)), "gpu.p2p")
    assert finding is not None
    assert finding.verdict is CheckStatus.FAIL
    assert finding.seen == f"GPU 1 reads GPU 0: {status.value}"
    assert "1.3 s" in finding.why
    assert "topo -p2p r" in finding.do


def test_an_adapter_on_the_host_carries_what_peers_cannot() -> None:
    finding = found(on_gpus(gpus(read=P2pStatus.CHIPSET), rdma=(port(),)), "gpu.p2p")
    assert finding is not None
    assert finding.verdict is CheckStatus.WARN


def test_only_the_gpus_of_the_pair_count() -> None:
    given = gpus(4)
    bad = tuple(replace(pair, read=P2pStatus.TOPOLOGY) if 3 in (pair.source, pair.target) else pair for pair in given.p2p)
    whole = on_gpus(replace(given, p2p=bad))
    assert verdict(whole, "gpu.p2p") is CheckStatus.PASS
    on_three = replace(whole, options=DoctorOptions(tokens=1, gpus={P: (0,), D: (3,)}))
    assert verdict(on_three, "gpu.p2p") is CheckStatus.FAIL
    unknown = replace(whole, options=DoctorOptions(tokens=1))
    assert verdict(unknown, "gpu.p2p") is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", (0,)), ("1, 0", (1, 0)), ("GPU-0001", (1,)), ("GPU-00", None), ("GPU-ffff", None), ("MIG-1", None), ("", None)],
)
def test_cuda_visible_devices_by_number_or_uuid(visible: str, expected: tuple[int, ...] | None) -> None:
    engine = view(D, setup(D, env={**SOCKET, "CUDA_VISIBLE_DEVICES": visible}))
    assert same_host(engine, options=DoctorOptions(tokens=1)).gpus_of(D) == expected


def test_across_hosts_there_are_no_peers_to_judge() -> None:
    assert verdict(facts(host=host(gpus=gpus(read=P2pStatus.CHIPSET))), "gpu.p2p") is CheckStatus.SKIP


@pytest.mark.parametrize(
    ("given", "check"),
    [
        pytest.param(GpusFacts(missing="no libnvidia-ml.so.1 here", provide="the driver"), "gpu.p2p", id="no-nvml"),
        pytest.param(gpus(1), "gpu.p2p", id="one-gpu"),
        pytest.param(gpus(read=None), "gpu.p2p", id="the-driver-does-not-say"),
        pytest.param(gpus(0), "gpu.nvml", id="no-gpu"),
        pytest.param(GpusFacts(missing="x", provide="y"), "gpu.nvml", id="no-nvml-at-all"),
    ],
)
def test_what_cannot_be_seen_is_skipped_with_a_reason(given: GpusFacts, check: str) -> None:
    finding = found(on_gpus(given), check)
    assert finding is not None
    assert finding.verdict is CheckStatus.SKIP
    assert finding.seen


def test_refused_calls_are_named_once() -> None:
    finding = found(on_gpus(replace(gpus(), refused=("nvmlDeviceGetP2PStatus: Not Supported",))), "gpu.nvml")
    assert finding is not None
    assert finding.seen == "2 × NVIDIA X, driver 580.1; refused: nvmlDeviceGetP2PStatus: Not Supported"


def test_F01_mig_has_no_peers() -> None:
    assert verdict(on_gpus(gpus(mig=True)), "gpu.mig") is CheckStatus.FAIL
    assert found(on_gpus(gpus(mig=False)), "gpu.mig") is None
    assert found(on_gpus(gpus(mig=None)), "gpu.mig") is None


def test_links_that_are_down_warn_with_their_number() -> None:
    finding = found(on_gpus(gpus(nvlink=True, nvlinks=(12, 18))), "gpu.nvlink")
    assert finding is not None
    assert finding.verdict is CheckStatus.WARN
    assert "GPU 0: 12 of 18 up" in finding.seen
    assert verdict(on_gpus(gpus(nvlink=True)), "gpu.nvlink") is CheckStatus.PASS
    assert verdict(on_gpus(gpus()), "gpu.nvlink") is CheckStatus.PASS  # peers without NVLink are no fault


class TestPull:
    """Cases B01 and B10: a pull at 0.5 GB/s where the push has 49 GB/s.

    UCX reads over TCP without NVLink.
    """

    def test_B10_a_pull_without_nvlink_fails(self) -> None:
        finding = found(on_gpus(gpus()), "gpu.pull")
        assert finding is not None
        assert finding.verdict is CheckStatus.FAIL
        assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY is not set" in finding.seen
        assert "rma_am(tcp)" in finding.do

    @pytest.mark.parametrize("value", ["y", "on", "Yes", "1"])
    def test_B01_switched_on_it_passes(self, value: str) -> None:
        engine = view(D, setup(D, env={**SOCKET, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": value}))
        assert verdict(same_host(engine), "gpu.pull") is CheckStatus.PASS

    def test_what_may_be_set_where_it_runs_is_not_judged(self) -> None:
        assert verdict(same_host(view(D, setup(D, elsewhere=frozenset({ANY})))), "gpu.pull") is CheckStatus.SKIP

    def test_a_push_passes(self) -> None:
        assert verdict(same_host(view(D, setup(D, connector="NixlPushConnector"))), "gpu.pull") is CheckStatus.PASS

    def test_nvlink_an_adapter_and_another_host_are_no_case_of_it(self) -> None:
        assert found(on_gpus(gpus(nvlink=True)), "gpu.pull") is None
        assert found(on_gpus(gpus(), rdma=(port(),)), "gpu.pull") is None
        assert found(facts(host=host(gpus=gpus())), "gpu.pull") is None
        assert found(on_gpus(gpus(read=P2pStatus.CHIPSET)), "gpu.pull") is None  # the check gpu.p2p reports it


class TestGpuDirect:
    def whole(self, **more: Any) -> Facts:
        return facts(host=host(gpus=gpus(), rdma=(port(),), open_driver=False, **more))

    def test_peermem(self) -> None:
        assert verdict(self.whole(modules=frozenset({"nvidia_peermem"})), "gpu.gpudirect") is CheckStatus.PASS

    def test_dma_buf_needs_the_open_driver_and_a_kernel(self) -> None:
        assert verdict(self.whole(), "gpu.gpudirect") is CheckStatus.FAIL
        opened = facts(host=host(gpus=gpus(), rdma=(port(),), open_driver=True, kernel=(5, 12)))
        assert verdict(opened, "gpu.gpudirect") is CheckStatus.PASS
        old = facts(host=host(gpus=gpus(), rdma=(port(),), open_driver=True, kernel=(5, 4)))
        assert verdict(old, "gpu.gpudirect") is CheckStatus.FAIL

    def test_without_adapters_driver_or_sysfs_it_is_not_judged(self) -> None:
        assert found(facts(host=host(gpus=gpus())), "gpu.gpudirect") is None
        assert verdict(facts(host=host(rdma=(port(),), open_driver=None)), "gpu.gpudirect") is CheckStatus.SKIP
        assert verdict(self.whole(modules=None), "gpu.gpudirect") is CheckStatus.SKIP


def test_B18_a_narrow_link_is_reported_not_judged() -> None:
    """A card lowers its link when idle, so the width proves nothing before traffic."""
    finding = found(on_gpus(gpus(pcie_now=(1, 8))), "gpu.pcie")
    assert finding is not None
    assert finding.verdict is CheckStatus.SKIP
    assert "x8 of x16" in finding.seen
    assert found(on_gpus(gpus()), "gpu.pcie") is None


def test_where_the_engines_stand_is_not_known() -> None:
    whole = replace(on_gpus(gpus(read=P2pStatus.CHIPSET)), placement=Placement.UNKNOWN)
    assert verdict(whole, "gpu.p2p") is CheckStatus.FAIL  # they may be on this host
