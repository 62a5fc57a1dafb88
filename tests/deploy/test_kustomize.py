"""The kustomizations, built by Kustomize's own code: valid, the same as the chart's, and nothing of the engines' lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from manifests import KUSTOMIZE, NAMESPACE, Document, chart, containers, kustomization, of_kind
from operator_schemas import KINDS

OVERLAYS = ("overlays/vllm-pd", "overlays/vllm-pd-proxy")
# What of the chart goes where.
RENDERED = {
    "base/rendered.yaml": ("ServiceAccount", "ConfigMap", "Service", "StatefulSet", "NetworkPolicy"),
    "components/monitoring/rendered.yaml": ("PodMonitor", "PrometheusRule"),
}
_HELMS_OWN = ("app.kubernetes.io/managed-by", "helm.sh/chart")


def without_helm(documents: Sequence[Document], kinds: Sequence[str]) -> Iterator[Document]:
    """The chart's objects of these kinds, dashboards left out, as Kustomize's users have them."""
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
    made = list(without_helm(chart(), RENDERED[file]))
    path = KUSTOMIZE / file
    text = "# Made from deploy/helm/handrail by `pytest tests/deploy --update`: change it there.\n"
    text += yaml.safe_dump_all(made, sort_keys=False, width=200)
    if request.config.getoption("--update"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, f"{file} is not what the chart makes: pytest tests/deploy --update"


@pytest.mark.parametrize("folder", [*OVERLAYS, "base", "examples/vllm-pd"])
def test_objects_are_what_kubernetes_takes(folder: str) -> None:
    for document in kustomization(folder):
        if document["apiVersion"] not in KINDS:
            kubernetes_validate.validate(document, "1.37", strict=True)


def test_all_that_belongs_to_the_collector_lies_in_one_namespace() -> None:
    for document in kustomization("base"):
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == NAMESPACE


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_attaching_keeps_all_that_the_engines_pods_had(overlay: str) -> None:
    before = {each["metadata"]["name"]: each for each in of_kind(kustomization("examples/vllm-pd"), "Deployment")}
    after = {each["metadata"]["name"]: each for each in of_kind(kustomization(overlay), "Deployment")}
    assert set(before) == set(after)
    for name, deployment in before.items():
        assert lost(deployment, after[name]) == []


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """What of ``before`` is not in ``after``: keys and values anywhere, elements of lists by their name."""
    if isinstance(before, dict):
        return [each for key, value in before.items() for each in lost(value, after.get(key), f"{path}.{key}")]
    if isinstance(before, list) and before and isinstance(before[0], dict) and "name" in before[0]:
        named = {each["name"]: each for each in after}
        return [each for value in before for each in lost(value, named.get(value["name"]), f"{path}[{value['name']}]")]
    if isinstance(before, list):
        return [f"{path}: {value}" for value in before if value not in (after or [])]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]


@pytest.mark.parametrize(("overlay", "mode"), [*zip(OVERLAYS, ("plugin", "proxy"), strict=True)])
def test_engines_are_attached_as_the_chart_attaches_them(overlay: str, mode: str) -> None:
    """Two ways to the same pod: sidecars, the init container, variables, mounts, volumes."""
    ours = attached(kustomization(overlay))
    theirs = attached(chart({"example": {"enabled": True, "mode": mode}}))
    assert ours == theirs


def attached(documents: Sequence[Document]) -> dict[str, Any]:
    """What Handrail adds to a pod, by its role."""
    found: dict[str, Any] = {}
    for each in containers(documents):
        role = each.labels.get("handrail-role")
        if role is None:
            continue
        added = found.setdefault(role, {"volumes": plain(each.pod["volumes"])})
        if each.init:
            spec = {key: value for key, value in each.spec.items() if key not in ("env", "args")}
            added[each.name] = {**spec, "args": sorted(each.words())}
        else:
            added["mounts"] = plain([*each.mounts.values()])
            added["env"] = {name: value for name, value in each.env.items() if name in ("HANDRAIL_SOCKET", "PYTHONPATH")}
            added["flags"] = [word for word in each.spec["args"] if "handrail.guest" in word]
    return found


def plain(named: Sequence[Document]) -> dict[str, Document]:
    """Those of ours, by name."""
    return {each["name"]: each for each in named if each["name"].startswith("handrail")}


@pytest.mark.parametrize("component", ["plugin", "middleware", "proxy"])
def test_components_find_stateful_engines_too(component: str, tmp_path: Path) -> None:
    """Engines are Deployments here and StatefulSets there; a component that misses one kind would say nothing."""
    example = yaml.safe_load_all((KUSTOMIZE / "examples/vllm-pd/decode.yaml").read_text(encoding="utf-8"))
    (deployment,) = [each for each in example if each["kind"] == "Deployment"]
    stateful = {**deployment, "kind": "StatefulSet"}
    stateful["spec"] = {**deployment["spec"], "serviceName": "vllm-decode"}
    build = built_with(component, tmp_path)
    assert patched(build(deployment)) == patched(build(stateful)) != patched([deployment])


def built_with(component: str, folder: Path) -> Callable[[Document], list[Document]]:
    def build(document: Document) -> list[Document]:
        relative = Path(*[".."] * len(folder.resolve().parts[1:]), *KUSTOMIZE.resolve().parts[1:], "components", component)
        (folder / "it.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        text = yaml.safe_dump({"resources": ["it.yaml"], "components": [str(relative)]})
        (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
        return kustomization(str(folder))

    return build


def patched(documents: Sequence[Document]) -> Any:
    (document,) = documents
    return document["spec"]["template"]
