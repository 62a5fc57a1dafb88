"""Requests to a collector that is absent, or to a server that is no collector."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from handrail_cli.client import HttpBackend, StoreBackend, query_parameters, row_source
from handrail_cli.errors import CliError
from handrail_collector.api.query import parse_query
from handrail_collector.store.filters import RequestFilter


@contextmanager
def server(status: int, body: bytes) -> Iterator[str]:
    """Answer every HTTP request with the same response; yield the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            thread.join()


ERROR = json.dumps({"error": {"what": "unknown parameter 'outcme'", "where": "q", "valid": "v", "nearest": ["outcome"]}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "what", "exit_code"),
    [
        pytest.param(200, b"<html>", "this server is no Handrail collector", 1, id="a-web-page"),
        pytest.param(502, b"", "this server is no Handrail collector", 1, id="a-proxy"),
        pytest.param(500, b"[1]", "answered HTTP 500", 1, id="an-error-of-another-shape"),
        pytest.param(200, b'{"requests": [{"ttft": 1}]}', "the collector's answer is not understood", 1, id="another-version"),
        pytest.param(400, ERROR, "unknown parameter 'outcme'", 2, id="refused"),
        pytest.param(503, ERROR, "unknown parameter 'outcme'", 1, id="not-ready"),
    ],
)
def test_an_answer_of_another_kind_is_reported(status: int, body: bytes, what: str, exit_code: int) -> None:
    with server(status, body) as url, pytest.raises(CliError) as caught:
        HttpBackend(url).requests(RequestFilter())
    assert what in caught.value.what
    assert caught.value.exit_code == exit_code


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1", "http://no such host:1"])
def test_no_answer_says_where_to_look(url: str) -> None:
    with pytest.raises(CliError) as caught:
        HttpBackend(url).requests(RequestFilter())
    assert caught.value.where == url
    assert "HANDRAIL_API" in caught.value.valid


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no such folder"):
        StoreBackend(tmp_path / "none")


def test_only_the_given_filters_are_sent() -> None:
    assert query_parameters(RequestFilter()) == {}
    request_filter = RequestFilter(since_unix_ns=5, sort="ttft", descending=False, min_ttft_ns=7, limit=3)
    assert query_parameters(request_filter) == {
        "since_unix_ns": "5",
        "sort": "ttft",
        "descending": "false",
        "min_ttft_ns": "7",
        "limit": "3",
    }
    assert parse_query(query_parameters(request_filter).items(), 0) == request_filter


@pytest.mark.parametrize(
    ("flag", "variable", "expected"),
    [
        (None, None, "http://127.0.0.1:4380"),
        (None, "http://c:1/", "http://c:1"),
        ("c:2", "http://c:1", "http://c:2"),
    ],
)
def test_the_flag_wins_over_the_variable(
    flag: str | None, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HANDRAIL_API", raising=False)
    if variable:
        monkeypatch.setenv("HANDRAIL_API", variable)
    assert row_source(argparse.Namespace(api=flag, data=None)).where == expected
