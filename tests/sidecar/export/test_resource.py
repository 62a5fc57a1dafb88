"""The sidecar's OTLP resource: host, process, and the environment's attributes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from handrail.records import Process, Role
from handrail.wire.exchange import process_of
from handrail_sidecar.export.resource import HostIdentity, host_identity, new_sender_id, own_process, own_resource, tap_attributes

HERE = HostIdentity("ab" * 16, "node-1")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_host_is_the_kernel_s_boot_not_the_image(tmp_path: Path) -> None:
    boot = write(tmp_path / "boot", "8c9f0cf1-0000-4000-8000-000000000000\n")
    one, other = write(tmp_path / "m1", "1" * 32), write(tmp_path / "m2", "2" * 32)
    rebooted = write(tmp_path / "boot2", "8c9f0cf1-0000-4000-8000-000000000001\n")
    assert host_identity(boot, (one,)).id == host_identity(boot, (other,)).id
    assert host_identity(boot, (one,)).id != host_identity(rebooted, (one,)).id
    assert re.fullmatch(r"[0-9a-f]{32}", host_identity(boot, (one,)).id)


@pytest.mark.parametrize("machine", ["3" * 32, ""], ids=["machine-id", "name-only"])
def test_host_without_a_boot_id(tmp_path: Path, machine: str) -> None:
    absent = str(tmp_path / "absent")
    found = host_identity(absent, (absent, write(tmp_path / "m", machine)))
    assert re.fullmatch(r"[0-9a-f]{32}", found.id)
    assert found == host_identity(absent, (str(tmp_path / "m"),))


def test_host_files_are_not_sent_as_they_are(tmp_path: Path) -> None:
    text = "8c9f0cf1-0000-4000-8000-000000000000"
    assert text.replace("-", "") not in host_identity(write(tmp_path / "b", text)).id


@pytest.mark.parametrize(
    ("environment", "configured", "service"),
    [
        ({}, "", "handrail-decode"),
        ({"OTEL_SERVICE_NAME": "chat"}, "", "chat"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=from-attributes"}, "", "from-attributes"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=a", "OTEL_SERVICE_NAME": "b"}, "", "b"),
        ({"OTEL_SERVICE_NAME": "chat"}, "configured", "configured"),
    ],
)
def test_service_name(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], configured: str, service: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    process = own_process(Role.DECODE, "d:1", sender="cd" * 16, service_name=configured, host=HERE)
    assert process == Process(
        role=Role.DECODE, instance="d:1", host=HERE.id, service=service, sender="cd" * 16, host_name="node-1"
    )
    assert process_of(own_resource(process)) == process


def test_the_environment_s_attributes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.id=i-0abc,k8s.pod.name=d-7,handrail.role=chef")
    process = own_process(Role.EDGE, "", sender=new_sender_id(), host=HERE)
    found = {a.key: a.value.string_value for a in own_resource(process, cluster="blue").attributes}
    assert process.host == found["host.id"] == "i-0abc"
    assert (found["k8s.pod.name"], found["handrail.role"], found["handrail.cluster"]) == ("d-7", "edge", "blue")
    assert found["service.instance.id"] == found["handrail.sender.id"] == process.sender


def test_a_tapped_resource_gains_no_service_name() -> None:
    process = own_process(Role.PREFILL, "p:1", sender="s", host=HERE)
    assert tap_attributes(process) == {
        "handrail.role": "prefill",
        "handrail.instance": "p:1",
        "handrail.sender.id": "s",
        "host.id": HERE.id,
        "host.name": "node-1",
    }


def test_sender_ids_are_random_and_of_the_documented_form() -> None:
    drawn = {new_sender_id() for _ in range(100)}
    assert len(drawn) == 100
    assert all(re.fullmatch(r"[0-9a-f]{32}", sender) for sender in drawn)
