"""Errors about a wrong file, flag or variable never repeat its secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from handrail.config.masking import may_be_secret, shown_key
from handrail.config.schema import ConfigError, Given, load, parse
from handrail_cli.main import main
from handrail_collector.config import CollectorConfig
from handrail_sidecar.settings import SidecarConfig

SECRET = "hunter2Zq8vLk3TnWx5RbYd7Mc9"
SPELLED = ("hunter2", SECRET, "Zq8vLk3TnWx5")

FILES = {
    "a PEM key": f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n{SECRET}=\n-----END PRIVATE KEY-----\n",
    "an encrypted PEM key": f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES,{SECRET}\n\n{SECRET}\n",
    "a token": f"{SECRET}\n",
    "a token and a colon": f"{SECRET}:\n",
    "a password file": f"admin:{SECRET}\n",
    "an environment": f"export TOKEN={SECRET}\nA={SECRET}\n",
    "a netrc": f"machine x login y password {SECRET}\n",
    "a token as a key": f"{SECRET}: 1\n{SECRET}: 2\n",
    "a token as a section": f"collector:\n  {SECRET}: 1\n",
    "a token in quotes cut off": f'collector: {{headers: {{authorization: "Bearer {SECRET}\n',
    "a tab after it": f"collector:\n\theaders: {SECRET}\n",
    "an alias": f"collector: {{headers: {{authorization: *{SECRET}}}}}\n",
    "an anchor twice": f"a: &{SECRET} 1\nb: &{SECRET} 2\nc: *x\n",
    "a tag": f"collector: !{SECRET}!x y\n",
    "a directive": f"%{SECRET} x\n---\na: 1\n",
    "headers as text": f"collector: {{headers: 'authorization=Bearer {SECRET}'}}\n",
    "headers as a list": f"collector: {{headers: ['authorization: Bearer {SECRET}']}}\n",
    "a header's name": f"collector: {{headers: {{'authorization=Bearer {SECRET}': ''}}}}\n",
    "set in too far": f"collector: {{endpoint: {{authorization: {SECRET}}}}}\n",
    "a list for a value": f"collector: {{endpoint: [{SECRET}, b]}}\n",
    "the wrong setting": f"drain: 'Bearer {SECRET}'\n",
    "a token for a number": f"drain: {SECRET}\n",
    "a user in a URL": f"collector: {{endpoint: 'http://admin:{SECRET}@h:1'}}\n",
    "a user in an address": f"listen: 'http://admin:{SECRET}@h:1'\n",
    "a query in a URL": f"collector: {{endpoint: 'http://h:1/?token={SECRET}'}}\n",
    "a port that is a password": f"collector: {{endpoint: 'http://h:{SECRET}'}}\n",
    "a key in a value": f"listen: |\n  -----BEGIN PRIVATE KEY-----\n  {SECRET}\n",
    "two documents": f"a: 1\n---\n{SECRET}: {SECRET}\n",
}


@pytest.mark.parametrize("kind", [SidecarConfig, CollectorConfig])
@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_a_wrong_file_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type, text: str) -> None:
    file = tmp_path / "given"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(kind, file)
    output = str(error.value) + json.dumps([str(problem) for problem in error.value.problems])
    name = "sidecar" if kind is SidecarConfig else "collector"
    for arguments in ([], ["--json"]):
        assert main(["config", "check", str(file), "--kind", name, *arguments]) == 2
        output += "".join(capsys.readouterr())
    assert [each for each in SPELLED if each in output] == []
    assert str(file) in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--collector-header", f"authorization:Bearer {SECRET}"],
        ["--collector-token", SECRET],
        [f"--collector-token={SECRET}"],
        ["--drain", SECRET],
        ["--collector-endpoint", f"http://admin:{SECRET}@h:1"],
        ["--metrics-header", SECRET],
        [SECRET],
    ],
)
def test_a_wrong_flag_is_not_repeated(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    for more in ([], ["--json"]):
        assert main(["sidecar", *arguments, *more]) == 2
        output = "".join(capsys.readouterr())
        assert [each for each in SPELLED if each in output] == []
        assert output


def test_a_secret_that_comes_from_a_flag_is_masked_in_the_problem() -> None:
    with pytest.raises(ConfigError) as error:
        parse(SidecarConfig, None, "x", {"drain": Given(f"Bearer {SECRET}", "--drain")})
    assert SECRET not in str(error.value)
    assert "****" in str(error.value)


@pytest.mark.parametrize("text", ["12:30", "http://127.0.0.1:4318", "/var/log/vllm/decode.log", "10 parsecs", "prefil", "-1", ""])
def test_ordinary_mistakes_are_shown(text: str) -> None:
    assert not may_be_secret(repr(text))


def test_ordinary_keys_are_shown() -> None:
    assert shown_key("collector.endpiont") == "collector.endpiont"
    assert shown_key(f"collector.{SECRET}") == "collector.****"
