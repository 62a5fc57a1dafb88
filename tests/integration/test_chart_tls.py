"""The chart's TLS without a cluster.

Its collector file and a sidecar's flags run as processes, with certificates for the names that it asks for, and a token.
Prometheus and the kubelet get in by their own ways. Only addresses and folders differ from the chart.
"""

from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from pathlib import Path

import pytest

from handrail_cli.subprocesses import Children, free_ports
from harness.certs import Authority
from harness.manifests import Document, chart, containers, of_kind, one

pytestmark = pytest.mark.timeout(600)

VALUES = {
    "tls": {"mode": "certManager", "issuer": {"kind": "ClusterIssuer", "name": "ca"}, "clientCertificates": True},
    "auth": {"secret": "handrail-token"},
    "example": {"enabled": True},
}
TOKEN = "4d2c3b1a" * 8
DEADLINE_S = 180.0
_HANDRAIL = (sys.executable, "-m", "handrail_cli.main")


@dataclass(frozen=True, slots=True)
class Way:
    """One client: the folder with its certificate and authority, and its token."""

    server: str  # the name that the certificate must be for; "": not verified
    secret: Path | None = None
    token: str = ""


def ask(port: int, path: str, way: Way) -> tuple[int, str]:
    """Return status and body. Raises ``OSError``."""
    if way.server and way.secret is not None:
        context = ssl.create_default_context(cafile=str(way.secret / "ca.crt"))
        context.load_cert_chain(way.secret / "tls.crt", way.secret / "tls.key")
    else:  # as the kubelet does
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=way.server or None) as made,
    ):
        token = f"Authorization: Bearer {way.token}\r\n" if way.token else ""
        made.sendall(f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{token}\r\n".encode())
        with HTTPResponse(made) as answer:
            answer.begin()
            return answer.status, answer.read().decode()


@dataclass(frozen=True, slots=True)
class Stack:
    collector: int
    sidecar: int
    secrets: dict[str, Path]  # as the volume of each part holds them
    documents: list[Document]
    children: Children

    def scraped(self, job: str, *, token: str = TOKEN) -> tuple[int, str]:
        """Return the page, fetched as the PodMonitor configures Prometheus."""
        endpoint = one(self.documents, "PodMonitor", job)["spec"]["podMetricsEndpoints"][0]
        port = self.sidecar if job == "handrail-sidecar" else self.collector
        assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == "handrail-sidecar-tls"
        way = Way(endpoint["tlsConfig"]["serverName"], self.secrets["handrail-sidecar"], token)
        return ask(port, endpoint.get("path", "/metrics"), way)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    documents = chart(VALUES)
    authority = Authority(tmp_path)
    secrets = {}
    for certificate in of_kind(documents, "Certificate"):
        name = certificate["metadata"]["name"]
        secrets[name] = tmp_path / name
        secrets[name].mkdir()
        leaf = authority.leaf(*certificate["spec"]["dnsNames"])
        (secrets[name] / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        (secrets[name] / "tls.key").write_bytes(leaf.private_key_pem.bytes())
        (secrets[name] / "ca.crt").write_bytes(authority.pem)
        (secrets[name] / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
        for file in secrets[name].iterdir():
            file.chmod(0o440)
    grpc, http, api, admin = free_ports(4)
    file = tmp_path / "collector.yaml"
    config = str(one(documents, "ConfigMap", "handrail-collector")["data"]["collector.yaml"])
    for ours, theirs in (
        ("0.0.0.0:4317", f"127.0.0.1:{grpc}"),
        ("0.0.0.0:4318", f"127.0.0.1:{http}"),
        ("0.0.0.0:4380", f"127.0.0.1:{api}"),
        ("/var/lib/handrail", str(tmp_path / "data")),
        ("/etc/handrail-tls", str(secrets["handrail-collector"])),
    ):
        assert ours in config
        config = config.replace(ours, theirs)
    file.write_text(config, encoding="utf-8")
    decode = [each for each in containers(documents) if each.name == "handrail" and each.labels["handrail-role"] == "decode"]
    line = "\n".join(decode[0].words())
    for ours, theirs in (
        ("handrail-collector.handrail.svc:4318", f"localhost:{http}"),
        ("0.0.0.0:9464", f"127.0.0.1:{admin}"),
        ("/etc/handrail-tls", str(secrets["handrail-sidecar"])),
        ("/run/handrail", str(tmp_path)),
        ("/var/lib/handrail", str(tmp_path)),
    ):
        assert ours in line
        line = line.replace(ours, theirs)
    children = Children(tmp_path)
    try:
        children.start("collector", [*_HANDRAIL, "collector", f"--config={file}"])
        children.start("sidecar", [*_HANDRAIL, *line.split("\n")])
        yield Stack(api, admin, secrets, documents, children)
    finally:
        children.end([], 20.0)


def alive(port: int, path: str) -> bool:
    try:
        return ask(port, path, Way("")) == (200, "ok\n")
    except OSError:
        return False


def test_the_parts_trust_each_other_and_nobody_else(stack: Stack) -> None:
    for port in (stack.collector, stack.sidecar):
        for path in ("/healthz", "/readyz"):  # the kubelet shows no certificate and no token
            stack.children.wait_for(f"{path} on {port}", partial(alive, port, path), DEADLINE_S, poll_s=0.1)

    def delivered() -> bool:
        status, page = stack.scraped("handrail-sidecar")
        return status == 200 and "handrail_sidecar_export_up 1.0" in page

    stack.children.wait_for("the sidecar delivers nothing", delivered, DEADLINE_S, poll_s=0.2)
    assert stack.scraped("handrail-collector")[0] == 200
    for job in ("handrail-sidecar", "handrail-collector"):
        assert stack.scraped(job, token="")[0] == 401
        assert stack.scraped(job, token="wrong")[0] == 401
    for port in (stack.collector, stack.sidecar):  # a token alone, without a certificate
        assert ask(port, "/metrics", Way("", token=TOKEN))[0] in (401, 403)
