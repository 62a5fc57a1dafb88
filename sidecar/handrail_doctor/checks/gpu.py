"""Checks of the GPUs: peer access, its transport, and RDMA reach.

They check which GPU may read whose memory, over what, and whether RDMA adapters reach it.
The placement of the engines decides which checks matter: within one host the KV goes from GPU to GPU, across hosts through
adapters.
"""

from __future__ import annotations

from collections.abc import Iterator

from handrail_doctor.checks.result import CheckResult, failed, passed, skipped, warned
from handrail_doctor.facts import Facts, P2pStatus, PairSide, Placement
from handrail_doctor.transports import (
    chosen,
    connector,
    get_zcopy,
    get_zcopy_elsewhere,
    has_rdma,
    pairs_of,
    pull_falls_to_tcp,
    pulls_over_cuda_ipc,
    used,
)

_STAGED = (
    "without peer-to-peer every block is copied through host memory: 470 MB took 1.3 s on two L40S, and the median time to first "
    "token went from 0.7 s to 2.2 s (vLLM's guide to splitting prefill from decode)"
)


def check_devices(facts: Facts) -> CheckResult:
    """Check that NVML answers, and show the GPUs that it names."""
    check, title = "gpu.nvml", "GPUs"
    gpus = facts.host.gpus
    if gpus.missing:
        return skipped(check, title, gpus.missing, gpus.provide)
    if not gpus.devices:
        return skipped(
            check, title, "NVML answers but lists no GPU", "give this container the GPUs (NVML ignores CUDA_VISIBLE_DEVICES)"
        )
    kinds: dict[str, int] = {}
    for gpu in gpus.devices:
        kinds[gpu.name or "unnamed"] = kinds.get(gpu.name or "unnamed", 0) + 1
    named = ", ".join(f"{count} × {name}" for name, count in kinds.items())
    refused = f"; refused: {', '.join(gpus.refused)}" if gpus.refused else ""
    return passed(check, title, f"{named}, driver {gpus.driver or 'unknown'}{refused}")


def check_mig(facts: Facts) -> CheckResult | None:
    """Check that no GPU is a MIG slice, which has no peer-to-peer."""
    sliced = [gpu for gpu in used(facts) if gpu.mig]
    if not sliced:
        return None
    names = ", ".join(f"GPU {gpu.index}" for gpu in sliced)
    return failed(
        "gpu.mig",
        "MIG",
        f"MIG is on: {names}",
        why="MIG slices have neither peer-to-peer nor NVLink, so a hand-off goes through host memory",
        do="nvidia-smi -i INDEX -mig 0 for the GPUs of the pair, or serve both phases on one slice",
    )


def check_p2p(facts: Facts) -> CheckResult:
    """Check that D's GPUs may read P's memory.

    The result is what ``nvidia-smi topo -p2p r`` shows between P's and D's GPUs.
    """
    check, title = "gpu.p2p", "peer-to-peer between the GPUs"
    if facts.placement is Placement.ACROSS_HOSTS:
        return skipped(check, title, "the engines are on different hosts: their GPUs are not peers")
    if facts.host.gpus.missing:
        return skipped(check, title, "only NVML shows it")
    pairs = pairs_of(facts)
    if not pairs:
        return skipped(
            check, title, _no_pairs(facts), "--prefill-gpus and --decode-gpus, or run the doctor on a host with both GPUs"
        )
    unsaid = [pair for pair in pairs if pair.read is None]
    bad = [pair for pair in pairs if pair.read not in (P2pStatus.OK, None)]
    if bad:
        shown = "; ".join(f"GPU {pair.source} reads GPU {pair.target}: {pair.read.value}" for pair in bad[:4] if pair.read)
        more = f"; and {len(bad) - 4} pairs more" if len(bad) > 4 else ""
        if has_rdma(facts):
            seen = f"{shown}{more}; an RDMA adapter is up and can carry the KV within the host"
            return warned(check, title, seen, why=_STAGED, do="check that the UCX log names rc or dc, not tcp, in its rma lanes")
        return failed(
            check,
            title,
            f"{shown}{more}",
            why=_STAGED,
            do="use GPUs between which nvidia-smi topo -p2p r shows OK: with NVLink, or on a board that allows PCIe peers "
            "(ACS and IOMMU off); otherwise use an RDMA adapter, or keep prefill and decode on the same GPUs",
        )
    if unsaid:
        return skipped(
            check, title, f"the driver gives no answer for {len(unsaid)} of {len(pairs)} pairs", "nvidia-smi topo -p2p r"
        )
    text = "" if chosen(facts) else " (which GPUs the engines use is not known, so all)"
    return passed(check, title, f"reads are OK between {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} of GPUs{text}")


def check_nvlink(facts: Facts) -> CheckResult | None:
    """Check that the peers have NVLink, and that every link of them is up."""
    check, title = "gpu.nvlink", "NVLink"
    gpus = facts.host.gpus
    if gpus.missing or not gpus.devices:
        return None  # the result of gpu.nvml reports it
    down = [gpu for gpu in used(facts) if gpu.nvlinks and gpu.nvlinks[0] < gpu.nvlinks[1]]
    if down:
        shown = ", ".join(f"GPU {gpu.index}: {gpu.nvlinks[0]} of {gpu.nvlinks[1]} up" for gpu in down if gpu.nvlinks)
        return warned(
            check,
            title,
            shown,
            why="without the link its share of the bandwidth is missing, between two GPUs perhaps all of it",
            do="check nvidia-smi nvlink -s and dmesg (Xid 74); on some boards links without a partner are down on purpose",
        )
    if facts.placement is Placement.ACROSS_HOSTS:
        return None
    pairs = pairs_of(facts)
    linked = [pair for pair in pairs if pair.nvlink is P2pStatus.OK]
    if pairs and len(linked) == len(pairs):
        rates = [gpu.nvlink_bytes_per_s for gpu in used(facts) if gpu.nvlink_bytes_per_s]
        rate = f", {min(rates) / 1e9:.0f} GB/s each way" if rates else ""
        return passed(check, title, f"between {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} of GPUs{rate}")
    if pairs and any(pair.nvlink is not None for pair in pairs):
        return passed(
            check, title, f"none between {len(pairs) - len(linked)} of {len(pairs)} pairs: they are peers over PCIe, if at all"
        )
    return None


