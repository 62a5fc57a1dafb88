"""Configuration from files and flags; all problems are reported at once."""

# ruff: noqa: RUF009 - setting() and section() return dataclasses.field(), which is what a default should be
from __future__ import annotations

import argparse
import json
import os
import stat
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.config.listeners import write_ready
from handrail.config.schema import (
    ConfigError,
    Given,
    Problem,
    add_flags,
    given_flags,
    keys,
    load,
    parse,
    plain,
    section,
    setting,
    to_yaml,
)
from handrail.config.types import Address, Duration, Size, Url, nearest
from handrail.records import Role
from handrail_collector.config import CollectorConfig
from handrail_sidecar.settings import RequestIdMode, SidecarConfig, TraceContextMode

GOOD = "role: edge\nlisten: 127.0.0.1:8000\nupstream: http://127.0.0.1:8100\n"


def problems(text: str, cls: type = SidecarConfig, **overrides: Given) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(cls, text, "edge.yaml", overrides)
    return {problem.path: problem for problem in caught.value.problems}


class Mode(str, Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    ratio: float = setting(0.5, help="a share", example="0.25", at_least=0.0, at_most=1.0)
    enabled: bool = setting(False, help="on or off", example="true")


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """A config with one key of every kind."""

    name: str = setting(help="a name", example="a")
    count: int = setting(1, help="a number", example="2", at_least=1)
    wait: Duration = setting(Duration(10**9), help="a wait", example="1s")
    size: Size = setting(Size(1024), help="a size", example="1KiB")
    at: Address | None = setting(None, help="an address", example="127.0.0.1:1", unset="off")
    to: Url = setting(Url("http://a:1"), help="a URL", example="http://b:2")
    mode: Mode = setting(Mode.FAST, help="a mode", example="safe")
    file: Path | None = setting(None, help="a file", example="/a", unset="none")
    many: tuple[str, ...] = setting((), help="several", example="[a, b]", unset="none")
    token: str = setting("", help="a secret", example="abc", secret=True, unset="none")
    inner: Inner = section(Inner)


def test_every_kind_is_read_from_a_file() -> None:
    text = """
name: on
count: 7
wait: 1h30m
size: 1.5MiB
at: "[::1]:4317"
to: https://example.test:4318/v1
mode: safe
file: /var/x
many: [a, "yes", 12:30]
token: s3cret
inner: {ratio: 0.25, enabled: yes}
"""
    config = parse(Every, text, "x.yaml")
    assert config == Every(
        name="on",  # YAML 1.1 reads it as True
        count=7,
        wait=Duration(90 * 60 * 10**9),
        size=Size(3 * 2**19),
        at=Address("::1", 4317),
        to=Url("https://example.test:4318/v1"),
        mode=Mode.SAFE,
        file=Path("/var/x"),
        many=("a", "yes", "12:30"),
        token="s3cret",
        inner=Inner(ratio=0.25, enabled=True),
    )


def test_a_shown_configuration_is_read_back() -> None:
    config = parse(Every, "{name: x, wait: 1500ms, size: 1000B, at: 127.0.0.1:0, many: [p, q], token: t}", "x.yaml")
    assert parse(Every, to_yaml(config, masked=False), "y.yaml") == config
    sidecar = parse(SidecarConfig, GOOD + "collector: {headers: {authorization: Bearer x}}\n", "x.yaml")
    assert parse(SidecarConfig, to_yaml(sidecar, masked=False), "y.yaml") == sidecar


def test_secrets_are_masked_wherever_they_are_shown() -> None:
    config = parse(SidecarConfig, GOOD + "collector: {headers: {authorization: Bearer sesame}}\n", "x.yaml")
    assert "sesame" not in to_yaml(config)
    assert "****" in to_yaml(config)
    assert plain(parse(Every, "{name: x, token: sesame}", "x.yaml"))["token"] == "****"
    broken = parse_error("collector: {headers: {authorization: [sesame], other: ''}}\nupstream: http://user:sesame@host\n")
    assert "sesame" not in broken


def parse_error(text: str, cls: type = SidecarConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(cls, text, "edge.yaml")
    return str(caught.value)


def test_all_problems_come_at_once_each_with_its_line_and_an_example() -> None:
    found = problems(
        "rol: edge\nlisten: 8000\ncollector:\n  endpont: http://x\ndrain: 30\ndrain: 5m\nspool: {max_bytes: 64Mb}\nadmin: off\n"
    )
    assert set(found) == {"rol", "role", "listen", "collector.endpont", "drain"}
    assert found["collector.endpont"].nearest == "endpoint"
    assert found["collector.endpont"].where == "edge.yaml:4"
    assert "collector: {endpoint: " in found["collector.endpont"].example
    assert found["rol"].nearest == "role"
    assert found["listen"].value == "'8000'"
    assert found["listen"].nearest == "127.0.0.1:8000"
    assert all(problem.example for path, problem in found.items() if path != "drain")


def test_an_unknown_key_reads_as_the_style_says() -> None:
    assert "collector.endpont: unknown; did you mean endpoint? (edge.yaml:1)" in parse_error("collector: {endpont: x}")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("endpoint", "collector.endpoint"),
        ("spool_dir", "spool.dir"),
        ("Otlp-Grpc", "otlp_grpc"),
        ("colector", "collector"),
        ("trace_contxt", "trace_context"),
        ("zzzz", None),
    ],
)
def test_the_nearest_key_is_found_anywhere(key: str, expected: str | None) -> None:
    assert problems(f"{key}: x\n")[key].nearest == expected


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        pytest.param("role: unknown", "role", "must be one of edge, router, prefill, decode, collocated", id="narrowed-enum"),
        pytest.param("role: decod", "role", "must be one of", id="enum"),
        pytest.param("drain: 30", "drain", "is not a duration", id="no-unit"),
        pytest.param("drain: -1s", "drain", "is not a duration", id="negative"),
        pytest.param("spool: {max_bytes: 64}", "spool.max_bytes", "is not a size", id="size-without-unit"),
        pytest.param("spool: {max_bytes: 1KiB}", "spool.max_bytes", "must be at least 1MiB", id="too-small"),
        pytest.param("spool: 64MiB", "spool", "is a section", id="a-value-for-a-section"),
        pytest.param("listen: {a: b}", "listen", "must be one value", id="a-section-for-a-value"),
        pytest.param("listen: [127.0.0.1:1]", "listen", "must be one value", id="a-list-for-a-value"),
        pytest.param("listen: ::1:80", "listen", "is not HOST:PORT", id="bare-ipv6"),
        pytest.param("listen: 127.0.0.1:70000", "listen", "a port is 0 to 65535", id="port"),
        pytest.param("listen: 'my host:80'", "listen", "is not HOST:PORT", id="blank-in-host"),
        pytest.param("upstream: 127.0.0.1:8100", "upstream", "must begin with http://", id="no-scheme"),
        pytest.param("upstream: https://a:1", "upstream", "must begin with http://", id="other-scheme"),
        pytest.param("upstream: http://a:1/v1", "upstream", "must have only a scheme, host and port", id="path"),
        pytest.param("upstream: http://", "upstream", "has no host", id="no-host"),
        pytest.param("upstream: http://a:b", "upstream", "is not a URL", id="port-no-number"),
        pytest.param("upstream: http://u:p@a:1", "upstream", "contains a user or password", id="credentials"),
        pytest.param("collector: {endpoint: 'http://a:1?x=1'}", "collector.endpoint", "must not have a query", id="query"),
        pytest.param("collector: {headers: x}", "collector.headers", "must be a mapping", id="headers"),
        pytest.param("drain: ''", "drain", "is empty", id="empty"),
        pytest.param("spool: {dir: ~nobody-here-9/x}", "spool.dir", "names a home folder", id="home"),
    ],
)
def test_a_broken_rule_is_reported(text: str, path: str, words: str) -> None:
    assert words in problems(text)[path].rule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("a: [1", "is not valid YAML", id="syntax"),
        pytest.param("- a\n- b", "must be a mapping", id="list"),
        pytest.param("? [a, b]\n: c", "unknown", id="key-that-is-no-text"),
        pytest.param("&a role: *a\nx: &b [*b]", "unknown", id="anchors"),
        pytest.param("role: !!python/object/apply:os.system [id]", "must be one value", id="tags-are-not-obeyed"),
        pytest.param("role: edge\x00", "is not valid YAML", id="nul"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, words: str) -> None:
    assert words in parse_error(text)


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"role: \xff\xfe")
    for file, words in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "latin.yaml", "must be UTF-8"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(SidecarConfig, file)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for text in ("", "# nothing\n", "decision:\n", "decision: {}\n"):
        file.write_text(text)
        assert load(CollectorConfig, file) == CollectorConfig()


