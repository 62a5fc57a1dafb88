"""What users write as an endpoint: case G10's values and the standard variables."""

from __future__ import annotations

import pytest

from handrail.otlp.client import OtlpClient
from handrail.otlp.endpoint import parse_endpoint
from handrail.otlp.settings import ClientSettings, parse_headers
from handrail.otlp.signals import Signal


@pytest.mark.parametrize(
    ("text", "protocol", "insecure", "expected"),
    [
        ("collector:4317", None, None, "grpc://collector:4317"),
        ("collector", None, None, "grpc://collector:4317"),
        ("collector:4317", None, False, "grpcs://collector:4317"),
        ("collector:4317", None, True, "grpc://collector:4317"),
        ("collector:4318", None, None, "http://collector:4318"),
        ("collector", "http/protobuf", None, "http://collector:4318"),
        ("collector:4318", "grpc", None, "grpc://collector:4318"),
        ("http://collector:4317", None, None, "grpc://collector:4317"),
        ("http://collector:4317", "http/protobuf", None, "http://collector:4317"),
        ("https://collector:4317", None, None, "grpcs://collector:4317"),
        ("http://collector:4318", None, None, "http://collector:4318"),
        ("HTTP://collector:4318/", None, None, "http://collector:4318"),
        ("http://collector:4318/v1/traces", None, None, "http://collector:4318"),
        ("http://collector:4318/v1/logs/", None, None, "http://collector:4318"),
        ("http://collector/otlp/v1/traces", None, None, "http://collector:80/otlp"),
        ("https://gateway.example/otlp", None, None, "https://gateway.example:443/otlp"),
        ("grpc://collector", None, None, "grpc://collector:4317"),
        ("grpcs://collector:443", None, None, "grpcs://collector:443"),
        ("http://[::1]:4318", None, None, "http://[::1]:4318"),
        (" [::1]:4317 ", None, None, "grpc://[::1]:4317"),
    ],
)
def test_endpoints(text: str, protocol: str | None, insecure: bool | None, expected: str) -> None:
    assert str(parse_endpoint(text, protocol=protocol, insecure=insecure)) == expected


def test_every_signal_has_its_path() -> None:
    endpoint = parse_endpoint("https://gateway.example/otlp/v1/traces/")
    assert [endpoint.url(signal) for signal in Signal] == [
        "https://gateway.example:443/otlp/v1/traces",
        "https://gateway.example:443/otlp/v1/metrics",
        "https://gateway.example:443/otlp/v1/logs",
    ]


@pytest.mark.parametrize(
    ("text", "protocol", "insecure", "word"),
    [
        ("", None, None, "no host"),
        ("http://", None, None, "no host"),
        (":4317", None, None, "no host"),
        ("collector:0", None, None, "no host and port"),
        ("collector:99999", None, None, "valid: http://collector:4318"),
        ("collector:port", None, None, "valid: http://collector:4318"),
        ("ftp://collector", None, None, "'ftp' is not known"),
        ("unix:///run/otlp.sock", None, None, "'unix' is not known"),
        ("https://collector:4318", None, True, "write http://"),
        ("grpcs://collector", None, True, "write grpc://"),
        ("grpc://collector", "http/protobuf", None, "the scheme says gRPC"),
        ("collector:4317", "thrift", None, "valid are grpc, http/protobuf"),
        ("http://collector:4318/?token=s3cret", None, None, "use headers for a token"),
    ],
)
def test_endpoints_that_cannot_work(text: str, protocol: str | None, insecure: bool | None, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_endpoint(text, protocol=protocol, insecure=insecure)


def test_a_password_in_the_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="use headers") as problem:
        parse_endpoint("http://me:s3cret@collector:4318")
    assert "s3cret" not in str(problem.value)


def test_the_standard_variables() -> None:
    settings = ClientSettings.from_environ(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4317",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20s3cret, x-tenant=a",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "ca.pem",
            "OTEL_EXPORTER_OTLP_INSECURE": "False",
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": "",
        },
        "http://127.0.0.1:4318",
    )
    assert settings == ClientSettings(
        endpoint="https://collector:4317",
        protocol="grpc",
        headers={"authorization": "Bearer s3cret", "x-tenant": "a"},
        compression="none",
        timeout_s=2.5,
        ca_file="ca.pem",
        insecure=False,
    )
    assert "s3cret" not in repr(settings)
    assert ClientSettings.from_environ({}, "http://127.0.0.1:4318") == ClientSettings(endpoint="http://127.0.0.1:4318")


@pytest.mark.parametrize("text", ["novalue", "=x", "a=b,,c"])
def test_headers_without_a_name_or_value(text: str) -> None:
    with pytest.raises(ValueError, match="valid: authorization="):
        parse_headers(text)


def test_all_problems_of_the_settings_are_reported() -> None:
    with pytest.raises(ValueError, match=r"compression 'br'.*timeout_s 0.*cert_file and key_file"):
        OtlpClient("collector:4317", compression="br", timeout_s=0, cert_file="x")
    with pytest.raises(ValueError, match="milliseconds"):
        ClientSettings.from_environ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}, "collector:4317")
