"""Doubles of what ``handrail doctor`` reads: NVML, sysfs, and two known pairs.

The pairs are those of the published articles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped,unused-ignore]

from handrail_doctor.gather.gpus import NvmlReader

CNS = pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED
OK = pynvml.NVML_P2P_STATUS_OK
NS = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED


@dataclass
class FakeGpu:
    """One GPU of ``FakeNvml``.

    ``links``: whether each NVLink is up.
    ``p2p``: status of reads and writes to every other GPU.
    """

    name: str = "NVIDIA L40S"
    mig: int | None = None  # None: the driver does not support the query
    links: Sequence[bool] = ()
    link_mbps: int = 26_562
    p2p: int = OK
    pcie: tuple[int, int, int, int] = (4, 16, 4, 16)  # current generation and lanes; the maximum


@dataclass
class FakeNvml:
    """The pynvml calls that doctor uses, with pynvml's own errors.

    ``broken``: the error to raise, by the name of a call.
    """

    gpus: Sequence[FakeGpu] = ()
    init: Exception | None = None
    broken: Mapping[str, Exception] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()  # names that an old binding lacks
    calls: list[str] = field(default_factory=list)

    NVMLError = pynvml.NVMLError

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name in self.missing:
                raise AttributeError(name)
            self.calls.append(name)
            if name in self.broken:
                return _raising(self.broken[name])
        return object.__getattribute__(self, name)

    def reader(self) -> NvmlReader:
        return NvmlReader(lambda: self)

    def nvmlInit(self) -> None:
        if self.init is not None:
            raise self.init

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:08x}-0000-4000-8000-000000000000"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.gpus[handle].name

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        mode = self.gpus[handle].mig
        if mode is None:
            raise pynvml.NVMLError_NotSupported
        return [mode, mode]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        links = self.gpus[handle].links
        if link >= len(links):
            raise pynvml.NVMLError_NotSupported if not links else pynvml.NVMLError_InvalidArgument
        return int(links[link])

    def nvmlDeviceGetFieldValues(self, handle: int, fields: Sequence[tuple[int, int]]) -> list[Any]:
        assert {number for number, _ in fields} == {pynvml.NVML_FI_DEV_NVLINK_GET_SPEED}
        speed = self.gpus[handle].link_mbps
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=speed)) for _ in fields]

    def nvmlDeviceGetP2PStatus(self, source: int, target: int, capability: int) -> int:
        gpu = self.gpus[source]
        if capability == pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
            return int(OK if gpu.links and self.gpus[target].links else NS)
        return gpu.p2p

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return self.gpus[handle].pcie[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return self.gpus[handle].pcie[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.gpus[handle].pcie[2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self.gpus[handle].pcie[3]


def _raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


NO_NVML = FakeNvml(init=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))


# --- sysfs ----------------------------------------------------------------------------------------------------------------


def write(root: Path, path: str, text: str) -> None:
    """Write one file below a root."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def add_rdma(
    root: Path,
    adapter: str,
    *,
    port: int = 1,
    state: str = "4: ACTIVE",
    physical: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
    link_layer: str = "InfiniBand",
    netdev: str = "",
    gids: Mapping[int, tuple[str, str]] | None = None,
) -> None:
    """Add one RDMA port as the kernel shows it.

    ``gids``: address and type by index.
    """
    folder = f"sys/class/infiniband/{adapter}/ports/{port}"
    for name, text in (("state", state), ("phys_state", physical), ("rate", rate), ("link_layer", link_layer)):
        write(root, f"{folder}/{name}", f"{text}\n")
    if netdev:
        write(root, f"{folder}/gid_attrs/ndevs/0", f"{netdev}\n")
    for index, (address, kind) in (gids or {}).items():
        write(root, f"{folder}/gids/{index}", f"{address}\n")
        write(root, f"{folder}/gid_attrs/types/{index}", f"{kind}\n")


def add_nic(root: Path, name: str, *, speed: str = "100000", state: str = "up", mtu: str = "9000", physical: bool = True) -> None:
    """Add one network interface."""
    for file, text in (("speed", speed), ("operstate", state), ("mtu", mtu)):
        write(root, f"sys/class/net/{name}/{file}", f"{text}\n")
    if physical:
        (root / f"sys/class/net/{name}/device").mkdir(parents=True, exist_ok=True)


def add_driver(
    root: Path, *, modules: Sequence[str] = ("nvidia",), open_modules: bool = False, kernel: str = "6.8.0-60-generic"
) -> None:
    """Add kernel modules, NVIDIA's driver and the kernel's version."""
    for module in modules:
        (root / "sys/module" / module).mkdir(parents=True, exist_ok=True)
    kind = "NVIDIA UNIX Open Kernel Module for x86_64" if open_modules else "NVIDIA UNIX x86_64 Kernel Module"
    write(root, "proc/driver/nvidia/version", f"NVRM version: {kind}  580.95.05\n")
    write(root, "proc/sys/kernel/osrelease", f"{kernel}\n")


# --- the two pairs ----------------------------------------------------------------------------------------------------------

ROCE_GIDS = {
    0: ("fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:0a00:0007", "RoCE v2"),
}


def l40s(root: Path) -> FakeNvml:
    """Build one host with two L40S GPUs that cannot read each other's memory.

    The host has no RDMA. It is the host of the published experiment.
    """
    add_driver(root)
    add_nic(root, "eno1", speed="10000", mtu="1500")
    return FakeNvml(gpus=[FakeGpu(p2p=CNS), FakeGpu(p2p=CNS)])


def h100(root: Path) -> FakeNvml:
    """Build one of two hosts with eight H100 GPUs.

    Each GPU has its own adapter at 400 Gb/s.
    """
    add_driver(root, modules=("nvidia", "nvidia_peermem", "gdrdrv"))
    add_nic(root, "eno1", speed="25000")
    for number in range(8):
        add_rdma(root, f"mlx5_{number}")
    return FakeNvml(gpus=[FakeGpu(name="NVIDIA H100 80GB HBM3", links=[True] * 18, pcie=(5, 16, 5, 16), mig=0) for _ in range(8)])


def pair_yaml(
    *,
    model: str = "Qwen/Qwen2.5-7B",
    tp: int = 1,
    prefill_env: Mapping[str, str] | None = None,
    decode_env: Mapping[str, str] | None = None,
    prefill_flags: str = "",
    decode_flags: str = "",
) -> str:
    """Write a Compose file with the two services of a pair."""
    common = {"HANDRAIL_SOCKET": "/run/handrail/engine.sock"}

    def service(role: str, port: int, env: Mapping[str, str], flags: str) -> str:
        lines = [f"      {name}: '{value}'" for name, value in {**common, **env}.items()]
        transfer = f'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}'
        command = (
            f"vllm serve {model} --port {port} --tensor-parallel-size {tp} "
            f"--middleware handrail.plugin.middleware.Handrail --kv-transfer-config '{transfer}' {flags}"
        )
        joined = "\n".join(lines)
        return f"    image: vllm/vllm-openai:v0.32.0\n    command: |\n      {command}\n    environment:\n{joined}\n"

    return (
        "services:\n  prefill:\n"
        + service("kv_producer", 8100, prefill_env or {}, prefill_flags)
        + "  decode:\n"
        + service("kv_consumer", 8200, decode_env or {}, decode_flags)
    )