def parse_or_problems(cls: type, text: str) -> tuple[Any, ...]:
    try:
        return (parse(cls, text, "x.yaml"),)
    except ConfigError as error:
        return error.problems


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    for cls in (SidecarConfig, CollectorConfig):
        assert parse_or_problems(cls, text)


@given(st.integers(0, 2**62))
def test_durations_and_sizes_are_shown_exactly(number: int) -> None:
    assert parse(Every, f"{{name: x, wait: {Duration(number)}, size: {Size(number)}}}", "x.yaml") == Every(
        name="x", wait=Duration(number), size=Size(number)
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(7 * 86400, "7d"), (366 * 86400, "366d"), (25 * 3600, "25h"), (90 * 60, "90m"), (0, "0s")]
)
def test_a_duration_is_shown_in_the_largest_unit_that_fits(seconds: int, text: str) -> None:
    assert str(Duration(seconds * 10**9)) == text


# --- flags ----------------------------------------------------------------------------------------------------------------


def from_flags(cls: type, *flags: str, file: str | None = None) -> Any:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, cls)
    return parse(cls, file, "edge.yaml", given_flags(vars(parser.parse_args(flags)), cls))


def test_flags_win_over_the_file() -> None:
    config = from_flags(
        SidecarConfig, "--role", "decode", "--collector", "grpc://c:4317", "--admin", "off", "--drain", "5m", file=GOOD
    )
    assert (config.role, config.collector.endpoint, config.admin) == (Role.DECODE, Url("grpc://c:4317"), None)
    assert config.drain.seconds == 300.0
    assert config.listen == Address("127.0.0.1", 8000)