def check_pull_over_cuda_ipc(facts: Facts) -> CheckResult | None:
    """Check that a pull within one host reads over cuda_ipc (cases B01, B10).

    Without NVLink UCX switches reads over cuda_ipc off, and a pull goes over TCP though the GPUs are peers.
    """
    if not pulls_over_cuda_ipc(facts):
        return None
    check, title = "gpu.pull", "reads over cuda_ipc"
    found, switch = connector(facts), get_zcopy(facts)
    if get_zcopy_elsewhere(facts):
        return skipped(check, title, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY may be set where the engine runs", "--same-env in its pod")
    if not pull_falls_to_tcp(facts):
        if switch is not None:
            return passed(check, title, f"switched on: UCX_CUDA_IPC_ENABLE_GET_ZCOPY={switch.value} ({switch.by})")
        return passed(check, title, f"{found.described if found else 'the connector'} does not read remote memory over cuda_ipc")
    named = found.described if found else "NixlConnector (assumed)"
    where = "" if facts.engine(PairSide.DECODE).environment_known else "; the engine's environment is not known"
    return failed(
        check,
        title,
        f"no NVLink, no RDMA adapter, {named} pulls, and UCX_CUDA_IPC_ENABLE_GET_ZCOPY is not set{where}",
        why="UCX switches cuda_ipc reads off where it sees no NVLink, and the pull falls back to TCP through host memory: 0.5 "
        "GB/s measured, against 49 GB/s for the push (vllm-project/vllm#52607)",
        do="set UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y on both engines (NIXL 1.5.1 does not set it), or use NixlPushConnector on both; "
        "then check that the UCX log names cuda_ipc in rma(...), not rma_am(tcp)",
    )


def check_gpudirect(facts: Facts) -> CheckResult | None:
    """Check that adapters can read GPU memory.

    They need nvidia_peermem, or dma-buf with the open driver.
    """
    check, title = "gpu.gpudirect", "GPUDirect RDMA"
    host = facts.host
    if not has_rdma(facts) or (host.gpus.missing and not host.here):
        return None
    if host.open_driver is None and not host.gpus.devices:
        return skipped(check, title, "no NVIDIA driver here")
    if host.modules is None:
        return skipped(check, title, "the loaded modules cannot be read", "a readable /sys/module")
    loaded = sorted(host.modules & {"nvidia_peermem", "nv_peer_mem", "efa_nv_peermem"})
    copy = "; gdrdrv loaded" if "gdrdrv" in host.modules else ""
    if loaded:
        return passed(check, title, f"{', '.join(loaded)} loaded{copy}")
    dmabuf = host.open_driver and host.kernel is not None and host.kernel >= (5, 12)
    if dmabuf and host.kernel:
        return passed(check, title, f"by dma-buf: open NVIDIA driver, Linux {host.kernel[0]}.{host.kernel[1]}{copy}")
    driver = "the proprietary NVIDIA driver" if host.open_driver is False else "an NVIDIA driver of unknown kind"
    return failed(
        check,
        title,
        f"nvidia_peermem is not loaded, and dma-buf needs the open driver and Linux 5.12 ({driver}"
        + (f", Linux {host.kernel[0]}.{host.kernel[1]})" if host.kernel else ")"),
        why="the adapter cannot read GPU memory, so UCX copies every block through host memory first",
        do="modprobe nvidia_peermem on both hosts, or the open kernel modules of the driver",
    )


def check_pcie(facts: Facts) -> CheckResult | None:
    """Show the PCIe link of each GPU (case B18).

    A card lowers its link when idle, so a narrow link is reported but not judged.
    """
    narrow = [gpu for gpu in used(facts) if gpu.pcie_now and gpu.pcie_most and gpu.pcie_now[1] < gpu.pcie_most[1]]
    if not narrow:
        return None
    shown = ", ".join(
        f"GPU {gpu.index}: x{gpu.pcie_now[1]} of x{gpu.pcie_most[1]}" for gpu in narrow if gpu.pcie_now and gpu.pcie_most
    )
    return skipped(
        "gpu.pcie",
        "PCIe width",
        f"{shown}; some cards lower their link when idle, so only a reading under load counts",
        "handrail gpus, or nvidia-smi -q -d PCIE, while a benchmark runs",
    )


def checks(facts: Facts) -> Iterator[CheckResult | None]:
    """Yield all checks, in the order in which they are shown."""
    yield check_devices(facts)
    yield check_mig(facts)
    yield check_p2p(facts)
    yield check_nvlink(facts)
    yield check_pull_over_cuda_ipc(facts)
    yield check_gpudirect(facts)
    yield check_pcie(facts)


# --- helpers ----------------------------------------------------------------------------------------------------------------


def _no_pairs(facts: Facts) -> str:
    count = len(facts.host.gpus.devices)
    if count < 2:
        return f"{count} GPU here: both engines use it, or the peer's GPU is elsewhere"
    return "this host does not have the GPUs that the engines use"
