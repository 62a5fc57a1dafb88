"""The kustomizations, built by Kustomize's own code.

They are valid, equal the chart's objects, and lose nothing of the engines'.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from handrail_sidecar.settings import SidecarListener
from harness.manifests import (
    KUSTOMIZE,
    NAMESPACE,
    ROOT,
    Document,
    chart,
    containers,
    kustomization,
    of_kind,
    one,
    sidecar_settings,
)
from harness.operator_schemas import KINDS

# The chart's kinds, by the kustomization that has them.
_COLLECTOR = ("ServiceAccount", "ConfigMap", "Service", "StatefulSet", "NetworkPolicy")
_MONITORING = ("PodMonitor", "PrometheusRule")
PLAINTEXT: dict[str, Any] = {"tls": {"mode": "plaintext"}}
TLS: dict[str, Any] = {
    "tls": {"mode": "secret", "collectorSecret": "handrail-tls", "sidecarSecret": "handrail-tls"},
    "auth": {"secret": "handrail-token"},
}
RENDERED = {
    "base/rendered.yaml": (_COLLECTOR, PLAINTEXT),
    "base-tls/rendered.yaml": (_COLLECTOR, TLS),
    "components/monitoring/rendered.yaml": (_MONITORING, PLAINTEXT),
    "components/monitoring-tls/rendered.yaml": (_MONITORING, TLS),
}
OVERLAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "overlays/vllm-pd": ("plugin", PLAINTEXT),
    "overlays/vllm-pd-proxy": ("proxy", PLAINTEXT),
    "overlays/vllm-pd-tls": ("plugin", TLS),
}
_HELMS_OWN = ("app.kubernetes.io/managed-by", "helm.sh/chart")


def without_helm(documents: Sequence[Document], kinds: Sequence[str]) -> Iterator[Document]:
    """Yield the chart's objects of these kinds as Kustomize's users have them.

    Dashboards are left out.
    """
    for document in copy.deepcopy([each for each in documents if each["kind"] in kinds]):
        if "-dashboard-" in document["metadata"]["name"]:
            continue
        document["metadata"]["namespace"] = NAMESPACE
        template = document.get("spec", {}).get("template", {})
        for metadata in (document["metadata"], template.get("metadata", {})):
            for label in _HELMS_OWN:
                metadata.get("labels", {}).pop(label, None)
        yield document


@pytest.mark.parametrize("file", RENDERED)
def test_what_is_rendered_is_the_charts(file: str, request: pytest.FixtureRequest) -> None:
    kinds, values = RENDERED[file]
    made = list(without_helm(chart(values), kinds))
    path = KUSTOMIZE / file
    text = "# Made from deploy/helm/handrail by `pytest tests/deploy --update`: change it there.\n"
    text += yaml.safe_dump_all(made, sort_keys=False, width=200)
    if request.config.getoption("--update"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, f"{file} is not what the chart makes: pytest tests/deploy --update"


@pytest.mark.parametrize("folder", [*OVERLAYS, "base", "base-tls", "examples/vllm-pd"])
def test_objects_are_what_kubernetes_takes(folder: str) -> None:
    for document in kustomization(folder):
        if document["apiVersion"] not in KINDS:
            kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize("base", ["base", "base-tls"])
def test_all_that_belongs_to_the_collector_lies_in_one_namespace(base: str) -> None:
    for document in kustomization(base):
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == NAMESPACE


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_attaching_keeps_all_that_the_engines_pods_had(overlay: str) -> None:
    before = {each["metadata"]["name"]: each for each in of_kind(kustomization("examples/vllm-pd"), "Deployment")}
    after = {each["metadata"]["name"]: each for each in of_kind(kustomization(overlay), "Deployment")}
    assert set(before) == set(after)
    for name, deployment in before.items():
        assert lost(deployment, after[name]) == []


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Return what of ``before`` is not in ``after``.

    Keys and values are compared anywhere, elements of lists by their name.
    """
    if isinstance(before, dict):
        return [each for key, value in before.items() for each in lost(value, after.get(key), f"{path}.{key}")]
    if isinstance(before, list) and before and isinstance(before[0], dict) and "name" in before[0]:
        named = {each["name"]: each for each in after}
        return [each for value in before for each in lost(value, named.get(value["name"]), f"{path}[{value['name']}]")]
    if isinstance(before, list):
        return [f"{path}: {value}" for value in before if value not in (after or [])]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_engines_are_attached_as_the_chart_attaches_them(overlay: str) -> None:
    """Chart and component attach the same parts to a pod.

    The parts are sidecars, the init container, variables, mounts and volumes.
    """
    mode, values = OVERLAYS[overlay]
    ours = attached(kustomization(overlay))
    theirs = attached(chart({**values, "example": {"enabled": True, "mode": mode}}))
    assert ours == theirs


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_patch_of_one_variable_names_the_cluster(overlay: str) -> None:
    sidecars = [each for each in containers(kustomization(overlay)) if each.name == "handrail"]
    assert {sidecar_settings(each.words()).cluster for each in sidecars} == {""}
    for each in sidecars:
        (variable,) = [entry for entry in each.spec["env"] if entry["name"] == "HANDRAIL_CLUSTER"]
        variable["value"] = "eu-1"
        assert sidecar_settings(each.words()).cluster == "eu-1"


