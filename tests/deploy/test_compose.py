"""The Compose file, checked by Docker Compose itself.

What it mounts is compared with the files that exist. No container is started.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from harness.alert_tools import needs_promtool
from harness.manifests import COMPOSE, ROOT, compose, run_compose

PROFILES = ("emulated", "vllm")


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_itself_accepts_the_file(profile: str) -> None:
    done = run_compose("config", "--quiet", profile=profile)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_reads_it_as_these_tests_do(profile: str) -> None:
    done = run_compose("config", "--format=json", profile=profile)
    theirs = json.loads(done.stdout)["services"]
    ours = compose(profile)["services"]
    assert sorted(theirs) == sorted(ours)
    for name, service in ours.items():
        if "command" in service:
            assert [each.replace("$$", "$") for each in theirs[name]["command"] or []] == service["command"], name


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    return [tuple(each.split(":")[:2]) for each in service.get("volumes", [])]


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_mounted_is_there_and_every_volume_is_used(profile: str) -> None:
    document = compose(profile)
    used = set()
    for name, service in document["services"].items():
        for source, _ in mounts(service):
            if source.startswith("."):
                assert (COMPOSE / source).exists(), f"{name} mounts {source}, which is not there"
            else:
                used.add(source)
    assert used <= set(document["volumes"])


def test_every_volume_is_used_by_some_profile() -> None:
    used = {source for profile in PROFILES for each in compose(profile)["services"].values() for source, _ in mounts(each)}
    assert set(compose("emulated")["volumes"]) <= used


@pytest.mark.parametrize("profile", PROFILES)
def test_nothing_is_published_beyond_this_machine(profile: str) -> None:
    ports = [port for each in compose(profile)["services"].values() for port in each.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("profile", PROFILES)
def test_all_but_the_engines_run_on_a_read_only_root_without_capabilities(profile: str) -> None:
    for name, service in compose(profile)["services"].items():
        if name in ("vllm-prefill", "vllm-decode"):
            continue
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_the_plugin_is_there_before_the_engine_imports_it() -> None:
    services = compose("vllm")["services"]
    for engine in ("vllm-prefill", "vllm-decode"):
        assert services[engine]["depends_on"] == {"plugin": {"condition": "service_completed_successfully", "restart": True}}
        volumes = dict(mounts(services[engine]))
        assert volumes["plugin"] == services[engine]["environment"]["PYTHONPATH"]
        socket = Path(services[engine]["environment"]["HANDRAIL_SOCKET"])
        run = engine.removeprefix("vllm-") + "-run"
        assert volumes[run] == str(socket.parent) == dict(mounts(services[f"{engine}-sidecar"]))[run]
        assert f"--plugin-socket={socket}" in services[f"{engine}-sidecar"]["command"]
    assert f" {dict(mounts(services['plugin']))['plugin']}/; }}" in services["plugin"]["entrypoint"][2]


def test_grafana_and_alertmanager_get_the_running_addresses() -> None:
    services = compose("emulated")["services"]
    grafana = services["grafana"]
    provisioning = ROOT / "dashboards/handrail_dashboards/provisioning"
    sources = (provisioning / "datasources.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<!\$)\$([A-Z][A-Z_]+)", sources)) <= set(grafana["environment"])
    tempo = yaml.safe_load((COMPOSE / "tempo.yml").read_text(encoding="utf-8"))
    assert grafana["environment"]["TEMPO_URL"] == f"http://tempo:{tempo['server']['http_listen_port']}"
    provider = yaml.safe_load((provisioning / "dashboards.yaml").read_text(encoding="utf-8"))["providers"][0]
    assert dict(mounts(grafana))["../../dashboards/handrail_dashboards/generated"] == provider["options"]["path"]
    answer = yaml.safe_load((ROOT / "alerts/alertmanager.yaml").read_text(encoding="utf-8"))
    urls = {urlsplit(hook["url"]).netloc for receiver in answer["receivers"] for hook in receiver["webhook_configs"]}
    assert urls == {"127.0.0.1:9095"}, "where the service pager listens, in Alertmanager's network"
    assert '("127.0.0.1", 9095)' in (COMPOSE / "pager.py").read_text(encoding="utf-8")


@needs_promtool
@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_itself_accepts_its_file_with_the_rules(profile: str, tmp_path: Path) -> None:
    text = (COMPOSE / "prometheus.yml").read_text(encoding="utf-8")
    for target, source in mounts(compose(profile)["services"]["prometheus"]):
        if target.startswith("."):
            text = text.replace(source, str((COMPOSE / target).resolve()))
    (tmp_path / "prometheus.yml").write_text(text, encoding="utf-8")
    command = ("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def test_prometheus_loads_rules_and_nothing_else() -> None:
    loaded = yaml.safe_load((COMPOSE / "prometheus.yml").read_text(encoding="utf-8"))["rule_files"]
    assert loaded == ["/etc/prometheus/rules/*.yaml"]
    files = [*(ROOT / "alerts/generated").glob("*.yaml")]
    assert files
    assert all("groups" in yaml.safe_load(file.read_text(encoding="utf-8")) for file in files)


def test_the_plugins_volume_holds_one_version(tmp_path: Path) -> None:
    """The plugin's volume holds one version.

    The volume outlives the image. Files that only an older version had must not stay, least of all its dist-info.
    """
    services = compose("vllm")["services"]
    image, volume = tmp_path / "image", tmp_path / "volume"
    for folder, name in ((image, "new"), (volume, "old")):
        (folder / f"handrail-{name}.dist-info").mkdir(parents=True)
        (folder / f"handrail_{name}.py").touch()
    words = [
        word.replace("/opt/handrail/plugin", str(image)).replace("/handrail-plugin", str(volume))
        for word in services["plugin"]["entrypoint"]
    ]
    for _ in range(2):
        subprocess.run(words, check=True, timeout=300)
        assert sorted(each.name for each in volume.iterdir()) == ["handrail-new.dist-info", "handrail_new.py"]
