"""The Compose file, checked by Docker Compose itself, and what it mounts against what is there. No container was started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests import COMPOSE, compose, run_compose

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
        assert services[engine]["depends_on"] == {"plugin": {"condition": "service_completed_successfully"}}
        volumes = dict(mounts(services[engine]))
        assert volumes["plugin"] == services[engine]["environment"]["PYTHONPATH"]
        socket = Path(services[engine]["environment"]["HANDRAIL_SOCKET"])
        run = engine.removeprefix("vllm-") + "-run"
        assert volumes[run] == str(socket.parent) == dict(mounts(services[f"{engine}-sidecar"]))[run]
        assert f"--plugin-socket={socket}" in services[f"{engine}-sidecar"]["command"]
    assert dict(mounts(services["plugin"]))["plugin"] + "/" == services["plugin"]["entrypoint"][3]


def test_grafana_is_provisioned_with_what_prometheus_and_tempo_serve() -> None:
    sources = yaml.safe_load((COMPOSE / "grafana/datasources/handrail.yml").read_text(encoding="utf-8"))["datasources"]
    assert {each["type"]: each["url"] for each in sources} == {
        "prometheus": "http://prometheus:9090",
        "tempo": "http://tempo:3200",
    }
    tempo = yaml.safe_load((COMPOSE / "tempo.yml").read_text(encoding="utf-8"))
    assert tempo["server"]["http_listen_port"] == 3200
    provider = yaml.safe_load((COMPOSE / "grafana/dashboards/handrail.yml").read_text(encoding="utf-8"))["providers"][0]
    volumes = dict(mounts(compose("emulated")["services"]["grafana"]))
    assert volumes["../../dashboards/generated"] == provider["options"]["path"]
