"""Every command line of ours in every manifest.

The code takes each one, and the addresses that it listens on are those that other parts use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from handrail.config.schema import load
from handrail.config.types import Url
from handrail.records import Role
from handrail_collector.config import CollectorConfig
from handrail_sidecar.settings import SidecarConfig
from handrail_sim.emulator.__main__ import parser as fleet_parser
from harness.manifests import (
    COMPOSE,
    DEPLOY,
    Container,
    chart,
    collector_settings,
    compose,
    containers,
    of_kind,
    one,
    sidecar_settings,
)
from harness.manifests import kustomization as built

TLS = {"tls": {"mode": "secret", "clientCertificates": True}, "auth": {"secret": "handrail-token"}}
EXAMPLES = {
    "helm, TLS": lambda: chart({"example": {"enabled": True}, **TLS}),
    "helm, inline, TLS": lambda: chart({"example": {"enabled": True, "mode": "proxy"}, **TLS}),
    "kustomize, TLS": lambda: built("overlays/vllm-pd-tls"),
    "helm, plugin": lambda: chart({"example": {"enabled": True}}),
    "helm, proxy": lambda: chart({"example": {"enabled": True, "mode": "proxy"}, "cluster": "eu-1", "sidecar": {"gpu": "dcgm"}}),
    "kustomize, plugin": lambda: built("overlays/vllm-pd"),
    "kustomize, proxy": lambda: built("overlays/vllm-pd-proxy"),
}


def sidecars(found: Sequence[Container]) -> Iterator[Container]:
    for each in found:
        if each.name == "handrail":
            yield each


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_pod_of_the_example_has_a_native_sidecar_that_the_code_accepts(example: str) -> None:
    pods = containers(EXAMPLES[example]())
    roles = {}
    for each in sidecars(pods):
        assert each.sidecar, f"{each.workload}: not an init container that is restarted: it would end, or start after the engine"
        settings = sidecar_settings(each.words()).resolved()
        assert settings.role.value == each.labels["handrail-role"]
        roles[settings.role] = settings
    assert set(roles) == {Role.PREFILL, Role.DECODE, Role.EDGE}


@pytest.mark.parametrize("example", EXAMPLES)
def test_sidecars_send_to_the_collectors_service_on_a_port_where_it_listens(example: str, tmp_path: Path) -> None:
    documents = EXAMPLES[example]()
    config = one(documents, "ConfigMap", "handrail-collector")["data"]["collector.yaml"]
    (collector,) = [each for each in containers(documents) if each.name == "collector"]
    settings = collector_settings(collector.words(), config, tmp_path)
    service = one(documents, "Service", "handrail-collector")
    ports = {each["name"]: each["containerPort"] for each in collector.spec["ports"]}
    assert settings.otlp_grpc is not None
    assert settings.otlp_http is not None
    assert settings.api is not None
    assert ports == {"otlp-grpc": settings.otlp_grpc.port, "otlp-http": settings.otlp_http.port, "api": settings.api.port}
    exposed = {each["port"]: ports[each["targetPort"]] for each in service["spec"]["ports"]}
    for each in sidecars(containers(documents)):
        endpoint = sidecar_settings(each.words()).collector.endpoint
        assert endpoint.host == "handrail-collector.handrail.svc"
        assert exposed[endpoint.port] == settings.otlp_http.port
    (data,) = [mount["mountPath"] for mount in collector.spec["volumeMounts"] if mount["name"] == "data"]
    assert settings.data.is_relative_to(data), "the store would lie in the container, and be lost with it"


@pytest.mark.parametrize("example", EXAMPLES)
def test_ports_paths_and_probes_agree_within_each_pod(example: str) -> None:
    for each in sidecars(pods := containers(EXAMPLES[example]())):
        settings = sidecar_settings(each.words())
        declared = {port["name"]: port["containerPort"] for port in each.spec["ports"]}
        assert settings.admin is not None
        assert declared["handrail"] == settings.admin.port
        mounts = [mount["mountPath"] for mount in each.spec["volumeMounts"]]
        assert settings.spool.dir is not None
        assert any(settings.spool.dir.is_relative_to(mount) for mount in mounts)
        (process,) = [other for other in pods if other.workload == each.workload and not other.init]
        listens = int(next(word for word in process.spec["args"][::-1] if word.startswith("--port=")).removeprefix("--port="))
        if settings.listen is not None:
            assert settings.upstream is not None
            assert settings.upstream.port == listens
            assert declared["http"] == settings.listen.port
        else:
            assert settings.plugin_socket is not None
            env = {entry["name"]: entry.get("value") for entry in process.spec["env"]}
            assert env["HANDRAIL_SOCKET"] == str(settings.plugin_socket)
            assert any(settings.plugin_socket.is_relative_to(mount) for mount in mounts)
            assert "--middleware=handrail.plugin.middleware.Handrail" in process.spec["args"]
        if settings.metrics.url is not None:
            assert settings.metrics.url.port == listens


@pytest.mark.parametrize("example", ["helm, plugin", "kustomize, plugin", "helm, TLS", "kustomize, TLS"])
def test_the_plugin_goes_from_the_image_to_where_python_looks(example: str) -> None:
    documents = EXAMPLES[example]()
    for each in containers(documents):
        if each.name != "handrail-plugin":
            continue
        source, target = Path(each.spec["command"][2]), Path(each.spec["command"][3])
        assert str(source) == "/opt/handrail/plugin", "where deploy/docker/Dockerfile unpacks the wheel"
        (volume,) = [mount["name"] for mount in each.spec["volumeMounts"] if target == Path(mount["mountPath"])]
        (engine,) = [other for other in containers(documents) if other.workload == each.workload and other.name == "vllm"]
        (mount,) = [mount for mount in engine.spec["volumeMounts"] if mount["name"] == volume]
        env = {entry["name"]: entry.get("value") for entry in engine.spec["env"]}
        assert mount["mountPath"] == env["PYTHONPATH"]
        assert mount["readOnly"] is True


@pytest.mark.parametrize("example", EXAMPLES)
def test_connections_are_as_secure_at_both_ends(example: str, tmp_path: Path) -> None:
    """Connections have the same security at both ends.

    Scheme, certificate, token and probes agree. Every named file is in a mounted volume.
    """
    documents = EXAMPLES[example]()
    secured = "TLS" in example
    config = one(documents, "ConfigMap", "handrail-collector")["data"]["collector.yaml"]
    (collector,) = [each for each in containers(documents) if each.name == "collector"]
    settings = collector_settings(collector.words(), config, tmp_path)
    assert (settings.tls.cert_file is not None) is secured
    assert [each.value for each in settings.plaintext] == ([] if secured else ["otlp_grpc", "otlp_http", "api"])
    for each in (collector, *sidecars(containers(documents))):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "httpGet" in each.spec.get(probe, {}):
                assert each.spec[probe]["httpGet"]["scheme"] == ("HTTPS" if secured else "HTTP"), (each.workload, probe)
        if secured:
            assert each.pod["securityContext"]["fsGroup"] == 65532, "the process could not read its key"
            (volume,) = [volume for volume in each.pod["volumes"] if volume["name"] == "handrail-tls"]
            assert volume["projected"]["defaultMode"] == 0o440
            assert each.mounts["handrail-tls"]["mountPath"] == "/etc/handrail-tls"
    for each in sidecars(containers(documents)):
        sidecar = sidecar_settings(each.words())
        to, own = sidecar.collector, sidecar.tls
        assert to.endpoint.scheme == ("https" if secured else "http")
        assert (to.token_file is not None) is (settings.auth.token_file is not None)
        if settings.tls.client_ca_file is not None:
            assert to.cert_file is not None
        assert (own.client_ca_file is not None) is (settings.tls.client_ca_file is not None), (
            "both or neither ask readers for one"
        )
        named = [
            to.ca_file,
            to.token_file,
            to.cert_file,
            to.key_file,
            own.cert_file,
            own.key_file,
            own.client_ca_file,
            sidecar.auth.token_file,
        ]
        files = {file for file in named if file is not None}
        wanted = {"ca.crt", "tls.crt", "tls.key", "token"} if secured else set()
        assert {file.name for file in files} == wanted
        assert all(file.parent == Path("/etc/handrail-tls") for file in files)
    for monitor in of_kind(documents, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint.get("scheme", "http") == ("https" if secured else "http")
        assert ("authorization" in endpoint) is secured
        if settings.tls.client_ca_file is not None:
            assert endpoint["tlsConfig"]["cert"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_observer_never_holds_the_engine_back(example: str) -> None:
    """A dead observer never holds the engine back.

    Off the request's path a sidecar's death costs evidence only. To Kubernetes a native sidecar that has ended makes its pod
    unready.
    One that ends at its start holds the engine back. So nothing ends its container, neither a probe nor itself.
    """
    for each in sidecars(containers(EXAMPLES[example]())):
        inline = sidecar_settings(each.words()).listen is not None
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert (probe in each.spec) is inline, (each.workload, probe)
        assert each.spec.get("command") == (None if inline else ["handrail-kept"]), each.workload
        assert "cpu" not in each.spec["resources"]["limits"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_sidecar_may_drain_before_the_pod_is_killed(example: str) -> None:
    for each in sidecars(containers(EXAMPLES[example]())):
        drain = sidecar_settings(each.words()).drain.seconds
        assert each.pod.get("terminationGracePeriodSeconds", 30) >= drain, each.workload


@pytest.mark.parametrize("example", EXAMPLES)
def test_all_that_is_ours_runs_unprivileged_on_a_read_only_root(example: str) -> None:
    ours = [each for each in containers(EXAMPLES[example]()) if each.spec["image"].startswith("handrail")]
    assert ours
    for each in ours:
        if each.name == "router" and example.startswith("kustomize"):
            continue  # a stand-in for another project's router
        security = each.spec["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, (each.workload, each.name)
        assert security["allowPrivilegeEscalation"] is False
        assert security["runAsNonRoot"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert each.spec["resources"]["requests"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_prometheus_finds_every_sidecar_and_the_collector(example: str) -> None:
    documents = EXAMPLES[example]()
    monitors = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "PodMonitor")}
    ports = {each.name: {port["name"] for port in each.spec.get("ports", [])} for each in containers(documents)}
    assert monitors["handrail-sidecar"]["selector"] == {"matchExpressions": [{"key": "handrail-role", "operator": "Exists"}]}
    assert monitors["handrail-sidecar"]["podMetricsEndpoints"][0]["port"] in ports["handrail"]
    assert monitors["handrail-collector"]["podMetricsEndpoints"][0]["port"] in ports["collector"]
    (collector,) = [each for each in containers(documents) if each.name == "collector"]
    wanted = monitors["handrail-collector"]["selector"]["matchLabels"].items()
    assert wanted <= collector.labels.items()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_network_policy_admits_those_who_send_and_names_ports_that_exist(example: str) -> None:
    documents = EXAMPLES[example]()
    policy = one(documents, "NetworkPolicy", "handrail-collector")["spec"]
    (collector,) = [each for each in containers(documents) if each.name == "collector"]
    assert policy["podSelector"]["matchLabels"].items() <= collector.labels.items()
    declared = {port["name"] for port in collector.spec["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == declared
    senders = policy["ingress"][0]["from"]
    by_label = {"matchExpressions": [{"key": "handrail-role", "operator": "Exists"}]}
    engines = {each["metadata"].get("namespace", "handrail") for each in of_kind(documents, "Deployment")}
    for namespace in engines:
        own = {"podSelector": by_label}
        other = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}, "podSelector": by_label}
        assert (own if namespace == "handrail" else other) in senders


def test_the_program_that_keeps_a_sidecar_going_is_in_its_image() -> None:
    copied = [line for line in (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8").splitlines() if "handrail-kept" in line]
    assert copied == ["COPY --chmod=0755 deploy/docker/handrail-kept /usr/local/bin/handrail-kept"]
    assert "!deploy/docker/handrail-kept" in (DEPLOY / "docker/Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()


# --- Compose ----------------------------------------------------------------------------------------------------------------

PROFILES = ("emulated", "vllm")


def host_of(service: str, services: dict[str, dict[str, object]]) -> str:
    """Return the service whose network this one is in."""
    mode = str(services[service].get("network_mode", ""))
    return mode.removeprefix("service:") if mode.startswith("service:") else service


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_sidecars_are_accepted_and_prometheus_scrapes_each(profile: str) -> None:
    services = compose(profile)["services"]
    targets = yaml.safe_load((COMPOSE / f"targets/{profile}.yml").read_text(encoding="utf-8"))
    listed = [target for group in targets for target in group["targets"]]
    scraped = set()
    for name, service in services.items():
        words = service.get("command")
        if not words or words[0] != "sidecar":
            continue
        settings = sidecar_settings(words)
        assert settings.admin is not None
        scraped.add(f"{host_of(name, services)}:{settings.admin.port}")
        assert settings.collector.endpoint == "http://collector:4318"
        assert settings.cluster == targets[0]["labels"]["cluster"]
        if settings.listen is None:
            assert settings.instance == f"{host_of(name, services)}:8000"
    assert sorted(listed) == sorted(scraped)


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_names_only_services_that_run(profile: str) -> None:
    services = compose(profile)["services"]
    known = set(services) | {"router", "127.0.0.1", "0.0.0.0"}
    assert "router" in services or any("router" in str(each.get("networks")) for each in services.values())
    for name, service in services.items():
        assert host_of(name, services) in services
        depends = service.get("depends_on", [])
        assert set(depends) <= set(services), name
        for word in [*service.get("command", [])]:
            for part in str(word).split("="):
                if part.startswith(("http://", "grpc://")):
                    assert (urlsplit(part).hostname or "") in known, (name, part)


def test_compose_runs_the_fleet_with_flags_that_it_has(tmp_path: Path) -> None:
    services = compose("emulated")["services"]
    engines = []
    for name, service in services.items():
        if service.get("entrypoint") == ["python", "-m", "handrail_sim.emulator"]:
            parsed = fleet_parser().parse_args(service["command"])
            if parsed.command == "engine":
                engines.append((name, parsed))
                host, port = parsed.listen
                assert host == name, "what D is told to fetch from: an address that other containers reach"
                settings = sidecar_settings(services[f"{name}-sidecar"]["command"])
                assert (settings.upstream, settings.role.value) == (f"http://{name}:{port}", parsed.role)
                assert Url(parsed.otlp_endpoint).port == settings.otlp_grpc.port if settings.otlp_grpc else False
    assert len(engines) == 4
    (line,) = services["load"]["command"]
    words = line.replace("$(date +%s)", "1").split()
    assert words[:4] == ["exec", "python", "-m", "handrail_sim.emulator"]
    assert fleet_parser().parse_args(words[4 : words.index(">")]).url == "http://edge:8000"


def test_compose_collector_and_prometheus_agree(tmp_path: Path) -> None:
    settings = load(CollectorConfig, COMPOSE / "collector.yaml", {})
    assert settings.api is not None
    prometheus = yaml.safe_load((COMPOSE / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    assert jobs["handrail-collector"]["static_configs"][0]["targets"] == [f"collector:{settings.api.port}"]
    services = compose("emulated")["services"]
    assert {urlsplit(str(each)).hostname for each in settings.forward} <= set(services)


# --- systemd ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prefill", "decode", "edge"])
def test_the_sidecars_files_for_systemd_are_valid_and_stay_where_the_unit_may_write(name: str) -> None:
    settings = load(SidecarConfig, DEPLOY / f"systemd/examples/{name}.yaml", {})
    assert settings.role.value == name
    assert settings.spool.dir is not None
    assert settings.spool.dir.is_relative_to(f"/var/lib/handrail/{name}")
    if settings.plugin_socket is not None:
        assert settings.plugin_socket == Path(f"/run/handrail/{name}/engine.sock")


def test_the_collectors_file_for_systemd_is_valid() -> None:
    settings = load(CollectorConfig, DEPLOY / "systemd/examples/collector.yaml", {})
    assert settings.data.is_relative_to("/var/lib/handrail/collector")
