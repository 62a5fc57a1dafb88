"""Settings, the command line, and the sidecar as a process with and without NVML."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from handrail.config.schema import ConfigError, parse
from handrail_sidecar.settings import SidecarConfig
from nvml.child import Double
from nvml.scenario import GPU_IS_LOST, MISMATCH, Scenario, h100, l40s, memory

MAIN = "import sys; from handrail_cli.main import main; sys.exit(main())"


def config(text: str) -> SidecarConfig:
    return parse(SidecarConfig, f"instance: a:1\nplugin_socket: /tmp/x\n{text}", "test.yaml")


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("role: decode", True),
        ("role: prefill", True),
        ("role: edge", False),
        ("role: router", False),
        ("role: edge\ngpu: {sample: on}", True),
        ("role: decode\ngpu: {sample: off}", False),
    ],
)
def test_gpus_are_sampled_beside_an_engine(text: str, samples: bool) -> None:
    assert config(text).samples_gpus is samples


def test_mistakes_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        config("role: decode\ngpu: {interval: 1ms}")
    assert "at least 10ms" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        config("role: decode\ngpu: {without: [energy, power_watts]}")
    assert "gpu.without = 'energy': is not a counter; did you mean energy_joules?" in str(caught.value)


def gpus(double: Double, scenario: Scenario | None, *flags: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, "gpus", "--for", "1500ms", *flags],
        env={**double.environment(scenario), "COLUMNS": str(columns), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def standing(scenario: Scenario) -> Scenario:
    """Return the same scenario with counters that stand still.

    So what is shown does not depend on when it is read.
    """
    scenario.lines = [re.sub(r" rate \d+", "", line) for line in scenario.lines]
    return scenario


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_what_a_person_sees(double: Double, golden: Callable[[Path | str, str], None], columns: int) -> None:
    scenario = standing(h100(4)).add(
        *(line.replace("gpu *", "gpu 1") for line in standing(l40s()).lines if line.startswith("gpu *")),
        "gpu 1 error GpmQueryDeviceSupport 3",
        *(f"gpu 1 error field.{field} 3" for field in (138, 139, 38, 45, 52, 59, 186)),
        "gpu 2 mig 2",
        "gpu 2 error UtilizationRates 3",
        *memory(total=42_000_000_000, used=20_000_000_000, which="2.0"),
        *memory(total=42_000_000_000, used=7_000_000_000, which="2.1"),
        f"gpu 3 error * {GPU_IS_LOST}",
    )
    shown = double.call("nvml.virtual:page", scenario, columns, virtual=True)
    assert [line for line in shown.splitlines() if line != line.rstrip()] == []
    golden(f"cli/gpus_{columns}.txt", shown)


def test_the_command_shows_what_it_saw(double: Double) -> None:
    done = gpus(double, h100(2), "--for", "3s")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("530 of 700 W") == 2
    assert "driver 575.57.08" in done.stdout


def test_the_answer_as_json(double: Double) -> None:
    done = gpus(double, h100(2), "--json")
    found = json.loads(done.stdout)
    assert [gpu["uuid" if "uuid" in gpu else "key"] for gpu in found["gpus"]] == ["GPU-fake-0", "GPU-fake-1"]
    values = {(each["name"], each["label"]): each for each in found["gpus"][0]["values"]}
    assert values["power_watts", ""]["value"] == 530
    assert values["power_watts", ""]["unit"] == "W"
    assert found["processes"][0]["pid"] == 4242
    assert (found["lost"], found["gpus"][0]["absent"], found["driver"]) == ([], [], "575.57.08")


def test_a_call_that_hangs_is_named_and_the_rest_is_shown(double: Double) -> None:
    done = gpus(double, h100(2).add("gpu 1 hang UtilizationRates released"), "--for", "5s")
    assert done.returncode == 0
    assert "GPU 1: nvmlDeviceGetUtilizationRates has not returned for" in done.stdout
    assert done.stdout.count("530 of 700 W") == 2


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_without_nvml_it_says_why_and_what_to_do(double: Double, flags: tuple[str, ...]) -> None:
    done = gpus(double, None, *flags)
    assert done.returncode == 1
    assert "libnvidia-ml.so.1 was not found" in done.stderr
    assert "NVIDIA_DRIVER_CAPABILITIES=utility" in done.stderr
    assert not done.stdout


def test_a_mismatch_is_named_by_its_code(double: Double) -> None:
    done = gpus(double, h100().add(f"init {MISMATCH}"))
    assert done.returncode == 1
    assert "have different versions" in done.stderr
    assert "code 18" in done.stderr


def test_a_recording_holds_every_sample(double: Double, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    done = gpus(double, h100(), "--record", str(file), "--interval", "10ms", "--json")
    assert done.returncode == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {"uuid", "index", "at_unix_ns", "took_ns", "values"} == set(lines[0])
    moved = [line["values"]["pcie_bytes{receive}"] for line in lines if "pcie_bytes{receive}" in line["values"]]
    assert len(moved) > 3
    assert moved == sorted(moved)


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        (("--interval", "1ms"), "is shorter than 10ms"),
        (("--for", "0s"), "is shorter than two intervals (200 ms)"),
        (("--interval", "5s"), "is shorter than two intervals (10.0 s)"),
        (("--for", "soon"), "is not a duration"),
        (("--record", "/nowhere/x"), "cannot be written"),
    ],
)
def test_wrong_flags_are_reported(double: Double, flags: tuple[str, ...], output: str) -> None:
    done = gpus(double, h100(), *flags)
    assert done.returncode == 2
    assert output in done.stderr


def test_the_table_needs_no_gpu(double: Double) -> None:
    done = gpus(double, None, "--counters", "--json")
    table = {each["name"]: each for each in json.loads(done.stdout)}
    assert table["pcie_bytes"]["kind"] == "counter"
    assert "sm_active_ratio" in gpus(double, None, "--counters").stdout


# --- the sidecar as a process --------------------------------------------------------------------------------------------


class Sidecar:
    """A sidecar process with only a plugin socket: it reads nothing but GPUs."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._folder = folder
        self._log = (folder / "log").open("w")
        flags = [
            "--role",
            "decode",
            "--instance",
            "10.0.0.7:8200",
            "--plugin-socket",
            str(folder / "s"),
            "--gpu-interval",
            "20ms",
        ]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                MAIN,
                "sidecar",
                *flags,
                "--ready-file",
                str(folder / "ready"),
                "--collector",
                "http://127.0.0.1:9",
            ],
            env=environment,
            stderr=self._log,
        )

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not what():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def page(self) -> str:
        self.until((self._folder / "ready").exists)
        address = json.loads((self._folder / "ready").read_text())["addresses"]["admin"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            return str(answer.read(), "utf-8")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def test_a_sidecar_shows_its_gpus_while_a_call_hangs_and_stops_without_it(double: Double, tmp_path: Path) -> None:
    stuck = 'handrail_sidecar_gpu_stuck_seconds{call="nvmlDeviceGetUtilizationRates",gpu="1",uuid="GPU-fake-1"}'
    power = 'handrail_gpu_power_watts{gpu="1",uuid="GPU-fake-1"} 530.0'
    with Sidecar(double.environment(h100(2).add("gpu 1 hang UtilizationRates released")), tmp_path) as sidecar:
        busy = 'handrail_gpu_utilization_ratio{gpu="0",uuid="GPU-fake-0"} 0.87'
        sidecar.until(lambda: all(each in sidecar.page() for each in (stuck, power, busy)))
        page = sidecar.page().splitlines()
        assert not [line for line in page if line.startswith('handrail_gpu_utilization_ratio{gpu="1"')]
        assert "handrail_gpu_up 1.0" in page
        assert sidecar.stop() == 0
        assert "Traceback" not in sidecar.log


def test_a_sidecar_without_nvml_runs_and_says_so_once(double: Double, tmp_path: Path) -> None:
    with Sidecar(double.environment(None), tmp_path) as sidecar:
        assert "handrail_gpu_up 0.0" in sidecar.page()
        sidecar.until(lambda: "no GPU metrics" in sidecar.log)
        assert sidecar.stop() == 0
        assert sidecar.log.count("libnvidia-ml.so.1 was not found") == 1
        assert "Traceback" not in sidecar.log


def test_only_the_gpus_that_the_environment_names_are_read_and_they_are_the_engines(double: Double, tmp_path: Path) -> None:
    def read(page: str) -> set[str]:
        lines = [line for line in page.splitlines() if line.startswith("handrail_gpu_power_watts{")]
        return {line.partition('gpu="')[2][0] for line in lines}

    environment = {**double.environment(h100(4)), "CUDA_VISIBLE_DEVICES": "2,GPU-fake-1"}
    with Sidecar(environment, tmp_path) as sidecar:
        sidecar.until(lambda: len(read(sidecar.page())) > 1)
        assert read(sidecar.page()) == {"1", "2"}
        assert sidecar.stop() == 0
