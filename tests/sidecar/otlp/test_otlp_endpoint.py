"""What users write as an endpoint: case G10's values."""

from __future__ import annotations

import pytest

from handrail.otlp.client import OtlpClient
from handrail.otlp.endpoint import parse_endpoint
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Signal


@pytest.mark.parametrize(
    ("text", "protocol", "expected"),
    [
        ("collector:4317", None, "grpc://collector:4317"),
        ("collector", None, "grpc://collector:4317"),
        ("collector:4318", None, "http://collector:4318"),
        ("collector", "http/protobuf", "http://collector:4318"),
        ("collector:4318", "grpc", "grpc://collector:4318"),
        ("http://collector:4317", None, "grpc://collector:4317"),
        ("http://collector:4317", "http/protobuf", "http://collector:4317"),
        ("https://collector:4317", None, "grpcs://collector:4317"),
        ("http://collector:4318", None, "http://collector:4318"),
        ("HTTP://collector:4318/", None, "http://collector:4318"),
        ("http://collector:4318/v1/traces", None, "http://collector:4318"),
        ("http://collector:4318/v1/logs/", None, "http://collector:4318"),
        ("http://collector/otlp/v1/traces", None, "http://collector:80/otlp"),
        ("https://gateway.example/otlp", None, "https://gateway.example:443/otlp"),
        ("grpc://collector", None, "grpc://collector:4317"),
        ("grpcs://collector:443", None, "grpcs://collector:443"),
        ("http://[::1]:4318", None, "http://[::1]:4318"),
        (" [::1]:4317 ", None, "grpc://[::1]:4317"),
    ],
)
def test_endpoints(text: str, protocol: str | None, expected: str) -> None:
    assert str(parse_endpoint(text, protocol=protocol)) == expected


def test_every_signal_has_its_path() -> None:
    endpoint = parse_endpoint("https://gateway.example/otlp/v1/traces/")
    assert [endpoint.url(signal) for signal in Signal] == [
        "https://gateway.example:443/otlp/v1/traces",
        "https://gateway.example:443/otlp/v1/metrics",
        "https://gateway.example:443/otlp/v1/logs",
    ]


@pytest.mark.parametrize(
    ("text", "protocol", "word"),
    [
        ("", None, "no host"),
        ("http://", None, "no host"),
        (":4317", None, "no host"),
        ("collector:0", None, "no host and port"),
        ("collector:99999", None, "valid: http://collector:4318"),
        ("collector:port", None, "valid: http://collector:4318"),
        ("ftp://collector", None, "'ftp' is not known"),
        ("unix:///run/otlp.sock", None, "'unix' is not known"),
        ("grpc://collector", "http/protobuf", "the scheme is for gRPC"),
        ("collector:4317", "thrift", "valid are grpc, http/protobuf"),
        ("http://collector:4318/?token=s3cret", None, "use a header for a token"),
    ],
)
def test_endpoints_that_cannot_work(text: str, protocol: str | None, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_endpoint(text, protocol=protocol)


def test_a_password_in_the_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="use a header") as problem:
        parse_endpoint("http://me:s3cret@collector:4318")
    assert "s3cret" not in str(problem.value)


def test_all_problems_of_the_settings_are_reported() -> None:
    assert "s3cret" not in repr(ClientSettings(endpoint="collector:4317", headers={"authorization": "Bearer s3cret"}))
    with pytest.raises(ValueError, match=r"compression 'br'.*timeout_s 0.*cert_file and key_file"):
        OtlpClient(ClientSettings(endpoint="collector:4317", compression="br", timeout_s=0, cert_file="x"))
