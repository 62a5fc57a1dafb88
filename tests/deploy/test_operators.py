"""PodMonitors and rules against the Prometheus operator's schemas and types.

One test checks them all, since each check takes seconds.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from harness.manifests import chart, kustomization, one
from harness.operator_schemas import KINDS, operator_problems

pytestmark = pytest.mark.timeout(600)  # includes npm's first installation

VALUES: tuple[dict[str, Any], ...] = (
    {},
    {
        "cluster": "eu-1",
        "podMonitor": {"labels": {"release": "x"}, "namespaces": ["llm"]},
        "prometheusRule": {"labels": {"a": "b"}},
    },
    {"podMonitor": {"namespaces": ["any"]}},
    {"tls": {"mode": "certManager", "issuer": {"kind": "ClusterIssuer", "name": "ca"}}},
    {"tls": {"mode": "secret", "clientCertificates": True}, "auth": {"secret": "handrail-token"}},
)


def test_the_operators_take_our_objects_and_would_not_take_wrong_ones() -> None:
    monitor = copy.deepcopy(one(chart(), "PodMonitor", "handrail-sidecar"))
    monitor["metadata"]["name"] = "wrong"
    monitor["spec"]["podMetricsEndpoints"][0] |= {"interval": "a while", "pathh": "/metrics"}
    rule = {"apiVersion": KINDS[0], "kind": "PrometheusRule", "metadata": {"name": "wrong"}, "spec": {"groups": [{"rules": []}]}}
    ours = [document for values in VALUES for document in chart(values)]
    ours += [
        document for overlay in ("vllm-pd", "vllm-pd-proxy", "vllm-pd-tls") for document in kustomization(f"overlays/{overlay}")
    ]
    lines = operator_problems([*ours, monitor, rule])
    assert [line for line in lines if "/wrong:" not in line] == []
    wrong = "\n".join(lines)
    assert "interval must match" in wrong
    assert "pathh" in wrong
    assert "PrometheusRule/wrong" in wrong
