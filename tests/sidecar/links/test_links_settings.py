"""Whether and how a sidecar reads its host's links."""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.config.schema import ConfigError, parse
from handrail_sidecar.settings import SidecarConfig


def config(text: str = "", role: str = "decode") -> SidecarConfig:
    return parse(
        SidecarConfig, f"role: {role}\ninstance: 10.0.0.7:8200\nmetrics: {{url: http://127.0.0.1:8200}}\n{text}", "test.yaml"
    )


@pytest.mark.parametrize(
    ("role", "sample", "reads"),
    [
        ("decode", "auto", True),
        ("prefill", "auto", True),
        ("collocated", "auto", True),
        ("edge", "auto", False),
        ("router", "auto", False),
        ("edge", "on", True),
        ("decode", "off", False),
    ],
)
def test_links_are_sampled_beside_an_engine_unless_set_otherwise(role: str, sample: str, reads: bool) -> None:
    assert config(f"links: {{sample: {sample}}}\n", role).samples_links is reads


def test_what_is_read_and_where() -> None:
    links = config("links: {devices: ['mlx5_*', bond0], interval: 1s, sysfs: /host/sys}\n").links
    assert (links.devices, links.interval.ns, links.sysfs) == (("mlx5_*", "bond0"), 10**9, Path("/host/sys"))


@pytest.mark.parametrize("text", ["links: {interval: 1ms}", "links: {sample: perhaps}", "links: {device: [eth0]}"])
def test_wrong_settings_are_reported(text: str) -> None:
    with pytest.raises(ConfigError):
        config(f"{text}\n")
