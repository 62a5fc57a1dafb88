"""Listeners beyond this host are refused without TLS unless they are named.

The refusal says how to set up TLS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from handrail.config.listeners import AuthConfig, Listener, ListenerSecurity, TlsConfig
from handrail.config.schema import ConfigError, Problem, parse
from handrail.config.types import Address
from handrail.security.tls import ServerTls, client_identity
from handrail_cli.main import main
from handrail_collector.config import CollectorConfig, CollectorListener
from handrail_sidecar.settings import SidecarConfig, SidecarListener
from harness.certs import DAY, Authority, now, replace

EDGE = "role: edge\nupstream: http://127.0.0.1:8100\n"
TLS = "tls: {cert_file: /c, key_file: /k}\n"


def problems(text: str, cls: type = SidecarConfig) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(cls, text, "x.yaml")
    return {problem.path: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("cls", "path", "address", "name"),
    [
        (SidecarConfig, "listen", "0.0.0.0:8000", "proxy"),
        (SidecarConfig, "otlp_grpc", "10.0.0.7:4317", "tap"),
        (SidecarConfig, "otlp_http", "tap.example:4318", "tap"),
        (SidecarConfig, "admin", "'[::]:9464'", "admin"),
        (CollectorConfig, "otlp_grpc", "0.0.0.0:4317", "otlp_grpc"),
        (CollectorConfig, "otlp_http", "127.example.test:4318", "otlp_http"),
        (CollectorConfig, "api", "10.0.0.7:4380", "api"),
    ],
)
def test_beyond_this_host_only_with_tls_or_by_name(cls: type, path: str, address: str, name: str) -> None:
    base = f"{EDGE if cls is SidecarConfig else ''}{path}: {address}\n"
    problem = problems(base, cls)[path]
    assert "would listen beyond this host without TLS" in problem.rule
    assert "tls.cert_file and tls.key_file (docs/security.md)" in problem.rule
    assert f"plaintext: [{name}]" in problem.rule
    assert problem.value == repr(address.strip("'"))
    watching = "" if cls is CollectorConfig or path != "admin" else "plugin_socket: /s\n"
    parse(cls, f"{base}{watching}plaintext: [{name}]\n", "x.yaml")
    parse(cls, base + watching + TLS, "x.yaml")


def test_the_loopback_needs_neither() -> None:
    parse(SidecarConfig, EDGE + "listen: 127.0.0.1:8000\notlp_grpc: '[::1]:1'\nadmin: localhost:9464", "x.yaml")
    parse(CollectorConfig, "api: 127.8.9.10:1", "x.yaml")


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("tls: {cert_file: /c}", "tls.key_file", "must be given with the other"),
        ("tls: {key_file: /k}", "tls.cert_file", "must be given with the other"),
        ("tls: {client_ca_file: /ca}", "tls.cert_file", "must be given with tls.client_ca_file"),
        ("collector: {cert_file: /c, endpoint: https://c}", "collector.key_file", "must be given with the other"),
        ("collector: {ca_file: /ca}", "collector.ca_file", "does nothing with http://"),
        ("collector: {ca_file: /ca, endpoint: grpc://c:4317}", "collector.ca_file", "does nothing with grpc://"),
        ("collector: {token_file: /t, headers: {Authorization: Bearer x}}", "collector.token_file", "give one of them"),
    ],
)
def test_what_does_not_go_together(text: str, path: str, words: str) -> None:
    problem = problems(f"{EDGE}listen: 127.0.0.1:8000\n{text}")[path]
    assert words in problem.rule
    if "does nothing" in words:
        assert "endpoint: https://127.0.0.1:4318" in problem.example or "endpoint: grpcs://c:4317" in problem.example


def test_an_unknown_listener_is_answered_with_the_nearest() -> None:
    assert problems(EDGE + "listen: 0.0.0.0:1\nplaintext: [proxi]")["plaintext[0]"].nearest == "proxy"


@pytest.mark.parametrize(
    "command",
    [
        ["sidecar", "--role", "edge", "--listen", "0.0.0.0:8000", "--upstream", "http://127.0.0.1:8100"],
        ["collector", "--api", "0.0.0.0:4380"],
    ],
)
def test_the_start_is_refused_with_the_exit_code_of_a_wrong_configuration(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert "plaintext: [" in capsys.readouterr().err


def test_every_listener_has_its_name() -> None:
    assert {each.name for each in CollectorConfig().listeners} == {each.value for each in CollectorListener}
    sidecar = parse(SidecarConfig, EDGE + "listen: 127.0.0.1:1", "x.yaml")
    assert {each.name for each in sidecar.listeners} == {each.value for each in SidecarListener}


def protection(
    ca: Authority, *, client_ca: bool = False, token: Path | None = None, plaintext: tuple[str, ...] = ()
) -> ListenerSecurity:
    files = ca.files("server")
    tls = TlsConfig(cert_file=files.cert, key_file=files.key, client_ca_file=ca.file if client_ca else None)
    return ListenerSecurity(tls, AuthConfig(token_file=token), plaintext)


def test_open_listeners_are_logged_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca, token = Authority(tmp_path), tmp_path / "tokens"
    replace(token, b"0123456789abcdef")
    listeners = [
        Listener("tap", "otlp_grpc", Address("0.0.0.0", 4317)),
        Listener("proxy", "listen", Address("0.0.0.0", 80), guarded=False),
        Listener("admin", "admin", Address("127.0.0.1", 9464)),
    ]

    def statement(protected: ListenerSecurity) -> list[str]:
        caplog.clear()
        protected.warn_of_open(listeners)
        return [record.getMessage() for record in caplog.records]

    assert statement(protection(ca)) == [
        "tap (otlp_grpc) on 0.0.0.0:4317 accepts every client that can reach it: set auth.token_file or tls.client_ca_file"
    ]
    assert statement(protection(ca, token=token)) == []
    assert statement(protection(ca, client_ca=True)) == []
    assert statement(protection(ca, plaintext=("tap",))) == [
        "tap (otlp_grpc) on 0.0.0.0:4317 listens without TLS, as the setting plaintext allows: only a "
        "trusted network may reach it"
    ]


def test_a_named_listener_speaks_plaintext(tmp_path: Path) -> None:
    found = protection(Authority(tmp_path), plaintext=("tap",))
    assert found.tls("tap") is None
    assert found.context("tap") is None
    assert found.context("admin") is not None


def server_tls(tmp_path: Path, cert: bytes | None, key: bytes | None, ca: bytes | None = None) -> ServerTls:
    paths: dict[str, Any] = {}
    for name, content in (("cert", cert), ("key", key), ("ca", ca)):
        if content is not None:
            replace(tmp_path / name, content)
            paths[name] = tmp_path / name
    return ServerTls(tmp_path / "cert", tmp_path / "key", paths.get("ca"))


def test_unusable_files_are_reported_with_setting_path_and_remedy(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    leaf, other = authority.leaf(), authority.leaf()
    cert, key = leaf.cert_chain_pems[0].bytes(), leaf.private_key_pem.bytes()
    encrypted = key.replace(b"BEGIN ", b"BEGIN ENCRYPTED ").replace(b"END ", b"END ENCRYPTED ")
    at, key_at = f"tls.cert_file: {tmp_path / 'cert'}", f"tls.key_file: {tmp_path / 'key'}"
    for given, words in (
        ((None, key), f"{at} cannot be read: No such file or directory"),
        ((b"", key), f"{at} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)"),
        ((key, key), f"{at} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)"),
        ((cert, cert), f"{key_at} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)"),
        (
            (cert, encrypted),
            f"{key_at} is encrypted, and nobody can enter a passphrase; decrypt it: openssl pkey -in OLD -out NEW",
        ),
        ((cert, other.private_key_pem.bytes()), f"{at} with {key_at}: the key does not belong to the certificate"),
        ((cert, key, b"x"), f"tls.client_ca_file: {tmp_path / 'ca'} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)"),
    ):
        (tmp_path / "cert").unlink(missing_ok=True)
        with pytest.raises((OSError, ValueError)) as caught:
            server_tls(tmp_path, *given)
        assert str(caught.value) == words


def test_a_key_that_gRPC_cannot_use_is_refused_at_start(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    cert = x509.CertificateBuilder(who, who, key.public_key(), 7, now() - DAY, now() + DAY).sign(key, None)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(
        ValueError, match=r"its key is Ed25519, which gRPC does not support; use RSA, or ECDSA with P-256 or P-384"
    ):
        server_tls(tmp_path, cert.public_bytes(Encoding.PEM), pem)


def test_a_certificate_that_is_over_is_warned_of_and_never_replaces_one_that_is_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = Authority(tmp_path)
    over = ca.leaf(begins=now() - 9 * DAY, ends=now() - DAY)
    files = ca.files("server", over)
    tls = ServerTls(files.cert, files.key)
    day = (now() - DAY).date().isoformat()
    assert (
        f"tls.cert_file: {files.cert} ended on {day}: peers will refuse it; give a certificate that is valid now" in caplog.text
    )
    files.put(ca.leaf())
    assert tls.identity.poll()
    files.put(over)
    assert [tls.identity.poll(), tls.identity.poll()] == [False, False]
    assert tls.identity.refused.endswith(f"ended on {day}; the one in use stays, it is valid")
    assert tls.identity.value.expiries["server"] > now().timestamp()


def test_when_what_ends(tmp_path: Path) -> None:
    ca, soon = Authority(tmp_path), now() + 30 * DAY
    files = ca.files("one", ca.leaf(ends=soon))
    server = ServerTls(files.cert, files.key, ca.file).identity.value.expiries
    assert server["server"] == int(soon.timestamp())
    assert server["client_ca"] > now().timestamp()
    client = client_identity(ca.file, files.cert, files.key, use="collector").value.expiries
    assert client == {"collector": server["server"], "collector_ca": server["client_ca"]}
    assert client_identity(None, None, None, use="collector").value.expiries == {}


def test_the_line_at_start_says_how_each_listener_is_protected(tmp_path: Path) -> None:
    files, ca = Authority(tmp_path).files("server"), Authority(tmp_path, "clients")
    token = tmp_path / "token"
    replace(token, b"0123456789abcdef")
    tls = f"tls: {{cert_file: {files.cert}, key_file: {files.key}"
    base = EDGE + "listen: 127.0.0.1:1\notlp_grpc: 127.0.0.1:2\nadmin: 127.0.0.1:3\nplugin_socket: /s\n"
    report = {}
    for name, text in {
        "nothing": "",
        "all": f"{tls}, client_ca_file: {ca.file}}}\nauth: {{token_file: {token}}}\nplaintext: [tap]\n",
        "tls": f"{tls}}}\n",
    }.items():
        config = parse(SidecarConfig, base + text, "x.yaml")
        protection = ListenerSecurity(config.tls, config.auth, [each.value for each in config.plaintext])
        seen = {"admin": "127.0.0.1:3", "otlp_grpc": "127.0.0.1:2", "proxy": "127.0.0.1:1", "plugin": "/s", "metrics": "http://e"}
        report[name] = protection.describe(seen, config.listeners)
    assert report == {
        "nothing": "admin 127.0.0.1:3 (plaintext), otlp_grpc 127.0.0.1:2 (plaintext), proxy 127.0.0.1:1 (plaintext), "
        "plugin /s, metrics http://e",
        "all": "admin 127.0.0.1:3 (TLS, client certificates, token), otlp_grpc 127.0.0.1:2 (plaintext, token), "
        "proxy 127.0.0.1:1 (TLS, client certificates), plugin /s, metrics http://e",
        "tls": "admin 127.0.0.1:3 (TLS), otlp_grpc 127.0.0.1:2 (TLS), proxy 127.0.0.1:1 (TLS), plugin /s, metrics http://e",
    }


def test_every_bound_listener_of_the_collector_is_described(tmp_path: Path) -> None:
    token = tmp_path / "token"
    replace(token, b"0123456789abcdef")
    config = parse(CollectorConfig, f"auth: {{token_file: {token}}}\n", "x.yaml")
    protection = ListenerSecurity(config.tls, config.auth, [])
    bound = {each.value: "127.0.0.1:1" for each in CollectorListener}
    assert protection.describe(bound, config.listeners).count("(plaintext, token)") == len(bound)