def test_repeated_flags_make_lists_and_mappings() -> None:
    headers = from_flags(SidecarConfig, "--collector-header", "a=1", "--collector-header", "b=x=y", file=GOOD).collector.headers
    assert headers == {"a": "1", "b": "x=y"}
    forward = from_flags(CollectorConfig, "--forward", "http://a:1", "--forward", "grpc://b:2").forward
    assert forward == (Url("http://a:1"), Url("grpc://b:2"))


def test_a_wrong_flag_is_named_as_such() -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(SidecarConfig, "--role", "edge", "--listen", "x")
    assert caught.value.problems[0].where == "--listen"
    with pytest.raises(ConfigError, match="must be NAME=VALUE") as caught:
        from_flags(SidecarConfig, "--collector-header", "sesame")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("cls", [SidecarConfig, CollectorConfig])
def test_every_key_has_words_an_example_that_is_valid_and_a_flag_of_its_own(cls: type) -> None:
    known = list(keys(cls))
    flags = [key.flag for key in known]
    assert len(set(flags)) == len(flags)
    for key in known:
        assert key.setting.help
        assert not key.setting.help.endswith(".")
        sections, last = key.path.split(".")[:-1], key.path.split(".")[-1]
        text = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(sections))
        text += f"{'  ' * len(sections)}{last}: {key.setting.example}"
        wrong = [each.path for each in parse_or_problems(cls, text) if isinstance(each, Problem)]
        assert key.path not in wrong  # others may be missing


# --- the sidecar and the collector ----------------------------------------------------------------------------------------


def test_defaults_that_follow_from_other_values() -> None:
    edge = parse(SidecarConfig, GOOD, "x.yaml")
    assert edge.instance == "127.0.0.1:8100"
    assert edge.request_id is RequestIdMode.ADD
    assert edge.trace_context is TraceContextMode.SET
    assert edge.collector.endpoint == "http://127.0.0.1:4318"
    decode = parse(SidecarConfig, "{role: decode, upstream: 'http://d/', otlp_grpc: '127.0.0.1:0'}", "x.yaml")
    assert decode.instance == "d:80"
    assert decode.request_id is RequestIdMode.PASS
    assert parse(SidecarConfig, GOOD + "request_id: pass", "x.yaml").request_id is RequestIdMode.PASS


@pytest.mark.parametrize(
    ("text", "path"),
    [
        pytest.param("{role: edge, listen: '127.0.0.1:1', instance: x}", "upstream", id="proxy-to-nowhere"),
        pytest.param("{role: edge, instance: x}", "listen", id="nothing-to-observe"),
        pytest.param("{role: decode, otlp_grpc: '127.0.0.1:0'}", "instance", id="nameless"),
        pytest.param(
            "{role: edge, listen: '0.0.0.0:80', plaintext: proxy, upstream: 'http://localhost'}", "upstream", id="itself"
        ),
        pytest.param(
            "{role: edge, instance: x, otlp_grpc: '127.0.0.1:9', otlp_http: '127.0.0.1:9'}", "otlp_http", id="same-port"
        ),
    ],
)
def test_values_that_do_not_go_together(text: str, path: str) -> None:
    assert path in problems(text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("{otlp_grpc: off, otlp_http: off}", "otlp_http"),
        ("{decision: {max_open: 5s}}", "decision.engine_wait"),
        ("{api: '127.0.0.1:4317'}", "api"),
    ],
)
def test_collector_values_that_do_not_go_together(text: str, path: str) -> None:
    assert path in problems(text, CollectorConfig)


def test_the_ready_file_appears_whole(tmp_path: Path) -> None:
    file = tmp_path / "run" / "edge.json"
    write_ready(file, {"proxy": "127.0.0.1:8000"})
    write_ready(file, {"proxy": "127.0.0.1:8001"})
    assert json.loads(file.read_text()) == {"pid": os.getpid(), "addresses": {"proxy": "127.0.0.1:8001"}}
    assert os.listdir(file.parent) == ["edge.json"]
    assert stat.S_ISREG(file.stat().st_mode)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [("endpont", ["endpoint", "headers"], "endpoint"), ("A-B", ["a_b"], "a_b"), ("xyz", ["endpoint"], None), ("x", [], None)],
)
def test_nearest(name: str, known: list[str], expected: str | None) -> None:
    assert nearest(name, known) == expected


@pytest.mark.parametrize(
    ("url", "port"), [("http://a", 80), ("https://a", 443), ("grpc://a", 4317), ("grpcs://a", 4317), ("http://[::1]:9/x", 9)]
)
def test_a_url_knows_its_port(url: str, port: int) -> None:
    assert Url(url).port == port
