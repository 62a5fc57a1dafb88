"""Bring the plugin into a stock image, as the init container does.

The wheel is unpacked and mounted read-only beside a vLLM that has no trace of it. PYTHONPATH and the entry point in its
metadata find it.
The engine starts once. If this is root that may mount, the folder is a read-only mount in a mount namespace of the engine's
own, as in a pod. Otherwise its file modes forbid writing.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import handrail
from handrail.records import EngineFacts, EngineTimes
from vllm.observed import _ASK_P as ASK_P
from vllm.observed import Listeners, ReceivedRecords, post
from vllm.pair import ENGINE_ENV, MODEL_NAME, START_S, EngineSettings, Installation, find_installation, start_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

_ROOT = Path(__file__).parents[2]
# As `mount -o ro` in a pod: the engine sees the folder, and cannot write there.
_READ_ONLY = """#!/bin/sh
exec unshare --mount sh -c 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"' {site} {vllm} "$@"
"""


@dataclass(frozen=True, slots=True)
class Mounted(Installation):
    """The engine behind a command that first mounts the plugin's folder read-only."""

    command: Path

    @property
    def vllm(self) -> Path:
        return self.command


def unpacked_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout and unpack it as deploy/docker/Dockerfile does."""
    wheels, site = folder / "wheels", folder / "site"
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels))
    subprocess.run(build, cwd=_ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = wheels.glob("handrail-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def mounted(installation: Installation, site: Path, folder: Path) -> Installation:
    may_mount = os.geteuid() == 0 and subprocess.run(("unshare", "--mount", "true"), check=False).returncode == 0
    if not may_mount:
        for path in (*site.rglob("*"), site):
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
        return installation
    command = folder / "vllm"
    command.write_text(_READ_ONLY.format(site=site, vllm=installation.vllm), encoding="utf-8")
    command.chmod(0o755)
    return Mounted(installation.root, command)


@dataclass(frozen=True, slots=True)
class Pod:
    """What runs in the pod: the engine and the listeners beside it."""

    url: str
    records: ReceivedRecords
    site: Path
    before: frozenset[Path]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    folder = tmp_path_factory.mktemp("init-container")
    site = unpacked_wheel(folder)
    before = frozenset(site.rglob("*"))
    run = folder / "run"
    run.mkdir()
    env = {"PYTHONPATH": f"{site}:{ENGINE_ENV['PYTHONPATH']}", "HANDRAIL_SOCKET": str(run / "engine.sock")}
    flags = ("--middleware", "handrail.plugin.middleware.Handrail")
    listeners = Listeners()
    try:
        received_records = listeners.listen("prefill", run / "engine.sock")
        installation = mounted(find_installation(), site, folder)
        engine = start_engine(installation, "prefill", EngineSettings(env=env, flags=flags), logs=folder)
        with engine.child:
            engine.wait_healthy(time.monotonic() + START_S)
            yield Pod(engine.url, received_records, site, before)
    finally:
        listeners.close()


def test_a_stock_vllm_finds_the_plugin_in_the_unpacked_wheel(pod: Pod) -> None:
    facts = pod.records.wait_records(EngineFacts, 1)
    assert facts, "the plugin said nothing: it was not found, or not by its entry point"
    assert facts[-1].plugin_version == handrail.__version__
    assert facts[-1].missing == ()


def test_events_arrive(pod: Pod) -> None:
    body = {"model": MODEL_NAME, "prompt": "a prompt " * 40, "max_tokens": 1, "temperature": 0, "kv_transfer_params": dict(ASK_P)}
    assert post(pod.url, body, "pod-0").status == 200
    (times,) = pod.records.wait(EngineTimes, lambda found: len(found) >= 1)
    assert times.request_id.startswith("cmpl-pod-0-")
    pod.records.wait_published("pod-0")  # and kept, since no decode engine comes for it


def test_nothing_was_written_beside_the_plugin(pod: Pod) -> None:
    """An engine that must write there would fail in a pod, whose mount is read-only."""
    assert frozenset(pod.site.rglob("*")) == pod.before
