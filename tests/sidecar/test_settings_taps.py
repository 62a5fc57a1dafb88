"""Settings of the log and metrics taps."""

from __future__ import annotations

import pytest

from handrail.config.schema import ConfigError, parse
from handrail_sidecar.settings import LogStart, SidecarConfig


def config(text: str) -> SidecarConfig:
    return parse(SidecarConfig, f"role: decode\n{text}", "test.yaml")


def problems(text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        config(text)
    return {problem.path: problem.rule for problem in caught.value.problems}


def test_a_log_file_alone_is_enough_to_observe() -> None:
    found = config("instance: 10.0.0.7:8200\nlog: {files: [/var/log/vllm.log]}\n")
    assert (found.log.files, found.log.start) == (("/var/log/vllm.log",), LogStart.END)


@pytest.mark.parametrize("url", ["http://engine:8200", "http://engine:8200/", "http://engine:8200/metrics"])
def test_a_metrics_page_names_the_instance_and_is_slash_metrics(url: str) -> None:
    found = config(f"metrics: {{url: {url}}}\n")
    assert (found.instance, found.metrics.url) == ("engine:8200", "http://engine:8200/metrics")


def test_a_path_of_its_own_is_kept() -> None:
    assert config("metrics: {url: http://engine:9400/prometheus}\n").metrics.url == "http://engine:9400/prometheus"


def test_the_upstream_names_the_instance_before_the_metrics_page() -> None:
    text = "listen: 127.0.0.1:8201\nupstream: http://127.0.0.1:8200\nmetrics: {url: http://127.0.0.1:9000}\n"
    assert config(text).instance == "127.0.0.1:8200"


def test_mistakes_are_reported() -> None:
    assert "log.files" in problems("instance: a:1\nlog: {files: [x, x]}\n")
    assert "log.files (its log) or metrics.url" in problems("instance: a:1\n")["listen"]
    assert "without upstream and metrics.url" in problems("log: {files: [x]}\n")["instance"]
    assert "at least 100ms" in problems("metrics: {url: http://a:1, interval: 1ms}\n")["metrics.interval"]
    assert "metrics.url" in problems("metrics: {url: a:1}\n")


def test_a_token_is_not_shown() -> None:
    from handrail.config.schema import plain

    shown = plain(config('metrics: {url: http://a:1, headers: {authorization: "Bearer secret"}}\n'))
    assert "secret" not in repr(shown)