def attached(documents: Sequence[Document]) -> dict[str, Any]:
    """Return what Handrail adds to a pod, by the pod's role."""
    found: dict[str, Any] = {}
    for each in containers(documents):
        role = each.labels.get("handrail-role")
        if role is None:
            continue
        added = found.setdefault(role, {"volumes": plain(each.pod["volumes"])})
        if each.init:
            added[each.name] = {key: value for key, value in each.spec.items() if key not in ("env", "args", "volumeMounts")}
            added[each.name]["mounts"] = each.mounts
            if each.sidecar:
                settings = sidecar_settings(each.words())
                own = set(settings.plaintext) - ({SidecarListener.PROXY} if settings.listen is None else set())
                added["settings"] = replace(settings, plaintext=tuple(sorted(own)))
                added["resource"] = each.env["OTEL_RESOURCE_ATTRIBUTES"]
        else:
            added["mounts"] = plain([*each.mounts.values()])
            added["env"] = {name: value for name, value in each.env.items() if name in ("HANDRAIL_SOCKET", "PYTHONPATH")}
            added["flags"] = [word for word in each.spec["args"] if "handrail.plugin" in word]
    return found


def plain(named: Sequence[Document]) -> dict[str, Document]:
    """Return our objects by name."""
    return {each["name"]: each for each in named if each["name"].startswith("handrail")}


def test_every_dashboard_is_in_the_kustomization() -> None:
    made = kustomization("overlays/vllm-pd")
    generated = sorted((ROOT / "dashboards/handrail_dashboards/generated").glob("*.json"))
    assert generated
    for file in generated:
        ours = one(made, "ConfigMap", f"handrail-dashboard-{file.stem}")
        theirs = one(chart(), "ConfigMap", f"handrail-dashboard-{file.stem}")
        assert json.loads(ours["data"][f"handrail-{file.name}"]) == json.loads(file.read_text(encoding="utf-8"))
        assert {key: value.strip() for key, value in ours["data"].items()} == {k: v.strip() for k, v in theirs["data"].items()}
        assert ours["metadata"]["labels"].items() <= theirs["metadata"]["labels"].items()
        assert ours["metadata"]["annotations"] == theirs["metadata"]["annotations"]
        assert len(ours["data"][f"handrail-{file.name}"]) < 900_000, "a ConfigMap holds 1 MiB"


@pytest.mark.parametrize("component", ["plugin", "middleware", "proxy"])
def test_components_find_stateful_engines_too(component: str, tmp_path: Path) -> None:
    """Components find engines in Deployments and in StatefulSets.

    A component that misses one kind gives no error.
    """
    example = yaml.safe_load_all((KUSTOMIZE / "examples/vllm-pd/decode.yaml").read_text(encoding="utf-8"))
    (deployment,) = [each for each in example if each["kind"] == "Deployment"]
    stateful = {**deployment, "kind": "StatefulSet"}
    stateful["spec"] = {**deployment["spec"], "serviceName": "vllm-decode"}
    build = built_with(tmp_path, component)
    assert patched(build(deployment)) == patched(build(stateful)) != patched([deployment])


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_probes_speak_tls_where_the_sidecar_does(kind: str, tmp_path: Path) -> None:
    example = yaml.safe_load_all((KUSTOMIZE / "examples/vllm-pd/decode.yaml").read_text(encoding="utf-8"))
    (deployment,) = [each for each in example if each["kind"] == "Deployment"]
    for components, scheme in ((("proxy",), "HTTP"), (("proxy", "tls"), "HTTPS"), (("plugin", "tls"), None)):
        (document,) = built_with(tmp_path, *components)({**deployment, "kind": kind})
        (sidecar,) = [each for each in document["spec"]["template"]["spec"]["initContainers"] if each["name"] == "handrail"]
        assert sidecar.get("livenessProbe", {}).get("httpGet", {}).get("scheme") == scheme, components


@pytest.mark.parametrize("component", ["plugin", "middleware", "proxy", "edge", "tls"])
def test_what_is_no_workload_is_left_alone_whatever_its_labels(component: str, tmp_path: Path) -> None:
    """Only workloads change, whatever labels the other objects have.

    ``labels:`` of a kustomization puts the role on services too. Kubernetes refuses a template in a service.
    """
    for role in ("prefill", "decode", "edge"):
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "labels": {"handrail-role": role}}}
        service["spec"] = {"ports": [{"port": 8000}]}
        assert built_with(tmp_path, component)(service) == [service]


def built_with(folder: Path, *components: str) -> Callable[[Document], list[Document]]:
    def build(document: Document) -> list[Document]:
        relative = Path(*[".."] * len(folder.resolve().parts[1:]), *KUSTOMIZE.resolve().parts[1:], "components")
        (folder / "it.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        text = yaml.safe_dump({"resources": ["it.yaml"], "components": [str(relative / each) for each in components]})
        (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
        return kustomization(str(folder))

    return build


def patched(documents: Sequence[Document]) -> Any:
    (document,) = documents
    return document["spec"]["template"]
