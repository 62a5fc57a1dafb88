"""Select the visible GPUs of NVML's list.

By CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES and our setting.
"""

from __future__ import annotations

import pytest

from handrail.records.devices import Device, DeviceKind
from handrail_sidecar.gpu.visible import visible


def gpu(index: int, uuid: str, product: str = "H100", parent: str = "") -> Device:
    return Device(kind=DeviceKind.GPU, key=uuid, index=index, product=product, parent=parent)


HOST = [gpu(0, "GPU-aaa1"), gpu(1, "GPU-aab2"), gpu(2, "GPU-ccc3"), gpu(3, "GPU-ddd4"), gpu(3, "MIG-eee5", parent="GPU-ddd4")]


@pytest.mark.parametrize(
    ("environment", "keys", "reported_by"),
    [
        ({}, None, ""),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ("GPU-ccc3", "GPU-aaa1"), "CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c"}, ("GPU-ccc3",), "CUDA_VISIBLE_DEVICES"),  # CUDA takes shortened UUIDs
        ({"CUDA_VISIBLE_DEVICES": "MIG-eee5"}, ("MIG-eee5",), "CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": ""}, (), "CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, (), "CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, (), "CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, ("GPU-aaa1",), "CUDA_VISIBLE_DEVICES"),  # what follows a wrong entry is hidden
        ({"CUDA_VISIBLE_DEVICES": "0,0,1"}, ("GPU-aaa1",), "CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa"}, (), "CUDA_VISIBLE_DEVICES"),  # matches two
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None, ""),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, None, ""),
        ({"NVIDIA_VISIBLE_DEVICES": "3"}, None, ""),  # the host's index: the container counts from 0 again
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-aab2,GPU-ccc3"}, ("GPU-aab2", "GPU-ccc3"), "NVIDIA_VISIBLE_DEVICES"),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-aab2", "CUDA_VISIBLE_DEVICES": "0"}, ("GPU-aaa1",), "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_environment_says_which(environment: dict[str, str], keys: tuple[str, ...] | None, reported_by: str) -> None:
    found = visible(HOST, environment)
    assert (found.keys, found.variable) == (keys, reported_by)


def test_a_wrong_entry_is_reported() -> None:
    (note,) = visible(HOST, {"CUDA_VISIBLE_DEVICES": "0,7"}).notes
    assert note == "CUDA_VISIBLE_DEVICES: '7' matches no GPU here: CUDA hides it and all after it"


def test_indices_of_cuda_are_nvmls_only_where_all_gpus_are_alike_or_the_order_is_pcis() -> None:
    mixed = [gpu(0, "GPU-t", "T4"), gpu(1, "GPU-h", "H100")]
    unsure = visible(mixed, {"CUDA_VISIBLE_DEVICES": "0"})
    assert unsure.keys is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in unsure.notes[0]
    assert visible(mixed, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).keys == ("GPU-t",)
    assert visible(mixed, {"CUDA_VISIBLE_DEVICES": "GPU-h"}).keys == ("GPU-h",)


def test_the_old_form_of_mig_names_nothing() -> None:
    found = visible(HOST, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-ddd4/1/0"})
    assert found.keys is None
    assert "old form" in found.notes[0]


def test_the_setting_wins_and_a_wrong_entry_there_hides_only_itself() -> None:
    found = visible(HOST, {"CUDA_VISIBLE_DEVICES": "0"}, ["7", "1", "GPU-ccc3"])
    assert (found.keys, found.variable) == (("GPU-aab2", "GPU-ccc3"), "gpu.devices")
    assert found.notes == ("gpu.devices: '7' matches no GPU here",)
