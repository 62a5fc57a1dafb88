"""The chart, rendered by Helm's own library and checked against schemas.

The schemas are those of Kubernetes and the operators. The chart is never installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

from harness.manifests import CHART, ROOT, chart, containers, of_kind, one, rendered_chart, sidecar_settings
from harness.operator_schemas import KINDS
from harness.skips import package

KUBERNETES = ("1.29", "1.37")  # the first with native sidecars, as Chart.yaml wants it, and the newest schemas that are packaged
EVERYTHING: dict[str, Any] = {
    "cluster": "eu-1",
    "image": {"registry": "registry.example.com/team/", "tag": "1.2.3", "pullSecrets": [{"name": "regcred"}]},
    "collector": {
        "forward": ["http://tempo.monitoring:4318", "grpcs://otel.example.com"],
        "config": {"decision": {"hung_after": "30s"}},
        "storage": {"size": "1Ti", "storageClass": "fast"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "observability", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "serving"},
    },
    "sidecar": {"gpu": "nvml", "extraArgs": ["--log-start=start"]},
    "podMonitor": {"labels": {"release": "kube-prometheus-stack"}, "namespaces": ["llm", "llm-2"]},
    "prometheusRule": {"labels": {"release": "kube-prometheus-stack"}},
    "networkPolicy": {"senders": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "llm"}}}]},
    "example": {
        "enabled": True,
        "prefillReplicas": 2,
        "gpus": 8,
        "huggingFaceSecret": "hf",
        "extraArgs": ["--tensor-parallel-size=8"],
    },
}
VALUES: dict[str, Mapping[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "example, inline": {"example": {"enabled": True, "mode": "proxy"}, "sidecar": {"gpu": "dcgm"}},
    "TLS by cert-manager": {
        "tls": {"mode": "certManager", "issuer": {"kind": "ClusterIssuer", "name": "ca"}},
        "example": {"enabled": True},
    },
    "mutual TLS": {"tls": {"mode": "secret", "clientCertificates": True}, "auth": {"secret": "t"}, "example": {"enabled": True}},
    "bare": {
        "podMonitor": {"enabled": False},
        "prometheusRule": {"enabled": False},
        "dashboards": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
}


@pytest.mark.parametrize("values", VALUES)
def test_objects_are_what_kubernetes_takes(values: str) -> None:
    documents = chart(VALUES[values])
    for document in documents:
        if document["apiVersion"] not in KINDS:
            for version in KUBERNETES:
                kubernetes_validate.validate(document, version, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(names) == len(set(names)), "two objects of one name"


def test_helm_lints_it() -> None:
    helm = package("helm_python", "helm-python-sdk")
    answer = helm.lint(str(CHART), {"tls": {"mode": "plaintext"}}, strict=True)
    assert answer["errors"] == []
    assert [each["error"] for each in answer["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    ("values", "output"),
    [
        ({"exampel": {}}, "exampel"),
        ({"sidecar": {"gpu": "cuda"}}, "/sidecar/gpu"),
        ({"example": {"mode": "inline"}}, "/example/mode"),
        ({"collector": {"forward": ["tempo:4318"]}}, "/collector/forward"),
        ({"collector": {"replicas": 2}}, "replicas"),
        ({"podMonitor": {"interval": "15"}}, "/podMonitor/interval"),
        ({"cluster": "a b"}, "/cluster"),
        ({"tls": {"mode": ""}}, "tls.mode must be chosen: certManager .* secret .* or plaintext"),
        ({"tls": {"mode": "certManager"}}, "tls.issuer.name"),
        ({"tls": {"mode": "mtls"}}, "/tls/mode"),
        ({"collector": {"storage": {"size": "50m"}}}, "/collector/storage/size"),  # 0.05 bytes to Kubernetes
        ({"sidecar": {"spoolVolume": "256"}}, "/sidecar/spoolVolume"),
        ({"example": {"shmSize": "8g"}}, "/example/shmSize"),
        ({"collector": {"storage": {"size": "20Gi"}}}, "store.max_bytes .40GiB. and the journal .4GiB. do not fit .*size .20Gi."),
        ({"collector": {"storage": {"size": "1Ti"}, "config": {"store": {"max_bytes": "1TiB"}}}}, "do not fit"),
    ],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any], output: str) -> None:
    with pytest.raises(Exception, match=output):
        rendered_chart(values)


def test_every_value_is_in_the_schema_and_has_a_default() -> None:
    """Every value is in the schema and has a default.

    This goes down to what Kubernetes defines itself. A value without a default is one that nobody finds.
    """
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    def walk(given: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
        assert set(given) == set(declared["properties"]) - {"global"}
        for key, value in given.items():
            inner = declared["properties"][key]
            if key != "resources" and inner.get("properties"):
                walk(value, inner)

    walk(values, schema)


def test_a_change_of_the_configuration_rolls_the_collector() -> None:
    def checksum(values: Mapping[str, Any]) -> str:
        (found,) = of_kind(chart(values), "StatefulSet")
        annotation: str = found["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        return annotation

    assert checksum({}) == checksum({"cluster": "eu-1"})
    assert checksum({}) != checksum({"collector": {"config": {"flush_interval": "1s"}}})


def test_the_store_is_bounded_below_its_volume() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["collector"]
    bound, size = values["config"]["store"]["max_bytes"], values["storage"]["size"]
    journal_gib = 4
    assert int(bound.removesuffix("GiB")) + journal_gib < int(size.removesuffix("Gi"))


@pytest.mark.parametrize(
    ("size", "bound"), [("10Gi", "6GiB"), ("2Ti", "1TiB"), ("500Gi", "400GB"), ("50G", "40GiB"), ("1Gi", "off")]
)
def test_a_volume_with_room_is_taken_and_what_cannot_be_compared_too(size: str, bound: str) -> None:
    values = {"collector": {"storage": {"size": size}, "config": {"store": {"max_bytes": bound}}}}
    (claim,) = of_kind(chart(values), "StatefulSet")[0]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == size


def test_the_collectors_data_outlives_the_release() -> None:
    (stateful,) = of_kind(chart(), "StatefulSet")
    assert stateful["spec"]["replicas"] == 1
    assert stateful["spec"]["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def test_every_series_carries_the_cluster_and_the_job() -> None:
    for monitor in of_kind(chart({"cluster": "eu-1"}), "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        made = {each["targetLabel"]: each["replacement"] for each in endpoint["relabelings"]}
        assert made == {"job": monitor["metadata"]["name"], "cluster": "eu-1"}


def test_a_broken_collector_is_replaced_by_the_next_version() -> None:
    """With OrderedReady, Kubernetes never replaces a pod that does not get ready.

    Not even a rollback does (kubernetes#67250).
    """
    (stateful,) = of_kind(chart(), "StatefulSet")
    assert stateful["spec"]["podManagementPolicy"] == "Parallel"


SENDER = {"matchExpressions": [{"key": "handrail-role", "operator": "Exists"}]}


def test_who_is_scraped_may_send() -> None:
    """Engines in a namespace that is scraped may send.

    If the collector took nothing from a namespace that the values name, no message would say so.
    """
    named = one(chart({"podMonitor": {"namespaces": ["llm", "handrail"]}}), "NetworkPolicy", "handrail-collector")["spec"]
    llm = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "llm"}}, "podSelector": SENDER}
    assert named["ingress"][0]["from"] == [{"podSelector": SENDER}, llm]
    everywhere = one(chart({"podMonitor": {"namespaces": ["any"]}}), "NetworkPolicy", "handrail-collector")["spec"]
    assert everywhere["ingress"][0]["from"] == [{"podSelector": SENDER}, {"namespaceSelector": {}, "podSelector": SENDER}]


def test_a_forward_whose_pods_have_another_port_can_be_let_out() -> None:
    """A policy uses the pods' ports; a URL has the service's port."""
    rule = {"ports": [{"port": 55681}]}
    values = {"collector": {"forward": ["http://otel.monitoring"]}, "networkPolicy": {"egress": [rule]}}
    assert one(chart(values), "NetworkPolicy", "handrail-collector")["spec"]["egress"][-1] == rule


def test_sidecars_in_other_namespaces_have_their_certificate_there() -> None:
    def made(kind: str, *namespaces: str) -> list[str]:
        tls = {"mode": "certManager", "issuer": {"kind": kind, "name": "ca"}}
        documents = chart({"tls": tls, "podMonitor": {"namespaces": list(namespaces)}})
        certificates = [each for each in of_kind(documents, "Certificate") if each["metadata"]["name"] == "handrail-sidecar"]
        assert {each["spec"]["secretName"] for each in certificates} == {"handrail-sidecar-tls"}
        return [each["metadata"].get("namespace", "") for each in certificates]

    assert made("ClusterIssuer", "llm", "handrail", "llm-2") == ["", "llm", "llm-2"]
    assert made("ClusterIssuer", "any") == [""]
    assert made("Issuer", "llm") == [""], "an Issuer signs in its own namespace only"


@pytest.mark.parametrize("mode", ["certManager", "secret"])
def test_the_notes_name_the_secrets_that_pods_wait_for(mode: str) -> None:
    """A pod whose secret is missing does not start, nor does the engine's."""
    tls = {"mode": mode, "issuer": {"name": "ca"}}
    values = {"tls": tls, "auth": {"secret": "tok"}, "podMonitor": {"namespaces": ["llm"]}}
    notes = rendered_chart(values)["handrail/templates/NOTES.txt"]
    assert "handrail-sidecar-tls" in notes
    assert "tok" in notes
    assert ("handrail-collector-tls" in notes) is (mode == "secret")
    assert "localhost" in notes
    assert "secrets" not in rendered_chart()["handrail/templates/NOTES.txt"]


def test_links_of_the_dashboards_lead_where_the_values_say() -> None:
    links = {"handrail": "https://handrail.example.com", "jaeger": "https://jaeger.example.com"}
    for values, expected in (
        ({}, ["http://127.0.0.1:16686", "http://127.0.0.1:4380"]),
        ({"dashboards": {"links": links}}, [links["jaeger"], links["handrail"]]),
    ):
        board = json.loads(one(chart(values), "ConfigMap", "handrail-dashboard-fleet")["data"]["handrail-fleet.json"])
        found = {each["name"]: each for each in board["templating"]["list"] if each["name"] in links}
        assert [found[name]["query"] for name in ("jaeger", "handrail")] == expected
        assert [found[name]["current"]["value"] for name in ("jaeger", "handrail")] == expected


def test_engines_of_the_example_can_be_put_on_gpu_nodes() -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    values = {"enabled": True, "nodeSelector": {"gpu": "h100"}, "tolerations": [taint], "runtimeClassName": "nvidia"}
    pods = {each.workload: each.pod for each in containers(chart({"example": values}))}
    for name, pod in pods.items():
        engine = name in ("handrail-example-prefill", "handrail-example-decode")
        assert (pod.get("nodeSelector") == {"gpu": "h100"}) is engine
        assert (pod.get("tolerations") == [taint]) is engine
        assert (pod.get("runtimeClassName") == "nvidia") is engine


def test_only_beside_engines_a_sidecar_asks_for_gpus() -> None:
    for each in containers(chart({"example": {"enabled": True}, "sidecar": {"gpu": "nvml"}})):
        if each.name == "handrail":
            assert ("NVIDIA_VISIBLE_DEVICES" in each.env) is (each.labels["handrail-role"] != "edge")


def test_the_network_policy_lets_out_only_what_is_forwarded() -> None:
    closed = one(chart(), "NetworkPolicy", "handrail-collector")["spec"]
    assert closed["egress"] == []
    assert "Egress" in closed["policyTypes"]
    opened = one(chart(EVERYTHING), "NetworkPolicy", "handrail-collector")["spec"]
    ports = [port["port"] for rule in opened["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 4318, 4317]


@pytest.mark.parametrize("values", ["everything", "example, inline"])
def test_no_policy_of_ours_touches_an_engine(values: str) -> None:
    documents = chart(VALUES[values])
    for policy in of_kind(documents, "NetworkPolicy"):
        wanted = policy["spec"]["podSelector"]["matchLabels"].items()
        assert [each.workload for each in containers(documents) if wanted <= each.labels.items()] == ["handrail-collector"]


def test_each_image_is_taken_from_the_given_registry() -> None:
    for each in containers(chart(EVERYTHING)):
        if each.name in ("handrail", "handrail-plugin", "collector"):
            assert each.spec["image"].startswith("registry.example.com/team/handrail")
            assert each.spec["image"].endswith(":1.2.3")
            assert each.pod["imagePullSecrets"] == [{"name": "regcred"}]


def test_gpu_counters_come_from_where_the_values_say() -> None:
    def sidecar(gpu: str) -> tuple[list[str], dict[str, str | None]]:
        values = {"example": {"enabled": True}, "sidecar": {"gpu": gpu}}
        found = next(
            each for each in containers(chart(values)) if each.name == "handrail" and each.labels["handrail-role"] == "decode"
        )
        return found.words(), found.env

    assert "--gpu-sample=off" in sidecar("none")[0]
    words, env = sidecar("nvml")
    assert not [word for word in words if word.startswith("--gpu")]
    assert env["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert "--gpu-dcgm-url=http://10.0.0.1:9400/metrics" in sidecar("dcgm")[0]


def test_certificates_are_for_the_names_that_are_connected_to() -> None:
    documents = chart(VALUES["TLS by cert-manager"])
    names = {each["metadata"]["name"]: each["spec"]["dnsNames"] for each in of_kind(documents, "Certificate")}
    servers = {each["metadata"]["name"]: each["spec"]["podMetricsEndpoints"][0] for each in of_kind(documents, "PodMonitor")}
    assert set(names) == {"handrail-collector", "handrail-sidecar"}
    for name, endpoint in servers.items():
        assert endpoint["tlsConfig"]["serverName"] in names[name]
    sidecars = [each for each in containers(documents) if each.name == "handrail"]
    assert {sidecar_settings(each.words()).collector.endpoint.host for each in sidecars} <= set(names["handrail-collector"])
    mounted = {
        source["secret"]["name"]
        for each in containers(documents)
        for volume in each.pod["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
    }
    assert mounted == {each["spec"]["secretName"] for each in of_kind(documents, "Certificate")}


def test_rules_and_dashboards_are_all_there() -> None:
    documents = chart({"prometheusRule": {"runbooks": "https://runbooks.example.com/"}})
    rules = {each["metadata"]["name"]: each for each in of_kind(documents, "PrometheusRule")}
    files = sorted((ROOT / "alerts/generated").glob("*.yaml"))
    assert set(rules) == {f"handrail-{file.stem}" for file in files}
    for file in files:
        reported_output = yaml.safe_dump(rules[f"handrail-{file.stem}"]["spec"])
        meant = yaml.safe_dump(yaml.safe_load(file.read_text(encoding="utf-8")))
        assert reported_output == meant.replace("docs/runbooks/", "https://runbooks.example.com/")
    assert "runbook_url: https://runbooks.example.com/" in reported_output
    boards = [each["metadata"]["name"] for each in of_kind(documents, "ConfigMap") if "-dashboard-" in each["metadata"]["name"]]
    assert len(boards) == len([*(ROOT / "dashboards/handrail_dashboards/generated").glob("*.json")]) > 0


def test_H15_a_rule_that_no_prometheus_selects_is_warned_of() -> None:
    """The installation warns of a rule that no Prometheus selects.

    A rule without the label that a Prometheus selects by installs clean and never fires.
    """
    assert "set prometheusRule.labels" in rendered_chart()["handrail/templates/NOTES.txt"]
    labels = {"prometheusRule": {"labels": {"release": "x"}}}
    assert "set prometheusRule.labels" not in rendered_chart(labels)["handrail/templates/NOTES.txt"]
    assert "ruleSelector" in rendered_chart(labels)["handrail/templates/NOTES.txt"]
