"""The units, verified by systemd itself in a tree like a host's.

They are never started.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.manifests import DEPLOY
from harness.skips import needs_program

UNITS = DEPLOY / "systemd"

needs_systemd = needs_program("systemd-analyze")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a host's tree.

    It has the units, their program, and one engine's unit with the drop-in.
    """
    program = tmp_path / "opt/handrail/venv/bin/handrail"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for unit in UNITS.glob("*.service"):
        shutil.copy(unit, units)
    (units / "handrail-sidecar@decode.service").symlink_to("handrail-sidecar@.service")
    (units / "vllm-decode.service").write_text("[Service]\nExecStart=/opt/handrail/venv/bin/handrail\n", encoding="utf-8")
    shutil.copytree(UNITS / "vllm.service.d", units / "vllm-decode.service.d")
    system = Path("/lib/systemd/system")
    if system.is_dir():  # the targets that our units name
        shutil.copytree(system, tmp_path / "lib/systemd/system", symlinks=True, ignore_dangling_symlinks=True)
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("unit", ["handrail-collector.service", "handrail-sidecar@decode.service", "vllm-decode.service"])
def test_systemd_accepts_the_unit(root: Path, unit: str) -> None:
    done = verify(root, unit)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if unit.split("@")[0] in line], done.stderr


@needs_systemd
def test_the_verification_bites(root: Path) -> None:
    unit = root / "etc/systemd/system/handrail-collector.service"
    unit.write_text(unit.read_text(encoding="utf-8").replace("ProtectHome=yes", "ProtectHouse=yes"), encoding="utf-8")
    assert "ProtectHouse" in verify(root, unit.name).stderr


def verify(root: Path, unit: str) -> subprocess.CompletedProcess[str]:

    command = ("systemd-analyze", "verify", "--man=no", f"--root={root}", unit)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@needs_systemd
@pytest.mark.parametrize("unit", ["handrail-collector.service", "handrail-sidecar@decode.service"])
def test_the_unit_is_fenced_in(root: Path, unit: str) -> None:
    """The unit's exposure score is low.

    systemd scores what a service could do if it were taken over: 0 nothing, 10 everything.
    """

    command = ("systemd-analyze", "security", "--offline=true", "--no-pager", f"--root={root}", unit)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert score, done.stdout + done.stderr
    assert float(score[1]) <= 3.0, done.stdout


def test_a_wrong_configuration_is_not_tried_for_ever() -> None:
    for unit in UNITS.glob("*.service"):
        text = unit.read_text(encoding="utf-8")
        assert "RestartPreventExitStatus=2" in text, "2 is the exit code for a configuration that is wrong (docs/cli.md)"
        assert "Restart=always" in text


def test_the_engine_may_write_to_the_socket() -> None:
    """The engine may write to the sidecar's socket.

    The sidecar opens its socket to the group of a folder with the set-group-id bit. The drop-in adds the engine to that group.
    """
    sidecar = (UNITS / "handrail-sidecar@.service").read_text(encoding="utf-8")
    assert "RuntimeDirectory=handrail/%i\nRuntimeDirectoryMode=2770" in sidecar
    (group,) = re.findall(r"^Group=(.+)$", sidecar, re.MULTILINE)
    drop_in = (UNITS / "vllm.service.d/handrail.conf").read_text(encoding="utf-8")
    assert f"SupplementaryGroups={group}" in drop_in
    assert "HANDRAIL_SOCKET=/run/handrail/decode/engine.sock" in drop_in
